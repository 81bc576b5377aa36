"""Training steps with kernels of Penstock's in C++ beside the same Plan without, on a CPU.

    python benchmarks/native_cpu.py --output benchmarks/results/native_cpu.json

Each cell is a model and a batch, under the Plan that `step_parts.py` profiles, with attention of the plain form and
of `native`. Rounds are interleaved in one process; a round is one step of each. Beside the gain stand its interval,
of 95 % by the rounds' ratios, and what the planner predicts. Cells of other machines in the output stay.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

from language_train import sized
from penstock.config.model import PRESETS
from penstock.planner import predict
from penstock.probe import machine_for, resolve_device
from penstock.report.record import environment
from step_parts import CELLS, plans, stepper

WARM_UP, ROUNDS = 3, 15


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", action="append", choices=CELLS, help="all by default; may be given again")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--output", type=Path, help="other cells in it stay")
    options = parser.parse_args()
    device = resolve_device("cpu")
    machine = machine_for(device)
    stored = json.loads(options.output.read_text()) if options.output and options.output.exists() else {}
    cells = stored.get("cells", {})
    for name in options.model or CELLS:
        samples, sequence = CELLS[name]
        model = PRESETS[name] if not sequence else sized(PRESETS[name], sequence)
        base = replace(plans(machine, model)[0], micro_batch=samples)
        both = [replace(base, attention="plain"), replace(base, attention="native")]
        steps = [stepper(model, samples, plan, device) for plan in both]
        for step in steps:
            for _ in range(WARM_UP):
                step()
        seconds: list[list[float]] = [[], []]
        for _ in range(options.rounds):
            for step, times in zip(steps, seconds, strict=True):
                start = time.perf_counter()
                step()
                times.append(time.perf_counter() - start)
        ratios = sorted(a / b for a, b in zip(*seconds, strict=True))
        cut = max(0, round(0.025 * len(ratios)))
        predicted = [predict(model, machine, plan).iteration_seconds for plan in both]
        cell = {
            "model": name, "samples": samples, "tokens": sequence, "plan": both[1].line(),
            "plain_ms": 1e3 * statistics.median(seconds[0]), "native_ms": 1e3 * statistics.median(seconds[1]),
            "gain": statistics.median(ratios), "interval": [ratios[cut], ratios[-1 - cut]],
            "predicted_gain": predicted[0] / predicted[1], "environment": environment(),
        }  # fmt: skip
        cells[f"{name} {machine.name}"] = cell
        print(
            f"{name:12} plain {cell['plain_ms']:8.1f} ms   native {cell['native_ms']:8.1f} ms   "
            f"{cell['gain']:.3f}x ({ratios[cut]:.3f} to {ratios[-1 - cut]:.3f}), predicted "
            f"{cell['predicted_gain']:.3f}x",
            flush=True,
        )
        if options.output:
            options.output.write_text(json.dumps({"cells": cells}, indent=1) + "\n")


if __name__ == "__main__":
    main()
