"""How blocks fall on the stages of a pipeline, and the bubble of one whose backward pass is split in two."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from penstock.config.plan import Plan

StageTimes = tuple[float, float, float]
"""Of one micro-batch on one stage: forward, gradients of inputs, gradients of weights."""


@lru_cache(maxsize=4096)
def stage_blocks(depth: int, stages: int) -> tuple[int, int, int]:
    """Blocks of the first, a middle and the last stage.

    Even where `stages` divides `depth`. Else, where it divides `depth + 2`, entrance and exit take a block's place
    each. Else the first stages take one more than the others, of which the last is one.
    """
    if stages == 1:
        return depth, depth, depth
    if depth % stages == 0:
        return depth // stages, depth // stages, depth // stages
    if (depth + 2) % stages == 0:
        each = (depth + 2) // stages
        return each - 1, each, each - 1
    each = -(-depth // stages)
    return each, each, each - 1


def blocks_by_stage(depth: int, stages: int) -> list[tuple[int, int]]:
    """Stages in a row and the blocks of each, as `stage_blocks` has them, for two stages at least; of those between the
    first and the last the later ones may have one less."""
    first, middle, last = stage_blocks(depth, stages)
    fewer = first + last + (stages - 2) * middle - depth
    return [(1, first), (stages - 2 - fewer, middle), (fewer, middle - 1), (1, last)]


def zero_bubble_idle(runs: Sequence[tuple[int, StageTimes]], micro_batches: int) -> float:
    """Idle time of the slowest stage under ZB-H1, in the unit of their times; `runs` are so many equal stages in a row.

    Each stage waits for the first forward pass to come, for the first gradient after its own warm-up, and at the end
    for what the gradients of weights that it put off do not fill; the last of them to end decides. The simulator's
    makespan lies within 2.5 % of that.
    """
    ranks = sum(count for count, _ in runs)
    whole = sum(count * (f + i) for count, (f, i, _) in runs)
    slowest = max(f + i + w for count, (f, i, w) in runs if count)
    first, before, returned, makespan = 0, 0.0, 0.0, 0.0
    for count, (f, i, w) in runs:
        # What a stage waits for is convex in its rank, and so is largest at an end of its run.
        for at in (0, count - 1) if count > 1 else range(count):
            rank, ahead, back = first + at, before + at * f, returned + at * i
            warm_up = min(micro_batches, ranks - 1 - rank)
            waits = ahead
            turn = whole - ahead - back - f - i - warm_up * f
            if turn > 0:
                waits += turn
            late = back - min(rank, max(0, micro_batches - warm_up - 1)) * w
            if late > 0:
                waits += late
            makespan = max(makespan, micro_batches * (f + i + w) + waits)
        first, before, returned = first + count, before + count * f, returned + count * i
    return makespan - micro_batches * slowest


def in_flight(plan: Plan) -> float:
    """Micro-batches whose activations the first stage keeps at the most (Narayanan et al. 2021; Korthikanti et al.
    2022, section 4.2.3 for interleaving)."""
    m = float(plan.accumulate)
    if plan.schedule == "gpipe":
        return m
    if plan.virtual > 1:
        return min(m, plan.pp * (1 + (plan.pp - 1) / (plan.pp * plan.virtual)))
    return min(m, float(plan.pp))
