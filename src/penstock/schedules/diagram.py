"""A schedule as a table of ranks by time, in plain text that can be parsed."""

from __future__ import annotations

from penstock.errors import ConfigError
from penstock.schedules.costs import Costs
from penstock.schedules.schedule import Schedule, rank_lines
from penstock.schedules.simulate import play


def diagram(schedule: Schedule) -> str:
    """One line per rank and one column per time slot; `Schedule.parse` returns an equal schedule.

    F, I and W take one slot and B takes two, the second written `---`; `.` is an idle slot. Actions that
    never start because of a deadlock follow a `!`. Raises `ConfigError` for a schedule with explicit sends
    and receives.
    """
    if schedule.communicates:
        raise ConfigError(
            "A diagram shows computations only; draw the schedule's computations(), or print all of it with str()."
        )
    starts, clocks, _ = play(schedule, Costs())
    cell = max((len(str(action)) for order in schedule.ranks for action in order), default=1)
    blocked = any(len(begun) < len(order) for begun, order in zip(starts, schedule.ranks))
    end = int(max(clocks, default=0))
    rows = []
    for order, begun in zip(schedule.ranks, starts):
        row: list[str] = []
        for action, start in zip(order, begun):
            row += ["."] * (int(start) - len(row))
            row += [str(action), "-" * cell] if action.kind == "B" else [str(action)]
        if not blocked:
            row += ["."] * (end - len(row))
        elif len(begun) < len(order):
            row += ["!", *map(str, order[len(begun) :])]
        rows.append([f"{word:<{cell}}" for word in row])
    return "\n".join(rank_lines(rows))
