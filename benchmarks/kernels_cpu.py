"""Fused operators on a CPU beside torch's own, eager and compiled, forward and backward together.

    python benchmarks/kernels_cpu.py --output benchmarks/results/kernels_cpu.json

Times are of the processor on one thread, so that other work on the machine counts little; rounds are interleaved.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch

from penstock.kernels.gains import kind_of
from penstock.probe.kernels import TYPES, cases, gains_of, measure
from penstock.report.record import environment


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--only", default="", help="part of an operator's label")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    times = []
    for case in cases(tuple(options.rows)):
        if options.only.lower() not in case.label.lower():
            continue
        for dtype in TYPES:
            one = measure(case, dtype, options.rounds)
            times.append(one)
            words = "".join(f"{name} {value:8.3f} ms  " for name, value in one.milliseconds.items())
            print(
                f"{one.label:<12}{one.rows:6} {one.dtype:<9} {words} "
                + " ".join(f"{name} × {gain:.2f}" for name, gain in one.gains.items()),
                flush=True,
            )
    table = gains_of(times)
    print(json.dumps(table, indent=1))
    if options.output:
        record = {
            "clock": "processor time of one thread; rounds interleaved, medians",
            "rounds": options.rounds,
            "kind": kind_of("cpu"),
            "gains": table,
            "times": [asdict(one) for one in times],
            "environment": environment(),
        }
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
