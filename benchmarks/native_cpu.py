"""Training steps with kernels of Penstock's in C++ beside the same Plan without, on a CPU.

    python benchmarks/native_cpu.py --output benchmarks/results/native_cpu.json

Each cell is a model and a batch of 512 or 4,096 tokens, under the Plan that `step_parts.py` profiles: with torch's
operators, with attention of `native` where the CPU multiplies bf16 in AVX-512, with the fused operators, and with both.
Rounds are interleaved in one process; a round is one step of each. Times of one thread (OMP_NUM_THREADS=1) are of the
processor, so that other work on the machine counts little. Beside each gain stand its interval, of 95 % by the rounds'
ratios, and what the planner predicts; beside a cell, how many times as fast a step would be that were nothing but
products at their best rate. The last line is the geometric mean of the cells' best. Cells of other machines in the
output stay.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from language_train import sized
from penstock.config.fused import FUSED
from penstock.config.machine import Machine
from penstock.config.model import PRESETS
from penstock.cpu import this_cpu
from penstock.planner import predict
from penstock.planner.ideal import least_of_step
from penstock.probe import machine_for, resolve_device
from penstock.report.record import environment
from step_parts import CELLS, MASKED, faster_in_half, plans, stepper

WARM_UP, ROUNDS, TOKENS = 3, 15, (512, 4096)
WAYS: dict[str, dict[str, Any]] = {
    "attention=native": {"attention": "native"},
    "fuse=residual_norm,bias_activation": {"fuse": tuple(FUSED)},
    "both": {"attention": "native", "fuse": tuple(FUSED)},
}
"""Fields of the Plan by their names in the results."""


def measured(name: str, tokens: int, rounds: int, machine: Machine) -> dict[str, Any]:
    """A cell: milliseconds of a step without our kernels, and the gain of each way over it."""
    sequence = CELLS[name][1]
    model = sized(PRESETS[name], sequence) if sequence else PRESETS[name]
    each = sequence or model.graph.inputs[0].length  # type: ignore[union-attr]
    samples = max(1, round(tokens / each))
    base = replace(plans(machine, model)[0], micro_batch=samples, attention="plain")
    able = faster_in_half(machine) and this_cpu().bf16_pairs  # as `attention=native` needs it
    possible = {way: fields for way, fields in WAYS.items() if able or "attention" not in fields}
    every = [base, *(replace(base, **fields) for fields in possible.values())]
    device = resolve_device("cpu")
    steps = [stepper(model, samples, plan, device) for plan in every]
    for step in steps:
        for _ in range(WARM_UP):
            step()
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds):
        for step, times in zip(steps, seconds, strict=True):
            start = clock()
            step()
            times.append(clock() - start)
    predicted = [predict(model, machine, plan).iteration_seconds for plan in every]
    ways = {}
    for way, times, forecast in zip(possible, seconds[1:], predicted[1:], strict=True):
        ratios = sorted(a / b for a, b in zip(seconds[0], times, strict=True))
        cut = max(0, round(0.025 * len(ratios)))
        ways[way] = {
            "ms": 1e3 * statistics.median(times), "gain": statistics.median(ratios),
            "interval": [ratios[cut], ratios[-1 - cut]], "predicted_gain": predicted[0] / forecast,
        }  # fmt: skip
    words = MASKED if name.startswith("bert") else 1.0
    rows = least_of_step(model, machine, base, words=words)
    products = sum(row.seconds for part, row in rows.items() if part.startswith(("products", "attention")))
    plain = statistics.median(seconds[0])
    return {
        "model": name, "samples": samples, "tokens": samples * each, "plan": base.line(), "plain_ms": 1e3 * plain,
        "ways": ways, "best": max(ways, key=lambda way: ways[way]["gain"]), "limit": plain / products,
        "environment": environment(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", action="append", choices=CELLS, help="all by default; may be given again")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="of a batch")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--output", type=Path, help="other cells in it stay")
    options = parser.parse_args()
    machine = machine_for(resolve_device("cpu"))
    stored = json.loads(options.output.read_text()) if options.output and options.output.exists() else {}
    cells = stored.get("cells", {})
    best = []
    for name in options.model or CELLS:
        for tokens in options.tokens:
            cell = measured(name, tokens, options.rounds, machine)
            cells[f"{name} {tokens} tokens, {machine.name}"] = cell
            best.append(cell["ways"][cell["best"]]["gain"])
            print(f"{name}, {cell['tokens']} tokens: {cell['plain_ms']:.1f} ms, at most {cell['limit']:.2f}x")
            for way, one in cell["ways"].items():
                low, high = one["interval"]
                print(
                    f"  {way:34} {one['ms']:8.1f} ms  {one['gain']:.3f}x ({low:.3f} to {high:.3f}), predicted "
                    f"{one['predicted_gain']:.3f}x",
                    flush=True,
                )
            if options.output:
                options.output.write_text(json.dumps({"cells": cells}, indent=1) + "\n")
    print(f"geometric mean of the best: {statistics.geometric_mean(best):.3f}x")


if __name__ == "__main__":
    main()
