"""Accuracy control: rounds all layers except the few that would lose too much accuracy, and those it makes slower."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

import torch
from torch import nn

ROUNDS = 7
"""Rounds in which the implementations for one shape are timed in turn."""
_SECONDS = 2e-3
"""Least seconds of one measurement, so that the clock's own noise is negligible."""
TRIES = 16
"""Most layers that are tried again, each with one evaluation."""
NOISE = 0.02
"""A shape counts as slower if its time is larger by more than this share."""


def keep_within(
    names: Sequence[str], score: Callable[[Collection[str]], float], drop: float, harm: Callable[[str], float],
    *, before: float,
) -> tuple[Collection[str], float]:  # fmt: skip
    """Choose which of the layers `names` are rounded, so that the score falls by at most `drop` points below `before`;
    returns them, none if no choice stays within the bound, and the score.

    `score` evaluates the model with these layers rounded, `harm` measures how much rounding a single layer changes the
    outputs. Layers are sorted by harm, and bisection finds how few of the most harmful must stay unrounded. Then these
    are tried again, the least harmful first, and each is rounded if the bound still holds.
    """

    def fits(chosen: Collection[str]) -> float | None:
        reached = score(chosen)
        return reached if before - reached <= drop + 1e-9 else None

    if (after := fits(names)) is not None:
        return names, after
    # From the least to the most harmful: those rounded are always the first ones.
    harms = {name: harm(name) for name in names}
    order = sorted(names, key=harms.__getitem__)
    low, high, after = 0, len(order), before  # the first `low` are within the bound, the first `high` are not
    while high - low > 1:
        middle = (low + high) // 2
        if (reached := fits(order[:middle])) is None:
            high = middle
        else:
            low, after = middle, reached
    chosen = set(order[:low])
    for name in order[low + 1 : low + 1 + TRIES]:  # the layer at `low` has just been refused
        if (reached := fits({*chosen, name})) is not None:
            chosen.add(name)
            after = reached
    return chosen, after


@torch.inference_mode()
def seconds_of(ways: Sequence[nn.Module], rows: int, features: int) -> list[float]:
    """Least seconds of each module for multiplying `rows` inputs, timed in turns: other programs can only add time."""
    x = torch.randn(rows, features, generator=torch.Generator().manual_seed(0))
    for way in ways:
        way(x)
    repeats = [max(1, round(_SECONDS / max(_time(way, x, 1), 1e-7))) for way in ways]
    times: list[list[float]] = [[] for _ in ways]
    for number in range(ROUNDS):
        order = range(len(ways)) if number % 2 else reversed(range(len(ways)))
        for place in order:
            times[place].append(_time(ways[place], x, repeats[place]))
    return [min(module_times) for module_times in times]


def _time(way: nn.Module, x: torch.Tensor, repeats: int) -> float:
    begin = time.perf_counter()
    for _ in range(repeats):
        way(x)
    return (time.perf_counter() - begin) / repeats
