"""Sends and receives written out, in an order that cannot deadlock even if every one of them blocks."""

from __future__ import annotations

from penstock.schedules.action import Action
from penstock.schedules.costs import Number
from penstock.schedules.schedule import Schedule
from penstock.schedules.simulate import simulate

_Event = tuple[Number, int, Action, Action]
"""Its time; 0 for a transfer and 1 for a computation; what orders the events of one time; what the rank does."""


def with_communication(schedule: Schedule) -> Schedule:
    """The schedule with `SEND_…` after what is computed and `RECV_…` before what needs it, where two ranks meet.

    All events of a run with unit costs are put in one order: a computation at its start, a transfer at the end of
    what produced it. Each rank's list is a part of that one order, with both ends of a transfer at the same place
    in it. Hence the earliest event not yet done can always be done, and blocking operations cannot deadlock.
    Transfers between the same two ranks also come in the same order at both ends, as channels without tags need.

    Raises `ConfigError` where the schedule deadlocks by itself, or has sends and receives already.
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
