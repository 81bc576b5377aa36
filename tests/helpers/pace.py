"""How fast this machine runs Python, for bounds of processor time that hold on slow machines, too."""

from __future__ import annotations

import time
from dataclasses import dataclass

_REFERENCE = 8e-3
"""Seconds that the work of `_work` took on one core of an AMD EPYC (Zen 3) beside other work."""


@dataclass(frozen=True)
class _Item:
    name: str
    count: int


def _work() -> int:
    table: dict[str, int] = {}
    for number in range(10_000):
        item = _Item(str(number % 100), number)
        table[item.name] = table.get(item.name, 0) + item.count
    return sum(sorted(table.values()))


def pace() -> float:
    """How many times as long as on the reference machine Python takes here, at least 1: the least of ten runs."""
    runs = []
    for _ in range(10):
        begin = time.process_time()
        _work()
        runs.append(time.process_time() - begin)
    return max(1.0, min(runs) / _REFERENCE)
