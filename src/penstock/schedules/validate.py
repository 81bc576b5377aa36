"""Checks that a schedule does everything once, in an order that can run."""

from __future__ import annotations

from collections import Counter

from penstock.errors import ConfigError
from penstock.schedules.costs import Costs
from penstock.schedules.schedule import (
    COMMUNICATION_KINDS,
    COMPUTE_KINDS,
    Action,
    Kind,
    Schedule,
    rendezvous,
    waits,
)
from penstock.schedules.simulate import play

_MOST = 20  # most problems in one message; a schedule without one of its stages has thousands


def validate(schedule: Schedule) -> None:
    """Raise `ConfigError`, listing what is wrong, unless the schedule can run.

    Every stage must be on one rank. For every micro-batch, every stage must have one forward and either one
    whole backward or one I and one W. The schedule must never deadlock. Without sends and receives, each rank
    blocks at an action until its input has arrived (sends are buffered). With them, each send and each
    receive blocks until its partner is reached (nothing is buffered).
    """
    problems = _problems(schedule)
    if len(problems) > _MOST:
        problems = [*problems[:_MOST], f"And {len(problems) - _MOST} more problems of this kind."]
    if problems:
        raise ConfigError(problems)


def _problems(schedule: Schedule) -> list[str]:
    if not len(schedule):
        return [
            "The schedule has no actions; every stage needs a forward and a backward for each micro-batch."
        ]
    try:
        _ = schedule.placement
    except ConfigError as error:
        return list(error.problems)
    counts = Counter(action for order in schedule.ranks for action in order)
    twice = [
        f"{action} is in the schedule {times} times; it must be there once."
        for action, times in counts.items()
        if times > 1
    ]
    absent = _absent(schedule, counts)
    if twice or absent:
        return twice + absent
    if schedule.communicates:
        done = rendezvous(schedule)
    else:
        done = [len(starts) for starts in play(schedule, Costs())[0]]
    return waits(schedule, done)


def _absent(schedule: Schedule, counts: Counter[Action]) -> list[str]:
    """Problems of stages with missing or surplus actions for a micro-batch."""
    problems = []
    for stage in range(schedule.stages):
        for i in range(schedule.micro_batches):
            kinds: list[Kind] = [kind for kind in COMPUTE_KINDS if Action(stage, kind, i) in counts]
            if kinds not in (["F", "B"], ["F", "I", "W"]):
                present = ", ".join(f"{stage}{kind}{i}" for kind in kinds) or "nothing"
                problems.append(
                    f"Stage {stage} and micro-batch {i} must have {stage}F{i} and either {stage}B{i} or both "
                    f"{stage}I{i} and {stage}W{i}, but the schedule has {present}."
                )
    if schedule.communicates:
        problems += _strays(schedule, counts)
    return problems


def _strays(schedule: Schedule, counts: Counter[Action]) -> list[str]:
    """Sends and receives between stages that share a rank, or beyond the first or last stage."""
    home = schedule.placement
    problems = []
    for action in counts:
        if action.kind in COMMUNICATION_KINDS:
            low = action.stage - (action.kind in ("RECV_F", "SEND_B"))
            if low < 0 or low + 1 >= schedule.stages:
                problems.append(f"{action} has no stage at its other end; remove it.")
            elif home[low] == home[low + 1]:
                problems.append(
                    f"{action} is between stages {low} and {low + 1}, which share rank {home[low]}; remove it."
                )
    return problems
