"""A queueing simulation: the server's own scheduler, over steps that only take time.

Averages do not tell a 95th percentile. So each request is followed from its arrival to its last token, through the
queue, the slots and the turns of the engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from penstock.infer.scheduler import Job, Limits, QueueFull, Scheduler, Turn
from penstock.infer.traffic import Arrival, Outcome, Served


class Costs(Protocol):
    """Seconds of an engine's work."""

    def prefill(self, tokens: float) -> float:
        """Reading a prompt of so many tokens."""

    def decode(self, batch: int, cached: float) -> float:
        """One token for each of `batch` sequences, which have `cached` tokens each on average."""


def simulate(arrivals: Sequence[Arrival], limits: Limits, costs: Costs, *, replicas: int = 1) -> Served:
    """What becomes of requests that are dealt out in turn to so many engines. Raises TooLong as the scheduler does."""
    outcomes: list[Outcome] = []
    refused = 0
    for which in range(replicas):
        served, lost = _one(arrivals[which::replicas], limits, costs)
        outcomes += served
        refused += lost
    return Served.of(outcomes, refused=refused)


def _one(arrivals: Sequence[Arrival], limits: Limits, costs: Costs) -> tuple[list[Outcome], int]:
    scheduler, outcomes, refused = Scheduler(limits), list[Outcome](), 0
    firsts: dict[int, float] = {}
    now, coming = 0.0, 0

    def finish(job: Job) -> None:
        scheduler.remove(job.number)
        outcomes.append(Outcome(arrivals[job.number].at, firsts.pop(job.number), now, job.made))

    while coming < len(arrivals) or scheduler.running or scheduler.waiting:
        while coming < len(arrivals) and arrivals[coming].at <= now:
            one = arrivals[coming]
            try:
                scheduler.submit(Job(coming, one.prompt, one.made))
            except QueueFull:
                refused += 1
            coming += 1
        turn = scheduler.turn()
        if not turn:
            now = max(now, arrivals[coming].at) if coming < len(arrivals) else now
            continue
        until = (
            arrivals[coming].at if coming < len(arrivals) and scheduler.running < limits.slots else math.inf
        )
        steps, seconds = _steps(turn, costs, until - now)
        now += seconds
        for read in turn.reads:
            scheduler.has_read(read)
            if read.job.made:
                firsts[read.job.number] = now
                if read.job.made >= read.job.most:
                    finish(read.job)
        for job in turn.decode:
            if scheduler.has_made(job, steps):
                finish(job)
    return outcomes, refused


def _steps(turn: Turn, costs: Costs, until: float) -> tuple[int, float]:
    """How many times the turn is taken before anything changes, and what that takes.

    With prompts to read it is once. Otherwise the same sequences go on until the first of them is done, or until a
    request comes that finds a free slot, `until` seconds from now.
    """
    seconds = sum(_piece(read.start, read.stop, costs) for read in turn.reads)
    if not turn.decode:
        return 1, seconds
    batch = len(turn.decode)
    cached = sum(job.prompt + job.made for job in turn.decode) / batch
    if turn.reads:
        return 1, seconds + costs.decode(batch, cached)
    each = costs.decode(batch, cached)
    steps = min(job.most - job.made for job in turn.decode)
    if until < math.inf and each > 0:
        steps = max(1, min(steps, math.ceil(until / each)))
    return steps, steps * costs.decode(batch, cached + (steps - 1) / 2)


def _piece(start: int, stop: int, costs: Costs) -> float:
    """A later piece of a prompt attends to what is in front of it, as in a prompt that is read at once."""
    if not start:
        return costs.prefill(stop)
    return max(costs.prefill(stop) - costs.prefill(start), costs.prefill(stop - start))
