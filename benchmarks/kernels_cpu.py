"""Fused operators on a CPU beside torch's own, eager and compiled, forward and backward together.

    python benchmarks/kernels_cpu.py --output benchmarks/results/kernels_cpu.json

Times are of the processor on one thread, so that other work on the machine counts little; rounds are interleaved.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from penstock.cpu import kind_of
from penstock.probe.kernels import KernelTime, gains_of, measure_all
from penstock.report.record import environment


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()

    def report(one: KernelTime) -> None:
        words = "".join(f"{name} {value:8.3f} ms  " for name, value in one.milliseconds.items())
        gains = " ".join(f"{name} × {gain:.2f}" for name, gain in one.gains.items())
        print(f"{one.variant:<12}{one.rows:6} {one.dtype:<9} {words} {gains}", flush=True)

    times = measure_all(options.rounds, tuple(options.rows), report)
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
