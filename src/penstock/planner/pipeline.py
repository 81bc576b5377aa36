"""How a pipeline splits a model's blocks, in runs and predictions alike, what activations it keeps and how long it
idles."""

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
    """Equal numbers of blocks for each stage. If they are equal only when entrance and exit each count as a block,
    they do; otherwise the first stages get one block more than the rest."""
    ends = depth % stages > 0 and (depth + 2) % stages == 0
    each, more = divmod(depth + 2 * ends, stages)
    return tuple(each + (i < more) - (ends and i in (0, stages - 1)) for i in range(stages))


def balanced(
    costs: Sequence[float], stages: int, *, entrance: float = 0.0, end: float = 0.0
) -> tuple[int, ...]:
    """Number of consecutive blocks of each of `stages` stages (at most one stage per block); the first also has the
    entrance and the last the exit. They are split `evenly`, unless another cut makes the costliest stage cheaper: then
    a cut is taken that makes it cheapest and keeps the stages near the mean.

    costs: the blocks' costs, in any unit.
    """
    count, even = len(costs), evenly(len(costs), stages)
    if stages == 1:
        return even
    ends = [entrance, *[0.0] * (stages - 2), end]
    before = [0.0, *accumulate(costs)]

    def fits(at: int, stage: int, most: float) -> bool:
        """Whether `stage` and the later stages can split the blocks from `at` on at a cost of at most `most` each."""
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
    if work.software.even_stages:
        return evenly(work.depth, stages)
    ends = [part.model_flops for part in work.parts if part.block is None]
    return balanced(work.each(attrgetter("model_flops")), stages, entrance=ends[0], end=ends[-1])


class StageBlocks(NamedTuple):
    """Blocks of each device of a pipeline, summed over its chunks."""

    first: float
    middle: float
    """The largest number between the first and the last device; 0 if there is none between."""
    last: float
    runs: tuple[tuple[int, float], ...]
    """Number of devices, and blocks of each, for every run of consecutive devices with equally many blocks. First and
    last device are runs of their own."""


@lru_cache(maxsize=4096)
def stage_blocks(
    work: Workload, pp: int, virtual: int = 1, of: Literal["model_flops", "learned", "experts"] = "model_flops",
) -> StageBlocks:  # fmt: skip
    """The blocks of each of `pp` devices that hold `virtual` stages each. In an encoder–decoder each block is weighted
    by its amount of the quantity `of` over the mean block's: the result times that mean is the device's amount."""
    blocks_by_rank = [sum(chunks) for chunks in _chunks(work.whole or work, pp, virtual, of)]
    first, between, last = blocks_by_rank[0], blocks_by_rank[1:-1], blocks_by_rank[-1]
    runs = [(len([*run]), blocks) for blocks, run in groupby(between)]
    return StageBlocks(first, max(between, default=0.0), last, ((1, first), *runs, (1, last)))


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


def zero_bubble_idle(runs: Sequence[tuple[int, StageTimes]], micro_batches: int) -> float:
    """Idle time of the slowest stage under ZB-H1, in the unit of their times; `runs` are equal stages in a row.

    Each stage waits for the first forward pass to arrive, for the first gradient after its own warm-up, and at the end
    for the time that its deferred gradients of weights do not fill; the last stage to finish decides. The simulator's
    makespan is within 2.5 % of this.
    """
    ranks = sum(count for count, _ in runs)
    round_trip = sum(count * (f + i) for count, (f, i, _) in runs)
    slowest = max(f + i + w for count, (f, i, w) in runs if count)
    first, before, returned, makespan = 0, 0.0, 0.0, 0.0
    for count, (f, i, w) in runs:
        # A stage's waiting time is convex in its rank, and so is largest at an end of its run.
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
    """The most micro-batches whose activations the first device keeps, if its chunks are equal (Narayanan et al. 2021;
    Korthikanti et al. 2022, section 4.2.3 for interleaving)."""
    m = float(plan.accumulate)
    if plan.schedule == "gpipe":
        return m
    return min(m, ((plan.virtual + 1) * plan.pp - 1) / plan.virtual if plan.virtual > 1 else float(plan.pp))


def most_blocks(work: Workload, plan: Plan, entrance: float = 0.0) -> tuple[float, float]:
    """Blocks whose activations the fullest device except the last keeps, and those of the last: each block counted once
    per micro-batch in flight. `entrance` is the memory that the entrance keeps, in blocks."""
    chunks = _chunks(work.whole or work, plan.pp, plan.virtual, "model_flops")
    gpipe, stages = plan.schedule == "gpipe", plan.pp
    # Beyond three micro-batches per stage the schedule repeats.
    m = plan.accumulate if gpipe else min(plan.accumulate, 3 * stages)
    front = 0.0
    previous: tuple[float, ...] = ()
    for rank, device_chunks in enumerate(chunks[:-1]):
        if device_chunks != previous:  # of equal devices the first keeps most
            previous = device_chunks
            first = device_chunks[0] + entrance * (rank == 0)
            kept = _device_blocks((first, *device_chunks[1:]), m, stages, stages - 1 - rank, gpipe=gpipe)
            front = max(front, kept)
    return front, _device_blocks(chunks[-1], m, stages, 0, gpipe=gpipe)


@lru_cache(maxsize=4096)
def _device_blocks(chunks: tuple[float, ...], m: int, stages: int, behind: int, *, gpipe: bool) -> float:
    """Blocks whose activations a device keeps with `behind` later stages.

    With interleaved stages, micro-batches pass each chunk in groups of `stages`; after the warm-up each forward pass is
    followed by a backward pass.
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
