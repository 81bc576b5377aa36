"""Ways to do the same work, measured in turn: units of work per second of one core."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.report.record import environment


@dataclass
class Way:
    """One way, and its measurements: units per second of processor time and of wall-clock time, for each round."""

    work: Callable[[np.random.Generator], int]
    """Does the work once and returns how many units it was."""
    unit: str
    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)

    def measure(self, rng: np.random.Generator, seconds: float) -> None:
        """One round of so many seconds of processor time."""
        units, cpu, wall = 0, time.process_time(), time.perf_counter()
        while time.process_time() - cpu < seconds:
            units += self.work(rng)
        self.cpu.append(units / (time.process_time() - cpu))
        self.wall.append(units / (time.perf_counter() - wall))

    def report(self) -> dict[str, Any]:
        """Medians over rounds, and the spread."""
        return {
            f"{self.unit}_per_second_per_core": statistics.median(self.cpu),
            "spread": [min(self.cpu), max(self.cpu)],
            f"{self.unit}_per_wall_second": statistics.median(self.wall),
        }


def in_turn(found: dict[str, Way], rounds: int, seconds: float) -> dict[str, Any]:
    """Measure all ways in rounds A B C, B C A, …, and print what each gives. The result's `environment` has the load
    over the last five minutes, which slows all where it is above the number of cores.
    """
    rng, names = np.random.default_rng(0), list(found)
    for way in found.values():  # warm up: page cache, checksums, allocators
        way.measure(rng, seconds / 2)
        way.cpu.clear(), way.wall.clear()
    for turn in range(rounds):
        at = turn % len(names)
        for name in names[at:] + names[:at]:
            found[name].measure(rng, seconds)
    reports = {name: way.report() for name, way in found.items()}
    for name, way in found.items():
        print(f"{name:48s} {reports[name][f'{way.unit}_per_second_per_core']:>14,.0f} {way.unit}/s/core")
    return {"environment": environment() | {"load_average": os.getloadavg()[1]}, "ways": reports}
