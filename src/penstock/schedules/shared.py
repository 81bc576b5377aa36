"""Plays a schedule whose ranks share processors: a rank that waits leaves the others more."""

from __future__ import annotations

from typing import NamedTuple

from penstock.errors import ConfigError
from penstock.schedules.costs import Costs
from penstock.schedules.deadlock import waits
from penstock.schedules.schedule import Schedule
from penstock.schedules.simulate import links_of

ROUNDING = 1e-12
"""Share of the time so far: an action with less than this left has ended."""


class Shared(NamedTuple):
    """Result of a simulation on shared processors, in the unit of the costs."""

    makespan: float
    busy: tuple[float, ...]
    """Time in which each rank computes."""

    @property
    def bubble_fraction(self) -> float:
        """Share of all ranks' time that is idle, between 0 and 1."""
        return 1 - sum(self.busy) / (len(self.busy) * self.makespan)


def play_shared(schedule: Schedule, costs: Costs, alone: float) -> Shared:
    """Play `schedule` on processors that p ranks share evenly. `costs` are those while all compute; k of them compute
    min(`alone`, p / k) times as fast. With `alone` = 1 it returns what `simulate` does.

    Raises `ConfigError` for costs that do not fit the schedule, and for a deadlock.
    """
    links, count = links_of(schedule, costs), len(schedule.ranks)
    done, left, busy = [0] * count, [0.0] * count, [0.0] * count
    active: set[int] = set()
    now = 0.0
    while True:
        coming = []
        for rank, order in enumerate(schedule.ranks):
            if rank in active or done[rank] == len(order):
                continue
            stage, kind, i = order[done[rank]]
            inbox, duration, *_ = links[kind][stage]
            if inbox[i] is None:
                continue
            if inbox[i] > now:
                coming.append(float(inbox[i]))
            else:
                active.add(rank)
                left[rank] = float(duration)
        if not active and not coming:
            break
        speed = min(alone, count / len(active)) if active else 1.0
        end = min([*coming, *(now + left[rank] / speed for rank in active)])
        for rank in sorted(active):
            busy[rank] += end - now
            left[rank] -= (end - now) * speed
            if left[rank] > ROUNDING * end:
                continue
            stage, kind, i = schedule.ranks[rank][done[rank]]
            _, _, outbox, delay, weights = links[kind][stage]
            outbox[i] = end + float(delay)
            weights[i] = end
            done[rank] += 1
            active.remove(rank)
        now = end
    if any(number < len(order) for number, order in zip(done, schedule.ranks)):
        raise ConfigError(waits(schedule, done))
    return Shared(now, tuple(busy))
