"""What the planner says of Penstock's own training steps on this machine, beside what they take.

    OMP_NUM_THREADS=1 python benchmarks/predicted_own_runs.py --output benchmarks/results/predicted_own_runs_cpu.json

Each round probes the machine and then takes steps of every model, so that a machine whose speed drifts is predicted as
it was at that time; errors are medians over the rounds. On one thread of a CPU, time is that of the processor, which
neighbours do not lengthen as they do the wall clock's; elsewhere it is the wall clock's. Memory is the most that
tensors take at one time within a step, counted one by one.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.build import Built, build
from penstock.config.machine import Machine
from penstock.config.model import PRESETS
from penstock.config.plan import Plan
from penstock.config.run import Recipe
from penstock.ladder.tensor_memory import TensorMemory
from penstock.ladder.trace import trace
from penstock.planner.outcome import Prediction
from penstock.planner.prediction import predict, predict_workload
from penstock.probe import probe, resolve_device
from penstock.report.record import environment

CASES = (
    ("vit-digits", "micro_batch=64"),
    ("vit-digits", "micro_batch=8 optimizer=fused"),
    ("vit-ti16", "micro_batch=1 optimizer=fused"),
    ("vit-ti16", "micro_batch=4 optimizer=fused host_memory=keep"),
    ("vit-s16", "micro_batch=1 optimizer=fused"),
    ("vit-s16", "micro_batch=2 attention=plain optimizer=fused"),
    ("vit-b16", "micro_batch=1 optimizer=fused"),
    ("vit-l16", "micro_batch=1 optimizer=fused"),
    ("gpt2, 4 blocks", "micro_batch=2 optimizer=fused"),
    ("gpt2, 4 blocks", "micro_batch=8 optimizer=fused host_memory=keep"),
)
LARGE = ("vit-l16",)
"""Measured in the first round only: a step takes seconds."""
STEPS_SECONDS = 0.6
"""Steps are repeated until they took so long."""


@dataclass
class Case:
    """One model under one Plan, and what was found of it, round by round."""

    model: str
    plan: Plan
    measured_bytes: int = 0
    predicted_bytes: int = 0
    seconds: list[float] = field(default_factory=list)
    predicted: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)


def gpt(device: torch.device) -> tuple[nn.Module, Callable[[nn.Module, Any], Tensor]]:
    """A small decoder of transformers, as anybody would bring it to `penstock ladder`, and its loss."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    shape = GPT2Config(
        n_embd=256, n_layer=4, n_head=4, n_positions=256, vocab_size=4096, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip

    def loss(model: nn.Module, batch: Any) -> Tensor:
        tokens, targets = batch
        logits = model(tokens).logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return GPT2LMHeadModel(shape).to(device), loss


def prepared(case: Case, device: torch.device) -> tuple[Built, Any, Callable[[Machine], Prediction]]:
    """The built model, a batch, and what predicts its step on a Machine."""
    plan, batch = case.plan, case.plan.micro_batch
    recipe = Recipe()
    if case.model in PRESETS:
        config = PRESETS[case.model]
        built = build(config, plan, device=device, recipe=recipe)
        images = torch.randn(batch, config.channels, config.image_size, config.image_size, device=device)
        targets = torch.randint(0, config.classes, (batch,), device=device)
        return built, (images, targets), lambda machine: predict(config, machine, plan)
    module, loss = gpt(device)
    tokens = torch.randint(0, 4096, (batch, 256), device=device)
    work = trace(module, (tokens, tokens), loss, batch)
    built = build(module, plan, device=device, recipe=recipe, loss=loss)
    return built, (tokens, tokens), lambda machine: predict_workload(work, machine, plan)


def tensor_bytes(built: Built, batches: Sequence[Any]) -> int:
    """The most that tensors take at one time in a step, the batch's own aside."""
    state = [value for values in built.optimizer.state.values() for value in values.values()]
    held = [
        *built.model.parameters(),
        *built.model.buffers(),
        *(one for one in state if isinstance(one, Tensor)),
    ]
    held += [one.grad for one in built.model.parameters() if one.grad is not None]
    counter = TensorMemory(held, batches[0])
    del held, state
    with counter:
        built.step(batches)
    return counter.peak


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def step_seconds(built: Built, batches: Sequence[Any], device: torch.device) -> float:
    """Seconds of one step, after one to warm up."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter
    built.step(batches)
    wait(device)
    start, steps = clock(), 0
    while steps == 0 or clock() - start < STEPS_SECONDS:
        built.step(batches)
        steps += 1
        wait(device)
    return (clock() - start) / steps


def measure(case: Case, machine: Machine, device: torch.device) -> None:
    """One round of one case."""
    built, batch, prediction = prepared(case, device)
    batches = [batch] * case.plan.accumulate
    case.seconds.append(step_seconds(built, batches, device))
    if not case.measured_bytes:
        case.measured_bytes = tensor_bytes(built, batches)
    said = prediction(machine)
    case.predicted.append(said.iteration_seconds)
    case.predicted_bytes, case.parts = said.memory_bytes, said.seconds


def summary(case: Case) -> dict[str, Any]:
    """What is written of one case."""
    errors = [said / took - 1 for said, took in zip(case.predicted, case.seconds, strict=True)]
    return {
        "model": case.model,
        "plan": case.plan.line(),
        "step_seconds": {
            "measured": statistics.median(case.seconds),
            "predicted": statistics.median(case.predicted),
        },
        "step_error": {"median": statistics.median(errors), "min": min(errors), "max": max(errors)},
        "memory_bytes": {"measured": case.measured_bytes, "predicted": case.predicted_bytes},
        "memory_error": case.predicted_bytes / case.measured_bytes - 1,
        "predicted_parts_last_round": case.parts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", help="models whose name contains this")
    parser.add_argument(
        "--precise", action="store_true", help="probe for a minute in place of seconds, each round"
    )
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    device = resolve_device(options.device)
    cases = [Case(model, Plan.parse(line)) for model, line in CASES if (options.only or "") in model]
    if device.type == "cuda":
        cases = [replace(one, plan=replace(one.plan, host_memory="release")) for one in cases]
    for turn in range(options.rounds):
        machine = probe(device, quick=not options.precise)
        for case in cases[turn % len(cases) :] + cases[: turn % len(cases)]:
            if turn and case.model in LARGE:
                continue
            measure(case, machine, device)
            gc.collect()
            print(f"round {turn + 1} of {options.rounds}: {case.model}, {case.plan.line()}", flush=True)
    found = [summary(case) for case in cases]
    for one in found:
        took, said = one["step_seconds"]["measured"], one["step_seconds"]["predicted"]
        print(
            f"{one['model']:<16}{one['plan']:<52}{1e3 * took:9.1f} ms, predicted {1e3 * said:9.1f} "
            f"({one['step_error']['median']:+.1%}); memory {one['memory_bytes']['measured'] / 2**20:8.1f} MiB "
            f"({one['memory_error']:+.1%})"
        )
    if options.output:
        alone = device.type == "cpu" and torch.get_num_threads() == 1
        record = {
            "command": "OMP_NUM_THREADS=1 python benchmarks/predicted_own_runs.py"
            if alone
            else "see the script",
            "clock": "processor time of one thread" if alone else "wall clock",
            "rounds": options.rounds,
            "threads": torch.get_num_threads(),
            "cases": found,
            "environment": environment(),
        }
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
