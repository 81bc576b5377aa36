"""Adds explicit sends and receives, in an order that cannot deadlock even if every one of them blocks."""

from __future__ import annotations

from penstock.schedules.action import Action
from penstock.schedules.costs import Number
from penstock.schedules.schedule import Schedule
from penstock.schedules.simulate import simulate

_Event = tuple[Number, int, Action, Action]
"""The time; 0 for a transfer or 1 for a computation; the action that orders events of the same time; the
action that the rank performs."""


def with_communication(schedule: Schedule) -> Schedule:
    """The schedule with `SEND_…` after a result and `RECV_…` before its use, where neighbouring stages are on
    two ranks.

    All events of a run with unit costs get one global order: a computation at its start, a transfer at the
    end of the computation that produced it. Each rank's list is a part of that order, with both ends of a
    transfer at the same place in it. So the earliest event that is not yet done can always be done, and
    blocking operations cannot deadlock. Transfers between the same two ranks also come in the same order at
    both ends, which channels without tags need.

    Raises `ConfigError` if the schedule itself deadlocks, or already has sends and receives.
    """
    run = simulate(schedule)
    home, last = schedule.placement, schedule.stages - 1
    events: list[list[_Event]] = [[] for _ in schedule.ranks]
    for rank, action, start, end in run.timeline():
        stage, kind, i = action
        events[rank].append((start, 1, action, action))
        if kind == "F" and stage < last:
            send, receive = Action(stage, "SEND_F", i), Action(stage + 1, "RECV_F", i)
        elif kind in ("B", "I") and stage > 0:
            send, receive = Action(stage, "SEND_B", i), Action(stage - 1, "RECV_B", i)
        else:
            continue
        if home[receive.stage] != rank:
            events[rank].append((end, 0, send, send))
            events[home[receive.stage]].append((end, 0, send, receive))
    return Schedule(tuple(tuple(event[3] for event in sorted(of_rank)) for of_rank in events))
