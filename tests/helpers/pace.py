"""How fast this machine runs Python, for bounds of processor time that hold on slow machines, too."""

from __future__ import annotations

import time
from collections.abc import Callable
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
    return max(1.0, min(_seconds() for _ in range(10)) / _REFERENCE)


def at_reference_pace(measured: Callable[[int], float], rounds: int) -> float:
    """Processor seconds that `measured` reports of a round, as the reference machine would take them: the lower
    quartile over the rounds, each divided by the pace around it, because another process on the core slows both."""
    before, taken = _seconds(), []
    for turn in range(rounds):
        seconds, after = measured(turn), _seconds()
        taken.append(seconds / max(1.0, (before + after) / 2 / _REFERENCE))
        before = after
    return sorted(taken)[rounds // 4]


def _seconds() -> float:
    begin = time.process_time()
    _work()
    return time.process_time() - begin
