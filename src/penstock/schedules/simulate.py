"""Plays a schedule with given costs and returns makespan, bubble, memory and timeline; also on processors that ranks
share, from measured times, and with explicit sends and receives in an order that cannot deadlock."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from itertools import accumulate
from types import GeneratorType
from typing import Any, NamedTuple

from penstock.errors import ConfigError
from penstock.schedules.costs import Costs, Number, durations, memory_changes, per_stage, ratio
from penstock.schedules.schedule import Action, Kind, Schedule, waits


class Span(NamedTuple):
    """One action in time."""

    rank: int
    action: Action
    start: Number
    end: Number


@dataclass(frozen=True, slots=True)
class Simulation:
    """The result of a simulation. Times and memory are in the units of the costs."""

    schedule: Schedule
    costs: Costs
    makespan: Number
    """Time from the first start to the last end."""
    ideal: Number
    """The makespan without any bubble: the mean of `busy`."""
    busy: tuple[Number, ...]
    """Time that each rank computes."""
    peak_memory: tuple[Number, ...]
    """Peak memory of each rank."""
    starts: tuple[tuple[Number, ...], ...]
    """The time at which each rank starts each of its actions."""

    @property
    def idle(self) -> tuple[Number, ...]:
        """Time that each rank does not compute."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble_over_ideal(self) -> Number:
        """Time lost, relative to `ideal`: (p − 1) / m for 1F1B with equal stages (Narayanan et al., SC 2021, §2.2)."""
        return ratio(self.makespan - self.ideal, self.ideal) if self.ideal else 0

    @property
    def bubble_fraction(self) -> Number:
        """Share of all ranks' time that is idle, between 0 and 1."""
        return ratio(self.makespan - self.ideal, self.makespan) if self.makespan else 0

    def timeline(self) -> list[Span]:
        """Every action with its rank, start and end, by rank and then by time."""
        duration = durations(self.costs, self.schedule.stages)
        return [
            Span(rank, action, start, start + duration[action.kind][action.stage])
            for rank, (order, starts) in enumerate(zip(self.schedule.ranks, self.starts))
            for action, start in zip(order, starts)
        ]


def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """Simulate a schedule: each rank starts its next action as soon as it is free and the input has arrived.

    Takes time proportional to the number of actions. Raises `ConfigError` for costs that do not fit the
    schedule, for explicit sends and receives, and for a deadlock, naming which rank waits for what.
    """
    costs = costs or Costs()
    if schedule.communicates:
        raise ConfigError(
            "A schedule with sends and receives cannot be simulated; simulate its computations(), with the time of "
            "a transfer as a cost."
        )
    starts, clocks, waited = play(schedule, costs)
    if any(len(done) < len(order) for done, order in zip(starts, schedule.ranks)):
        raise ConfigError(waits(schedule, [len(done) for done in starts]))
    busy = tuple(end - lost for end, lost in zip(clocks, waited))
    return Simulation(
        schedule=schedule, costs=costs, makespan=max(clocks, default=0), ideal=ratio(sum(busy), len(busy)),
        busy=busy, peak_memory=_peaks(schedule, costs), starts=tuple(map(tuple, starts)),
    )  # fmt: skip


_Box = list[Any]
"""Arrival time of an input, for each micro-batch; before it is known, the rank that waits for it, or None. The type is
Any, because type checks would slow the inner loop."""
_Links = dict[Kind, list[tuple[_Box, Number, _Box, Number, _Box]]]
_Runner = Generator[None, None, None]


def play(schedule: Schedule, costs: Costs) -> tuple[list[list[Number]], list[Number], list[Number]]:
    """Start times of all actions that can start; per rank, the end of its last action and its total waiting
    time.

    A rank that needs an input whose time is not known yet stores itself in the input's place and stops. The
    rank that later fills the place wakes it. Each rank is a generator, because most of the work is stopping
    and resuming.
    """
    links = links_of(schedule, costs)
    starts: list[list[Number]] = [[] for _ in schedule.ranks]
    clocks: list[Number] = [0] * len(starts)
    waited: list[Number] = [0] * len(starts)

    def run(rank: int) -> _Runner:
        now: Number = 0
        start = starts[rank].append
        for stage, kind, i in schedule.ranks[rank]:
            inbox, duration, outbox, delay, weight_box = links[kind][stage]
            ready = inbox[i]
            if ready is None:
                inbox[i] = runners[rank]
                yield
                ready = inbox[i]
            if ready > now:
                waited[rank] += ready - now
                now = ready
            start(now)
            now += duration
            waiter = outbox[i]
            outbox[i] = now + delay
            if waiter is not None:
                able.append(waiter)
            weight_box[i] = now
        clocks[rank] = now

    runners = [run(rank) for rank in range(len(starts))]
    able = runners[::-1]
    while able:
        runner = able.pop()
        if not isinstance(runner, GeneratorType):  # the time was already set
            raise ConfigError(
                "An action is in the schedule twice, so it cannot be simulated; validate() lists all problems."
            )
        next(runner, None)
    return starts, clocks, waited


def links_of(schedule: Schedule, costs: Costs) -> _Links:
    """The link of each kind and stage: the box of its input, its duration, the box and delay of its output, and the
    box that shows W that I is done.

    The forward and the backward of a micro-batch are one chain of 2·S links: F of stage s is link s, and its
    B or I is link 2S − 1 − s.
    """
    stages, count, home = schedule.stages, schedule.micro_batches, schedule.placement
    duration = durations(costs, stages)
    transfer = per_stage("transfer", costs.transfer, max(stages - 1, 0))
    hop: list[Number] = [0 if home[s] == home[s + 1] else transfer[s] for s in range(stages - 1)]
    onward: list[Number] = [*hop, 0]  # from stage s to s + 1
    back: list[Number] = [0, *hop]  # from stage s to s - 1
    chain: list[_Box] = [[0] * count, *([None] * count for _ in range(2 * stages))]
    nowhere: _Box = [0] * count
    links: _Links = {"F": [], "B": [], "I": [], "W": []}
    for s in range(stages):
        links["F"].append((chain[s], duration["F"][s], chain[s + 1], onward[s], nowhere))
        into, out = chain[2 * stages - 1 - s], chain[2 * stages - s]
        weights: _Box = [None] * count
        links["B"].append((into, duration["B"][s], out, back[s], nowhere))
        links["I"].append((into, duration["I"][s], out, back[s], weights))
        links["W"].append((weights, duration["W"][s], [None] * count, 0, nowhere))
    return links


def _peaks(schedule: Schedule, costs: Costs) -> tuple[Number, ...]:
    """Peak memory of each rank. Only the order matters: forwards allocate at their start, others free at their end."""
    change = memory_changes(costs, schedule.stages)
    return tuple(
        max(accumulate([change[kind][stage] for stage, kind, _ in order], initial=0))
        for order in schedule.ranks
    )


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


ROUNDING = 1e-12
"""Share of the elapsed time; an action with less than this remaining counts as ended."""


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
    """Play `schedule` on processors that p ranks share evenly. `costs` hold while all ranks compute; when k ranks
    compute, they are min(`alone`, p / k) times as fast. With `alone` = 1 the result equals `simulate`'s.

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
