"""Where a pipeline cuts a model: stages of as equal work as whole blocks allow."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from penstock.config.machine import Machine
from penstock.config.model import ModelConfig
from penstock.config.plan import Plan
from penstock.planner.describe import describe, totals
from penstock.planner.operators import Part
from penstock.planner.pipeline import blocks_by_stage
from penstock.planner.rates import rates_of
from penstock.planner.step import layout_of, part_time
from penstock.planner.traffic import transfer_seconds
from penstock.schedules import Costs


@lru_cache(maxsize=256)
def stage_counts(model: ModelConfig, stages: int) -> tuple[int, ...]:
    """Blocks of each stage, so that the stage with the most work has as little as can be. Work is counted in FLOPs of
    forward and backward, those of the embedding and of the output among them. Of cuts that are as good, the one that
    predictions assume (`stage_blocks`).
    """
    work = totals(model)
    ends = [part.model_flops for part in work.parts if part.block is None]
    costs: list[float] = []
    for cross in (False, True):
        kinds = [part for part in work.blocks if part.block is not None and (part.block.cross > 0) is cross]
        count = sum(part.count for part in kinds)
        costs += [sum(part.count * part.model_flops for part in kinds) / max(1, count)] * count
    best = balanced(costs, stages, entrance=ends[0], end=ends[-1])
    if not 1 < stages <= len(costs):
        return best
    usual = tuple(blocks for count, blocks in blocks_by_stage(len(costs), stages) for _ in range(count))
    known = min(usual) > 0 and sum(usual) == len(costs)
    return usual if known and _most(usual, costs, ends) <= _most(best, costs, ends) * (1 + 1e-9) else best


def _most(counts: Sequence[int], costs: Sequence[float], ends: Sequence[float]) -> float:
    """The cost of the costliest stage."""
    found, at = [], 0
    for count in counts:
        found.append(sum(costs[at : at + count]))
        at += count
    found[0] += ends[0]
    found[-1] += ends[-1]
    return max(found)


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


def stage_costs(model: ModelConfig, machine: Machine, plan: Plan) -> Costs:
    """Seconds of each stage's passes of one micro-batch, and of what it sends, as `stage_counts` cuts the model: what a
    schedule is simulated with.
    """
    work = describe(model, plan, machine.device)
    rates, layout = rates_of(machine, plan), layout_of(plan)
    host = (machine.operator_seconds or machine.launch_seconds) if rates.cpu else 0.0

    def passes(part: Part) -> tuple[float, float, float]:
        time = part_time(part, rates, layout)
        launched = [host * sum(op.launches for op in side) for side in (part.forward, part.backward)]
        later = time.weights
        return time.forward.total + launched[0], time.back - later + launched[1], later

    counts = stage_counts(model, plan.pp * plan.virtual)
    blocks: list[tuple[float, float, float]] = []
    for cross in (False, True):
        kinds = [part for part in work.blocks if part.block is not None and (part.block.cross > 0) is cross]
        count = sum(part.count for part in kinds)
        if count:
            each = [[part.count * one / count for one in passes(part)] for part in kinds]
            blocks += [_sums(each)] * count
    ends = [passes(part) for part in work.parts if part.block is None]
    stages, at = [], 0
    for number, count in enumerate(counts):
        mine: list[Sequence[float]] = [*blocks[at : at + count]]
        mine += [ends[0]] * (number == 0) + [ends[-1]] * (number == len(counts) - 1)
        stages.append(_sums(mine))
        at += count
    forward, into, later = (list(column) for column in zip(*stages))
    return Costs(
        forward=forward,
        backward_input=into,
        backward_weight=later,
        transfer=transfer_seconds(work, rates, plan),
    )


def _sums(rows: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    first, second, third = (sum(column) for column in zip(*rows))
    return first, second, third
