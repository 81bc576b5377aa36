"""How a pipeline splits a model's blocks, in runs and predictions alike, what it keeps, and how long it idles."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, groupby
from operator import attrgetter
from typing import Literal, NamedTuple

from penstock.config.plan import Plan
from penstock.planner.operators import Workload

StageTimes = tuple[float, float, float]
"""Times of one micro-batch on one stage: forward, gradients of inputs, gradients of weights."""


def evenly(depth: int, stages: int) -> tuple[int, ...]:
    """Blocks of each stage, equally many. Where that works only with entrance and exit each counted as a block, so they
    count; else the first stages take one more than the others."""
    ends = depth % stages > 0 and (depth + 2) % stages == 0
    each, more = divmod(depth + 2 * ends, stages)
    return tuple(each + (i < more) - (ends and i in (0, stages - 1)) for i in range(stages))


def balanced(
    costs: Sequence[float], stages: int, *, entrance: float = 0.0, end: float = 0.0
) -> tuple[int, ...]:
    """Blocks of each of `stages` in a row, no more of them than blocks; the first also has the entrance and the last
    the exit. They are split `evenly`, unless another cut leaves the costliest stage with less: then, of those
    that leave it with least, one whose stages are near the mean.

    costs: those of blocks, in any unit.
    """
    count, even = len(costs), evenly(len(costs), stages)
    if stages == 1:
        return even
    ends = [entrance, *[0.0] * (stages - 2), end]
    before = [0.0, *accumulate(costs)]

    def fits(at: int, stage: int, most: float) -> bool:
        """Whether `stage` and those after it can split the blocks from `at` on with no more than `most` each."""
        for number in range(stage, stages):
            far = bisect_right(before, before[at] + most - ends[number]) - 1
            begun, at = at, min(far, count - (stages - number - 1))
            if at <= begun:
                return False
        return at == count

    edges = [0, *accumulate(even)]
    high = max(before[to] - before[at] + end_cost for at, to, end_cost in zip(edges, edges[1:], ends))
    if not fits(0, 0, high * (1 - 1e-9)):
        return even
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(0, 0, middle) else (middle, high)
    counts, at, most = [], 0, high * (1 + 1e-9)
    for stage, end_cost in enumerate(ends[:-1]):
        mean = (before[-1] - before[at] + sum(ends[stage:])) / (stages - stage)
        options = [
            to for to in range(at + 1, count - (stages - stage - 1) + 1)
            if end_cost + before[to] - before[at] <= most and fits(to, stage + 1, most)
        ]  # fmt: skip
        to = min(options, key=lambda to: abs(end_cost + before[to] - before[at] - mean))
        counts.append(to - at)
        at = to
    return (*counts, count - at)


@lru_cache(maxsize=4096)
def stage_counts(work: Workload, stages: int) -> tuple[int, ...]:
    """Blocks of each stage of a model: `balanced` by FLOPs of forward and backward."""
    work = work.whole or work
    if work.even_stages:
        return evenly(work.depth, stages)
    ends = [part.model_flops for part in work.parts if part.block is None]
    return balanced(work.each(attrgetter("model_flops")), stages, entrance=ends[0], end=ends[-1])


class StageBlocks(NamedTuple):
    """Blocks of each device of a pipeline, those of all its chunks together."""

    first: float
    middle: float
    """The most between the first and the last; 0 where there is none."""
    last: float
    runs: tuple[tuple[int, float], ...]
    """Number of devices and blocks of each, for every run of devices with equally many blocks. The ends are runs of
    their own."""


def stage_blocks(
    work: Workload, pp: int, virtual: int = 1, of: Literal["model_flops", "learned", "experts"] = "model_flops",
) -> StageBlocks:  # fmt: skip
    """The blocks of each of `pp` devices that hold `virtual` stages each. Those of an encoder–decoder count for what
    they have of a quantity over the mean of all: their number times that mean is what a device has of it."""
    return _stage_blocks(work.whole or work, pp, virtual, of)


@lru_cache(maxsize=4096)
def _chunks(work: Workload, pp: int, virtual: int, of: str) -> tuple[tuple[float, ...], ...]:
    """The blocks of each chunk of each device, counted as in `stage_blocks`."""
    weights = [1.0] * work.depth
    if len(work.stacks) > 1:
        sizes = work.each(attrgetter(of))
        mean = sum(sizes) / len(sizes) or 1.0
        weights = [size / mean for size in sizes]
    chunks, at = [], 0
    for count in stage_counts(work, pp * virtual):
        chunks.append(sum(weights[at : at + count]))
        at += count
    return tuple(tuple(chunks[rank::pp]) for rank in range(pp))


@lru_cache(maxsize=4096)
def _stage_blocks(work: Workload, pp: int, virtual: int, of: str) -> StageBlocks:
    blocks_by_rank = [sum(chunks) for chunks in _chunks(work, pp, virtual, of)]
    first, between, last = blocks_by_rank[0], blocks_by_rank[1:-1], blocks_by_rank[-1]
    runs = [(len([*run]), blocks) for blocks, run in groupby(between)]
    return StageBlocks(first, max(between, default=0.0), last, ((1, first), *runs, (1, last)))


def zero_bubble_idle(runs: Sequence[tuple[int, StageTimes]], micro_batches: int) -> float:
    """Idle time of the slowest stage under ZB-H1, in the unit of their times; `runs` are equal stages in a row.

    Each stage waits for the first forward pass to come, for the first gradient after its own warm-up, and at the end
    for what the gradients of weights that it deferred do not fill; the last of them to end decides. The simulator's
    makespan is within 2.5 % of that.
    """
    ranks = sum(count for count, _ in runs)
    round_trip = sum(count * (f + i) for count, (f, i, _) in runs)
    slowest = max(f + i + w for count, (f, i, w) in runs if count)
    first, before, returned, makespan = 0, 0.0, 0.0, 0.0
    for count, (f, i, w) in runs:
        # What a stage waits for is convex in its rank, and so is largest at an end of its run.
        for at in (0, count - 1) if count > 1 else range(count):
            rank, ahead, back = first + at, before + at * f, returned + at * i
            warm_up = min(micro_batches, ranks - 1 - rank)
            waits = ahead
            turn = round_trip - ahead - back - f - i - warm_up * f
            if turn > 0:
                waits += turn
            late = back - min(rank, max(0, micro_batches - warm_up - 1)) * w
            if late > 0:
                waits += late
            makespan = max(makespan, micro_batches * (f + i + w) + waits)
        first, before, returned = first + count, before + count * f, returned + count * i
    return makespan - micro_batches * slowest


def in_flight(plan: Plan) -> float:
    """Micro-batches whose activations the first device keeps at most, where its chunks are equal (Narayanan et al.
    2021; Korthikanti et al. 2022, section 4.2.3 for interleaving)."""
    m = float(plan.accumulate)
    if plan.schedule == "gpipe":
        return m
    return min(m, ((plan.virtual + 1) * plan.pp - 1) / plan.virtual if plan.virtual > 1 else float(plan.pp))


def most_blocks(work: Workload, plan: Plan, entrance: float = 0.0) -> tuple[float, float]:
    """Blocks whose activations the fullest device but the last keeps, and the last: each as often as micro-batches are
    in flight in it. The `entrance` is what the entrance keeps, in blocks."""
    chunks = _chunks(work.whole or work, plan.pp, plan.virtual, "model_flops")
    gpipe = plan.schedule == "gpipe"
    # More than three times as many micro-batches as stages repeat what went before.
    return _most_blocks(
        chunks, plan.accumulate if gpipe else min(plan.accumulate, 3 * plan.pp), gpipe, entrance
    )


@lru_cache(maxsize=4096)
def _most_blocks(
    chunks: tuple[tuple[float, ...], ...], m: int, gpipe: bool, entrance: float
) -> tuple[float, float]:
    stages = len(chunks)
    front = 0.0
    previous: tuple[float, ...] = ()
    for rank, device_chunks in enumerate(chunks[:-1]):
        if device_chunks != previous:  # of equal devices the first keeps most
            previous = device_chunks
            first = device_chunks[0] + entrance * (rank == 0)
            kept = _device_blocks((first, *device_chunks[1:]), m, stages, stages - 1 - rank, gpipe=gpipe)
            front = max(front, kept)
    return front, _device_blocks(chunks[-1], m, stages, 0, gpipe=gpipe)


def _device_blocks(chunks: tuple[float, ...], m: int, stages: int, behind: int, *, gpipe: bool) -> float:
    """Blocks that a device keeps with `behind` stages behind it.

    Where stages are interleaved, micro-batches pass each chunk in groups of as many as there are stages: after the
    warm-up each forward pass is followed by a backward pass.
    """
    virtual = len(chunks)
    if gpipe or virtual == 1:
        return sum(chunks) * (m if gpipe else min(m, behind + 1))
    ahead = (virtual - 1) * stages + 2 * behind
    kept = most = 0.0
    for turn in range(min(virtual * m, ahead + virtual * stages)):
        kept += chunks[turn // stages % virtual]
        most = max(most, kept)
        if turn >= ahead:
            kept -= chunks[virtual - 1 - (turn - ahead) // stages % virtual]
    return most
