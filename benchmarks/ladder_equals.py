"""Races between equals: how often the ladder calls two builds of one and the same setting different.

    OMP_NUM_THREADS=1 python benchmarks/ladder_equals.py --races 100 --output benchmarks/results/ladder_equals_cpu.json

A tiny Vision Transformer is built anew for both sides of every race. As in a climb, a control of two further builds
comes first, whose difference sets the noise floor; a race ends when it is decided, or after the most rounds that a
climb makes. Each race has a journal of its own, so that none learns from another. The aim: of 100 at most 2 are called
different.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from penstock.config.model import PRESETS
from penstock.ladder.arena import Arena
from penstock.ladder.measure import Models
from penstock.ladder.settings import LadderConfig
from penstock.ladder.statistics import Journal
from penstock.ladder.subject import Configured
from penstock.probe import machine_for
from penstock.report.record import environment

ROUNDS = 7
MODEL = replace(PRESETS["vit-digits"], width=48, depth=2, heads=2, mlp_width=96)


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--races", type=int, default=100)
    parser.add_argument("--round-seconds", type=float, default=0.03)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()

    config = LadderConfig(model=MODEL, batch=16, device="cpu")
    subject = Configured(config, torch.device("cpu"))
    arena = Arena(
        Models(subject, machine_for(subject.device), config), ROUNDS, given.round_seconds, lambda *said: None
    )
    start, copies = time.perf_counter(), 0
    races: list[dict[str, Any]] = []

    for _ in range(given.races):
        one, other, control, twin = (replace(subject.first, copy=copies + i) for i in range(4))
        copies += 4
        arena.wall, arena.processor, arena.floor = Journal(), Journal(), 0.0
        arena.play([control, twin], 10)
        arena.floor = floor = arena.wall.joint().noise_floor(control, twin)
        rounds, said = 0, "open"
        while said == "open" and rounds < Models.most_rounds:
            arena.play([one, other], 1)
            rounds += 1
            said = arena.verdict_of(other, one)
        ratio = arena.ratio(other, one)
        assert ratio is not None
        races.append({"said": said, "rounds": rounds, "ratio": ratio.value, "low": ratio.low, "high": ratio.high,
                      "floor": floor})  # fmt: skip
        arena.keep = set()
        arena.clear()

        if given.output:
            tell(races, given.output)
    different, same = (
        sum(race["said"] in said for race in races) for said in (("faster", "slower"), ("same",))
    )
    widths = sorted(race["high"] / race["ratio"] - 1 for race in races)
    print(f"{different} of {len(races)} races between equals were called different, {same} the same")
    half = 100 * widths[len(widths) // 2]
    print(f"median half-width of an interval {half:.1f} %; {time.perf_counter() - start:.0f} s")


def tell(races: list[dict[str, Any]], output: Path) -> None:
    """Keep what was raced so far."""
    different = sum(race["said"] in ("faster", "slower") for race in races)
    found = {"races": len(races), "different": different, "threads": torch.get_num_threads()}
    output.write_text(json.dumps(found | {"environment": environment(), "each": races}, indent=1) + "\n")


if __name__ == "__main__":
    main()
