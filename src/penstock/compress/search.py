"""Shares of pruning that reach a speed: by the planner's forecast, then by measuring models of these sizes, whose
weights need not be trained for that."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from penstock.compress.cut import multiple_of, sized
from penstock.compress.measure import Workbench
from penstock.config.compress import Prune
from penstock.config.model import stacks
from penstock.errors import ConfigError

MOST, PARTS = 0.95, 95
"""The largest share that is tried, and how many shares are, at equal distances."""
TRIES = 5
"""Measurements until a search ends with what it has."""
SHARES = ("layers", "heads", "hidden", "experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedShares:
    """One choice of shares that was measured."""

    shares: dict[str, float]
    forecast: float
    """Speed relative to the model, by the planner."""
    measured: float


def reach(
    bench: Workbench, options: Prune, target: float, say: Callable[[str], None]
) -> tuple[Prune, list[TriedShares]]:
    """The least shares, all raised or lowered together, with which a model of these sizes is measured `target` times as
    fast. Each measurement corrects the forecasts that follow, so that no more is removed than it takes.

    Raises ConfigError where no shares are forecast, or measured, to be fast enough.
    """
    usual = options if options.enabled else _alike(bench, options)
    multiple = multiple_of(options, bench.device)
    before = bench.predicted(bench.model)
    reached = {}
    for part in range(1, PARTS + 1):
        choice = _scaled(usual, MOST * part / PARTS)
        reached[choice] = before / bench.predicted(sized(bench.model, choice, multiple=multiple))
    original, tried, factor = bench.drawn(bench.model), list[TriedShares](), 1.0
    fast_enough: list[Prune] = []
    while len(tried) < TRIES:
        hopeful = [choice for choice, speed in reached.items() if speed * factor >= target]
        if not hopeful or _shares(hopeful[0]) in [shares.shares for shares in tried]:
            break
        choice = hopeful[0]
        small = bench.drawn(sized(bench.model, choice, multiple=multiple))
        slow, fast = map(statistics.median, bench.latencies([original, small]))
        tried.append(TriedShares(shares=_shares(choice), forecast=reached[choice], measured=slow / fast))
        say(
            f"shares {', '.join(f'{name} {share:.2f}' for name, share in tried[-1].shares.items())}: forecast "
            f"{reached[choice]:.2f}x, measured {slow / fast:.2f}x"
        )
        if slow / fast >= target:
            fast_enough.append(choice)
        elif fast_enough:
            break
        factor = slow / fast / reached[choice]
    if fast_enough:
        return fast_enough[-1], tried
    best = max([factor * max(reached.values()), *(shares.measured for shares in tried)])
    raise ConfigError(
        f"target is {target:g}x, but pruning up to {MOST:.0%} gives {best:.2f}x at most on this machine; choose a "
        "lower target, or remove other parts."
    )


def _alike(bench: Workbench, options: Prune) -> Prune:
    """Equal shares of layers, heads and hidden features; heads stay where their slopes follow from their number."""
    heads = 0.0 if any(stack.positions == "alibi" for stack in stacks(bench.model)) else 0.5
    return replace(options, layers=0.5, heads=heads, hidden=0.5)


def _scaled(options: Prune, largest: float) -> Prune:
    """The shares in the same proportions, the largest of them as given."""
    most = max(getattr(options, name) for name in SHARES)
    changes: dict[str, Any] = {name: getattr(options, name) / most * largest for name in SHARES}
    return replace(options, **changes)


def _shares(options: Prune) -> dict[str, float]:
    return {name: getattr(options, name) for name in SHARES if getattr(options, name)}
