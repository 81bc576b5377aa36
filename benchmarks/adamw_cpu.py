"""AdamW in one pass of C++ beside torch's fused kernel on a CPU, over the 22 million parameters of a ViT-S/16.

    OMP_NUM_THREADS=1 python benchmarks/adamw_cpu.py --output benchmarks/results/adamw_cpu.json

The timed span is the update as `TrainStep` makes it from the end of the backward pass on: gradients collected to master
weights where there are any, the norm, clipping, the step, half copies and averages. Both contestants are built by the
same calls; only the kernel is there or not. Rounds are interleaved, and their order is reversed each time. Times are of
the processor, so that other work on the machine counts little. Cells of other machines in the output stay.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from penstock.config.model import PRESETS
from penstock.cpu import this_cpu
from penstock.kernels import adamw
from penstock.models import create
from penstock.optim import EMA, clipped_step, make_optimizer, parameter_groups
from penstock.optim.one_pass import SideTensors
from penstock.precision import MasterWeights
from penstock.process import set_host_memory
from penstock.report.record import environment

MODEL = "vit-s16"
KINDS = ("fp32", "fp32 masters of bf16")
WARM_UP = 3


def contestant(kind: str, *, native: bool, average: bool) -> Callable[[], float]:
    """The update of one model, by the kernel of ours or by torch's; a call returns its seconds of processor time."""
    there = adamw.has_adamw
    adamw.has_adamw = lambda: native
    try:
        torch.manual_seed(0)
        model = create(PRESETS[MODEL])
        groups = parameter_groups(model, weight_decay=0.05)
        masters, weights, publish = None, None, None
        optimizer: Any = make_optimizer(groups, "fused", lr=1e-3)
        optimizer.copies = SideTensors(
            {}, set()
        )  # so that ours takes its kernel always; torch's own ignores it
        if kind == "fp32 masters of bf16":
            masters = MasterWeights([model], [optimizer], torch.bfloat16)
            weights, publish = masters.named(model), masters.publish
        ema = (
            EMA(model, 0.999, optimizer, weights=weights, publish=publish, every_step=True)
            if average
            else None
        )
    finally:
        adamw.has_adamw = there
    parameters = list(model.parameters())
    gradients = [1e-3 * torch.randn_like(parameter) for parameter in parameters]

    def update() -> float:
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = gradient
        start = time.process_time()
        if masters is not None:
            masters.collect()
        clipped_step(optimizer, max_norm=1.0)
        if masters is not None:
            masters.publish()
        if ema is not None:
            ema.update()
        seconds = time.process_time() - start
        optimizer.zero_grad()
        return seconds

    return update


def cell(kind: str, rounds: int, *, average: bool) -> dict[str, Any]:
    """Milliseconds of both, and how many times as fast ours is, with the interval of 95 % of the rounds' ratios."""
    pair = [contestant(kind, native=native, average=average) for native in (False, True)]
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(WARM_UP + rounds):
        for one in (0, 1) if turn % 2 else (1, 0):
            seconds[one].append(pair[one]())
    torchs, ours = (each[WARM_UP:] for each in seconds)
    ratios = sorted(a / b for a, b in zip(torchs, ours, strict=True))
    cut = max(0, round(0.025 * rounds))
    return {
        "kind": kind, "average": average, "rounds": rounds, "torch_ms": 1e3 * statistics.median(torchs),
        "native_ms": 1e3 * statistics.median(ours), "gain": statistics.median(ratios),
        "interval": [ratios[cut], ratios[-1 - cut]], "threads": torch.get_num_threads(), "cpu": this_cpu().kind,
        "environment": environment(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, help="other cells in it stay")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    set_host_memory(keep=True)
    stored = options.output and options.output.exists()
    cells = json.loads(options.output.read_text())["cells"] if stored else {}
    for kind in KINDS:
        for average in (False, True):
            one = cell(kind, options.rounds, average=average)
            cells[f"{kind}{', averaged' * average}, {one['cpu']}, {options.threads} threads"] = one
            print(
                f"{kind + ', averaged' * average:32} torch {one['torch_ms']:7.1f} ms, ours {one['native_ms']:7.1f} ms, "
                f"{one['gain']:.2f}x ({one['interval'][0]:.2f} to {one['interval'][1]:.2f})",
                flush=True,
            )
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps({"model": MODEL, "cells": cells}, indent=1) + "\n")


if __name__ == "__main__":
    main()
