"""Accuracy control: the fewest layers stay as they are with which a model loses no more than it may, and those that
rounding does not make faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

ROUNDS = 7
"""Rounds in which the ways of one shape are timed, one after the other."""
_SECONDS = 2e-3
"""Least time of one measurement, so that the clock's own noise is small beside it."""
TRIES = 16
"""Layers that are tried again at most, each for an evaluation."""
NOISE = 0.02
"""A shape is slower where its time is larger by more than this share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Controlled:
    """The layers of a model that stay as they are, and the score with these."""

    before: float
    """Score of the model as it was, in points."""
    after: float
    """Score with the other layers rounded, in points; `before` where nothing could be rounded."""
    rounded: frozenset[str]
    """Names of the layers that are rounded; none where no choice keeps within the bound."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Why each other layer is not, by name."""
    evaluations: int = 0

    @property
    def lost(self) -> float:
        """Points that were lost."""
        return self.before - self.after


def keep_within(
    names: Sequence[str], score: Callable[[Collection[str]], float], drop: float, harm: Callable[[str], float],
    *, before: float,
) -> Controlled:  # fmt: skip
    """Choose which of the layers `names` are rounded, so that the score falls by at most `drop` points below `before`.

    `score` evaluates the model with these layers rounded, `harm` says how much rounding one alone changes outputs. Of
    layers in the order of their harm the fewest are kept, found by bisection; then each that was kept is tried again,
    the least harmful first, and stays rounded where the bound holds.
    """
    count = 0

    def fits(chosen: Collection[str]) -> float | None:
        nonlocal count
        count += 1
        reached = score(chosen)
        return reached if before - reached <= drop + 1e-9 else None

    after = fits(names)
    if after is not None:
        return Controlled(before=before, after=after, rounded=frozenset(names), evaluations=count)
    # From the least harmful to the most, so that those rounded are always the first ones.
    harms = {name: harm(name) for name in names}
    order = sorted(names, key=harms.__getitem__)
    low, high, after = 0, len(order), before  # all of the first `low` fit, those of `high` do not
    while high - low > 1:
        middle = (low + high) // 2
        if (reached := fits(order[:middle])) is None:
            high = middle
        else:
            low, after = middle, reached
    chosen = set(order[:low])
    for name in order[low + 1 : low + 1 + TRIES]:  # the one at `low` was just refused
        if (reached := fits({*chosen, name})) is not None:
            chosen.add(name)
            after = reached
    reasons = {
        name: f"rounding it, the model would lose more than {drop:g} points"
        for name in order
        if name not in chosen
    }
    return Controlled(
        before=before, after=after, rounded=frozenset(chosen), reasons=reasons, evaluations=count
    )


@torch.inference_mode()
def seconds_of(ways: Sequence[nn.Module], rows: int, features: int) -> list[float]:
    """Least seconds of each way to multiply `rows` inputs, timed in turns: other work only adds to them."""
    x = torch.randn(rows, features, generator=torch.Generator().manual_seed(0))
    for way in ways:
        way(x)
    repeats = [max(1, round(_SECONDS / max(_time(way, x, 1), 1e-7))) for way in ways]
    times: list[list[float]] = [[] for _ in ways]
    for number in range(ROUNDS):
        order = range(len(ways)) if number % 2 else reversed(range(len(ways)))
        for place in order:
            times[place].append(_time(ways[place], x, repeats[place]))
    return [min(each) for each in times]


def _time(way: nn.Module, x: torch.Tensor, repeats: int) -> float:
    begin = time.perf_counter()
    for _ in range(repeats):
        way(x)
    return (time.perf_counter() - begin) / repeats
