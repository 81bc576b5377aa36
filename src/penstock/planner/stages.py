"""Where a pipeline cuts a model: stages of as equal work as whole blocks allow."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from penstock.config.model import ModelConfig
from penstock.planner.describe import totals


@lru_cache(maxsize=256)
def stage_counts(model: ModelConfig, stages: int) -> tuple[int, ...]:
    """Blocks of each stage, so that the stage with the most work has as little as can be. Work is counted in FLOPs of
    forward and backward, those of the embedding and of the output among them.
    """
    work = totals(model)
    ends = [part.model_flops for part in work.parts if part.block is None]
    costs: list[float] = []
    for cross in (False, True):
        kinds = [part for part in work.blocks if part.block is not None and (part.block.cross > 0) is cross]
        count = sum(part.count for part in kinds)
        costs += [sum(part.count * part.model_flops for part in kinds) / max(1, count)] * count
    return balanced(costs, stages, entrance=ends[0], end=ends[-1])


def balanced(
    costs: Sequence[float], stages: int, *, entrance: float = 0.0, end: float = 0.0
) -> tuple[int, ...]:
    """Blocks of each of `stages` in a row, one at the least, with the smallest cost of the costliest stage; the first
    has the entrance besides and the last the exit. Of such cuts, one whose stages are near the mean.

    costs: those of blocks, in any unit.
    """
    ends = [entrance] + [0.0] * (stages - 2) + [end] if stages > 1 else [entrance + end]
    low, high = 0.0, sum(costs) + entrance + end
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if _fits(costs, ends, middle) else (middle, high)
    found, at, most = [], 0, high * (1 + 1e-9)
    for stage, own in enumerate(ends[:-1]):
        mean = (sum(costs[at:]) + sum(ends[stage:])) / (stages - stage)
        options = [
            n for n in range(1, len(costs) - at - (stages - stage - 1) + 1)
            if own + sum(costs[at : at + n]) <= most and _fits(costs[at + n :], ends[stage + 1 :], most)
        ]  # fmt: skip
        found.append(min(options, key=lambda n: abs(own + sum(costs[at : at + n]) - mean)))
        at += found[-1]
    return (*found, len(costs) - at)


def _fits(costs: Sequence[float], ends: Sequence[float], most: float) -> bool:
    """Whether so many stages can share blocks out with no more than `most` each."""
    at = 0
    for stage, own in enumerate(ends):
        left = len(ends) - stage - 1
        if at >= len(costs) - left or own + costs[at] > most:
            return False
        spent = own
        while at < len(costs) - left and spent + costs[at] <= most:
            spent += costs[at]
            at += 1
    return at == len(costs)
