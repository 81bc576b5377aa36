"""Compares the forms of AdamW on the 152 tensors (22 million parameters) of a ViT-S/16.

    python benchmarks/optimizer_forms.py --output benchmarks/results/optimizer_forms_cpu.json

Two spans are measured. `update` is everything after the backward pass: clipping by the global norm, the
optimizer's step, and zero_grad. `step` is a whole training step on tiny images, so that passes over
parameters and gradients dominate, not the layers' arithmetic; here a form pays for moving gradients during
the backward pass. Contestants whose name ends in `, clip first` clip with torch.nn.utils.clip_grad_norm_, as
users do; the others use Penstock's `clipped_step`. All run in one process in rounds whose order is reversed
each time; ratios are medians of the ratios within a round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.config.model import PRESETS
from penstock.models import create
from penstock.optim import clipped_step, make_optimizer, parameter_groups
from penstock.report.record import environment

CONFIG = replace(PRESETS["vit-s16"], image_size=32)
MAX_NORM = 1.0
WARM_UP = 3
REFERENCE = "fused, clip first"


@dataclass
class Contestant:
    """One form of the optimizer on its own copy of the model."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    update: Callable[[], Any]
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"update": [], "step": []})


def contestants(dtype: torch.dtype, device: torch.device) -> list[Contestant]:
    """Every form; those that can fold clipping appear twice."""
    found = []
    for form in ("loop", "foreach", "fused", "contiguous"):
        for folded in (False, True):
            if folded and form in ("loop", "foreach"):
                continue
            torch.manual_seed(0)
            model = create(CONFIG).to(device=device, dtype=dtype)
            groups = parameter_groups(model, weight_decay=0.05)
            optimizer = make_optimizer(groups, form, lr=1e-3)
            parameters = list(model.parameters())

            def clip_first(
                optimizer: torch.optim.Optimizer = optimizer, parameters: list[Tensor] = parameters
            ) -> None:
                nn.utils.clip_grad_norm_(parameters, MAX_NORM)
                optimizer.step()

            def fold(optimizer: torch.optim.Optimizer = optimizer) -> None:
                clipped_step(optimizer, max_norm=MAX_NORM)

            name = form if folded else f"{form}, clip first"
            found.append(Contestant(name, model, optimizer, fold if folded else clip_first))
    return found


def measure(contestant: Contestant, images: Tensor, *, keep: bool) -> None:
    """One training step; the span after the backward pass is timed on its own."""
    device = images.device
    _wait(device)
    start = time.perf_counter()
    contestant.model(images).float().square().mean().backward()
    _wait(device)
    middle = time.perf_counter()
    contestant.update()
    contestant.optimizer.zero_grad()
    _wait(device)
    end = time.perf_counter()
    if keep:
        contestant.seconds["update"].append(end - middle)
        contestant.seconds["step"].append(end - start)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def run(dtype: torch.dtype, device: torch.device, rounds: int, batch: int) -> dict[str, Any]:
    """Medians, quartiles and ratios of one dtype."""
    everyone = contestants(dtype, device)
    images = torch.randn(
        batch, CONFIG.channels, CONFIG.image_size, CONFIG.image_size, device=device, dtype=dtype
    )
    for turn in range(WARM_UP + rounds):
        for contestant in everyone if turn % 2 else reversed(everyone):
            measure(contestant, images, keep=turn >= WARM_UP)
    reference = next(c for c in everyone if c.name == REFERENCE)
    parameters = list(everyone[0].model.parameters())
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "tensors": len(parameters),
        "parameters": sum(p.numel() for p in parameters),
        "rounds": rounds,
        "reference": REFERENCE,
        "contestants": {c.name: {span: _summary(c, reference, span) for span in c.seconds} for c in everyone},
    }


def _summary(contestant: Contestant, reference: Contestant, span: str) -> dict[str, float]:
    seconds = contestant.seconds[span]
    low, middle, high = statistics.quantiles(seconds, n=4)
    ratios = [theirs / mine for mine, theirs in zip(seconds, reference.seconds[span])]
    return {
        "median_ms": middle * 1e3,
        "quartile_low_ms": low * 1e3,
        "quartile_high_ms": high * 1e3,
        "least_ms": min(seconds) * 1e3,
        "times_as_fast_as_reference": statistics.median(ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--threads", type=int, help="threads of torch; as many as there are cores by default")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    results = []
    for name in arguments.dtypes:
        result = run(getattr(torch, name), torch.device(arguments.device), arguments.rounds, arguments.batch)
        results.append(result)
        print(f"\n{result['tensors']} tensors, {result['parameters']:,} parameters, {name}")
        print(f"{'':24}{'update ms':>12}{'× ' + REFERENCE:>22}{'step ms':>12}{'×':>8}")
        for contestant, spans in result["contestants"].items():
            update, step = spans["update"], spans["step"]
            print(
                f"{contestant:24}{update['median_ms']:12.2f}{update['times_as_fast_as_reference']:22.2f}"
                f"{step['median_ms']:12.2f}{step['times_as_fast_as_reference']:8.2f}"
            )
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps({**environment(), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
