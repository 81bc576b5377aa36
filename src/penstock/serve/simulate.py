"""A queueing simulation: the server's own scheduler, over steps that only take time.

Averages do not tell a 95th percentile. So each request is followed from its arrival to its last token, through the
queue, the slots and the turns of the engine. As in the engine, a step computes all slots from the first to the last
that has a text under way, and each of them looks at as many tokens as the longest text has.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Protocol

from penstock.serve.scheduler import Job, Limits, QueueFull, Scheduler, Turn
from penstock.serve.traffic import Arrival, Outcome, Served


class Costs(Protocol):
    """Seconds of an engine's work."""

    @property
    def request(self) -> float:
        """Seconds of a request's way to the engine and back, while the engine works on others."""

    def prefill(self, tokens: float) -> float:
        """Seconds of reading a prompt of so many tokens."""

    def decode(self, batch: int, cached: float) -> float:
        """One token for each of `batch` sequences, which look at `cached` tokens each."""


def simulate(arrivals: Sequence[Arrival], limits: Limits, costs: Costs, *, replicas: int = 1) -> Served:
    """The outcome of requests that `replicas` engines serve in turn. Raises TooLong as the scheduler does."""
    outcomes: list[Outcome] = []
    refused = 0
    for which in range(replicas):
        served, lost = _One(arrivals[which::replicas], limits, costs).run()
        outcomes += served
        refused += lost
    return Served.of(outcomes, refused=refused)


class _One:
    """One engine, and the requests that come to it."""

    def __init__(self, arrivals: Sequence[Arrival], limits: Limits, costs: Costs) -> None:
        self.arrivals, self.limits, self.costs = arrivals, limits, costs
        self.scheduler = Scheduler(limits)
        self.outcomes: list[Outcome] = []
        self.refused = 0
        self.now = 0.0
        self.firsts: dict[int, float] = {}
        self.slots: dict[int, int] = {}
        self.free: list[int] = []
        """Slots below the highest that has been in use."""

    def run(self) -> tuple[list[Outcome], int]:
        """Serve all requests; returns the outcome of each that was accepted, and how many were refused."""
        arrivals, scheduler, coming = self.arrivals, self.scheduler, 0
        while coming < len(arrivals) or scheduler.running or scheduler.waiting:
            while coming < len(arrivals) and self._comes(coming) <= self.now:
                self._take(coming)
                coming += 1
            turn = scheduler.turn()
            if not turn:
                self.now = max(self.now, self._comes(coming)) if coming < len(arrivals) else self.now
                continue
            more = coming < len(arrivals) and scheduler.running < self.limits.slots
            self._step(turn, (self._comes(coming) if more else math.inf) - self.now)
        return self.outcomes, self.refused

    def _comes(self, number: int) -> float:
        """When a request reaches the engine. Its way back is counted here, too."""
        return self.arrivals[number].at + self.costs.request

    def _take(self, number: int) -> None:
        arrival = self.arrivals[number]
        try:
            self.scheduler.submit(Job(number, arrival.prompt, arrival.made))
        except QueueFull:
            self.refused += 1

    def _step(self, turn: Turn, until: float) -> None:
        """Take a turn, as often as nothing changes."""
        for read in turn.reads:
            if read.job.number not in self.slots:
                self.slots[read.job.number] = heapq.heappop(self.free) if self.free else len(self.slots)
        used = [self.slots[job.number] for job in turn.decode]
        steps, seconds = _steps(turn, max(used) - min(used) + 1 if used else 0, self.costs, until)
        self.now += seconds
        for read in turn.reads:
            self.scheduler.has_read(read)
            if read.job.made:
                self.firsts[read.job.number] = self.now
                if read.job.made >= read.job.most:
                    self._finish(read.job)
        for job in turn.decode:
            if self.scheduler.has_made(job, steps):
                self._finish(job)

    def _finish(self, job: Job) -> None:
        self.scheduler.remove(job.number)
        heapq.heappush(self.free, self.slots.pop(job.number))
        at = self.arrivals[job.number].at
        self.outcomes.append(Outcome(at, self.firsts.pop(job.number), self.now, job.made))


def _steps(turn: Turn, rows: int, costs: Costs, until: float) -> tuple[int, float]:
    """How many turns pass before anything changes, and the seconds that they take.

    With prompts to read it is once. Otherwise the same sequences go on until the first of them is done, or until a
    request comes that finds a free slot, `until` seconds from now.
    """
    seconds = sum(_piece(read.start, read.stop, costs) for read in turn.reads)
    if not turn.decode:
        return 1, seconds
    cached = max(job.prompt + job.made for job in turn.decode)
    each = costs.decode(rows, cached)
    if turn.reads:
        return 1, seconds + each
    steps = min(job.most - job.made for job in turn.decode)
    if until < math.inf and each > 0:
        steps = max(1, min(steps, math.ceil(until / each)))
    return steps, steps * costs.decode(rows, cached + (steps - 1) / 2)


def _piece(start: int, stop: int, costs: Costs) -> float:
    """A later piece of a prompt attends to what is in front of it, as in a prompt that is read at once."""
    if not start:
        return costs.prefill(stop)
    return max(costs.prefill(stop) - costs.prefill(start), costs.prefill(stop - start))
