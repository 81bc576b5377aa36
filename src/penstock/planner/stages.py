"""Costs of each stage of a pipeline, for the simulation of a schedule."""

from __future__ import annotations

from dataclasses import replace

from penstock.config.machine import Machine
from penstock.config.model import ModelConfig
from penstock.config.plan import Plan
from penstock.planner.describe import describe_on
from penstock.planner.operators import Part, Workload
from penstock.planner.pipeline import stage_counts
from penstock.planner.rates import Rates, rates_of
from penstock.planner.step import KindSeconds, StepTime, layout_of, part_time
from penstock.planner.traffic import transfer_seconds
from penstock.schedules import Costs, play_shared, schedule_of


def stage_costs(model: ModelConfig, machine: Machine, plan: Plan) -> Costs:
    """Seconds of each stage's passes and transfers for one micro-batch, on a device of `machine`."""
    return costs_of(describe_on(machine, model, plan), rates_of(machine, plan), plan)


def costs_of(work: Workload, rates: Rates, plan: Plan) -> Costs:
    """Costs as from `stage_costs`, of a described model."""
    machine, layout = rates.machine, layout_of(plan, work)
    host = (machine.operator_seconds or machine.launch_seconds) if rates.cpu else 0.0

    def passes(part: Part) -> tuple[float, float, float]:
        time = part_time(part, rates, layout)
        ahead, behind = (host * sum(op.launches for op in side) for side in (part.forward, part.backward))
        return time.forward.total + ahead, time.back - time.weights + behind, time.weights

    counts = stage_counts(work, plan.pp * plan.virtual)
    ends = [passes(part) for part in work.parts if part.block is None]

    def column(number: int) -> list[float]:
        """One of the three, of each stage."""
        blocks, totals, at = work.each(lambda part: passes(part)[number]), [], 0
        for count in counts:
            totals.append(sum(blocks[at : at + count]))
            at += count
        totals[0] += ends[0][number]
        totals[-1] += ends[-1][number]
        return totals

    return Costs(
        forward=column(0), backward_input=column(1), backward_weight=column(2),
        transfer=transfer_seconds(work, rates, plan),
    )  # fmt: skip


def share_processors(time: StepTime, work: Workload, rates: Rates, plan: Plan) -> None:
    """Correct a pipeline's computing and idle times where its stages share a CPU: a waiting stage leaves others
    more."""
    alone = rates.machine.alone_speedup
    if not rates.cpu or plan.pp == 1 or alone <= 1:
        return
    costs = replace(costs_of(work, rates, plan), transfer=0.0)
    works = play_shared(schedule_of(plan), costs, 1.0).busy
    slowest = works.index(max(works))
    shared = play_shared(schedule_of(plan), costs, alone)
    busy = shared.busy[slowest]
    for name in (*KindSeconds._fields, "recompute", "output", "launch"):
        time.seconds[name] *= busy / works[slowest]
    time.seconds["bubble"] = shared.makespan - busy
    time.bubble_fraction = time.seconds["bubble"] / busy
