"""Two forms of master weights: RemainderAdamW, and torch's fused AdamW over an fp32 copy of half weights.

    OMP_NUM_THREADS=1 python benchmarks/master_weights.py --output benchmarks/results/master_weights_cpu.json

The weights are the 152 tensors (22 million parameters) of a ViT-S/16 in bf16, with the backward pass's
gradients in bf16. The timed span is the update: from the end of the backward pass to the next forward pass,
without clipping.

    copy        collect the gradients to the fp32 Parameters, torch's fused AdamW, publish the weights in bf16;
                the fp32 gradients are allocated anew at each update, as they are when cleared to None
    copy, kept  the same with fp32 gradients that stay: 4 bytes per parameter more, and no allocation
    remainder   RemainderAdamW.step, in each form that runs here

Both give the same bits if the form is torch's (checked first). All run in one process, in rounds whose order
is reversed each time. Ratios are medians of the ratios within a round. Processor time, which leaves out other
processes, is listed beside them. Bytes are counted, not estimated: those held between steps, and the peak
that torch's allocator adds during one update (on a CPU from the profiler, on a GPU from the allocator's own
peak).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.config.model import PRESETS
from penstock.kernels.remainder_adamw import has_adamw, have_triton
from penstock.models import create
from penstock.optim import parameter_groups
from penstock.optim.remainder import RemainderAdamW, from_adamw
from penstock.report.record import environment

CONFIG = PRESETS["vit-s16"]
WARM_UP = 3
REFERENCE = "copy"


@dataclass
class Contestant:
    """One form of master weights on its own copy of the weights."""

    name: str
    update: Callable[[], None]
    exact: Callable[[], list[Tensor]]
    held: int
    """Bytes between steps: the model's weights, and what the optimizer keeps."""
    seconds: list[float] = field(default_factory=list)
    processor_seconds: list[float] = field(default_factory=list)
    temporary: int = 0


def fp32_groups(device: torch.device) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model = create(replace(CONFIG)).to(device)
    return parameter_groups(model, weight_decay=0.05)


def copied(gradients: list[Tensor], device: torch.device, *, keep: bool) -> Contestant:
    groups = fp32_groups(device)
    masters = [parameter for group in groups for parameter in group["params"]]
    halves = [master.detach().bfloat16() for master in masters]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, fused=True)

    @torch.no_grad()
    def update() -> None:
        for master in masters:
            if master.grad is None:
                master.grad = torch.empty_like(master)
        torch._foreach_copy_([master.grad for master in masters], gradients)
        optimizer.step()
        torch._foreach_copy_(halves, masters)
        if not keep:
            for master in masters:
                master.grad = None

    update()
    states = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    kept = [master.grad for master in masters if master.grad is not None]
    held = sum(tensor.nbytes for tensor in (*masters, *halves, *states, *kept))
    name = "copy, kept" if keep else "copy"
    return Contestant(name, update, lambda: [master.detach() for master in masters], held)


def completed(form: Any, gradients: list[Tensor], device: torch.device) -> Contestant:
    optimizer: RemainderAdamW = from_adamw(torch.optim.AdamW(fp32_groups(device), lr=1e-3), form=form)
    halves = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for half, gradient in zip(halves, gradients):
        half.grad = gradient

    def update() -> None:
        optimizer.step()

    update()
    states = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    held = sum(tensor.nbytes for tensor in (*halves, *states))
    return Contestant(f"remainder, {form}", update, lambda: [w for _, w in optimizer.fp32_weights()], held)


def temporary_bytes(update: Callable[[], None], device: torch.device) -> int:
    """Peak of the memory that an update allocates."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        update()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(profile_memory=True) as profile:
        update()
    assert profile.profiler is not None
    now = peak = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def run(device: torch.device, rounds: int) -> dict[str, Any]:
    """Medians, quartiles, ratios and bytes per parameter of all forms."""
    shapes = [parameter for group in fp32_groups(device) for parameter in group["params"]]
    gradients = [torch.randn_like(parameter).bfloat16() * 1e-3 for parameter in shapes]
    forms = ["fused"] + (["triton"] if device.type == "cuda" and have_triton() else [])
    forms += ["native"] if device.type == "cpu" and has_adamw() else []
    copies = [copied(gradients, device, keep=keep) for keep in (False, True)]
    everyone = [*copies, *(completed(form, gradients, device) for form in forms)]
    assert all(map(torch.equal, everyone[0].exact(), everyone[2].exact())), (
        "the same form must give the same bits"
    )
    for contestant in everyone:
        contestant.temporary = temporary_bytes(contestant.update, device)
    for turn in range(WARM_UP + rounds):
        for contestant in everyone if turn % 2 else reversed(everyone):
            wait(device)
            start, started = time.perf_counter(), time.process_time()
            contestant.update()
            wait(device)
            if turn >= WARM_UP:
                contestant.seconds.append(time.perf_counter() - start)
                contestant.processor_seconds.append(time.process_time() - started)
    count = sum(parameter.numel() for parameter in shapes)
    return {
        "tensors": len(shapes),
        "parameters": count,
        "rounds": rounds,
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
        "reference": REFERENCE,
        "contestants": {c.name: summary(c, everyone[0], count) for c in everyone},
    }


def summary(contestant: Contestant, reference: Contestant, count: int) -> dict[str, float]:
    low, middle, high = statistics.quantiles(contestant.seconds, n=4)
    ratios = [theirs / mine for mine, theirs in zip(contestant.seconds, reference.seconds)]
    return {
        "median_ms": middle * 1e3,
        "quartile_low_ms": low * 1e3,
        "quartile_high_ms": high * 1e3,
        "least_ms": min(contestant.seconds) * 1e3,
        "times_as_fast_as_reference": statistics.median(ratios),
        "processor_median_ms": statistics.median(contestant.processor_seconds) * 1e3,
        "held_bytes_per_parameter": contestant.held / count,
        "temporary_bytes_per_parameter": contestant.temporary / count,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    result = run(torch.device(arguments.device), arguments.rounds)
    print(f"{result['tensors']} tensors, {result['parameters']:,} parameters")
    print(f"{'':20}{'update ms':>12}{'processor':>12}{'× ' + REFERENCE:>10}{'held B':>10}{'at once B':>12}")
    for name, facts in result["contestants"].items():
        print(
            f"{name:20}{facts['median_ms']:12.2f}{facts['processor_median_ms']:12.2f}{facts['times_as_fast_as_reference']:10.2f}"
            f"{facts['held_bytes_per_parameter']:10.2f}{facts['temporary_bytes_per_parameter']:12.2f}"
        )
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps({**environment(), **result}, indent=2) + "\n")


if __name__ == "__main__":
    main()
