"""Requests over time, read from a trace or drawn at random; a simulation of a server's queue and steps; and the
resulting latencies."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from penstock.boundary.files import quoted, shown
from penstock.boundary.text import read_lines
from penstock.boundary.trees import Bounds, parse_json
from penstock.config.convert import BadValue, Checked, Count, Positive, Range, convert
from penstock.errors import ConfigError
from penstock.serve.scheduler import Job, Limits, QueueFull, Scheduler, Turn

LONGEST = 1 << 24
"""Most tokens of a prompt or an answer in a trace."""
MOST_REQUESTS = 1_000_000
LEAST_DRAWN, MOST_DRAWN = 1_000, 20_000
"""Fewest and most requests to draw for a rate, if no number is given."""
_LINE = Bounds(bytes=1 << 16, values=100)


class Arrival(NamedTuple):
    """One request: its arrival, in seconds after the first, and the numbers of tokens of its prompt and its answer."""

    at: float
    prompt: int
    made: int


class Outcome(NamedTuple):
    """One served request: the times of its arrival, its first and its last token, and the number of tokens."""

    at: float
    first: float
    last: float
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate(Checked):
    """Requests that arrive independently of each other (a Poisson process), such as "rate=20 in=512 out=128"."""

    rate: Positive
    """Requests per second, on average."""
    prompt: tuple[int, int]
    """Fewest and most tokens of a prompt; all numbers in between are equally likely."""
    made: tuple[int, int]
    """Fewest and most tokens of an answer, in the same way."""

    @classmethod
    def parse(cls, text: str) -> Rate:
        """The rate in words NAME=VALUE: rate, in and out; a range is `in=64..512`. Raises ConfigError with every
        problem."""
        words = dict(word.partition("=")[::2] for word in text.split())
        problems = [
            f"{quoted(name)} is not part of a rate." for name in words if name not in ("rate", "in", "out")
        ]
        problems += [f"{name}= is missing." for name in ("rate", "in", "out") if name not in words]
        lengths: dict[str, tuple[int, int]] = {}
        rate = 0.0
        for name, value in words.items():
            try:
                if name == "rate":
                    rate = convert(value, Positive, text=True)
                elif name in ("in", "out"):
                    low, dots, high = value.partition("..")
                    first = convert(low, Count, text=True)
                    lengths[name] = first, convert(high, Count, text=True) if dots else first
                    if not first <= lengths[name][1] <= LONGEST:
                        problems.append(
                            f"{name}={quoted(value)} must be 1 to {LONGEST:,} tokens, the fewest first."
                        )
            except BadValue as problem:
                problems.append(problem.sentence(f"{name}="))
        if problems:
            raise ConfigError([f"requests {quoted(text)}: {problem}" for problem in problems] + [_FORM])
        return cls(rate=rate, prompt=lengths["in"], made=lengths["out"])

    def arrivals(self, count: int, *, seed: int = 0) -> list[Arrival]:
        """`count` requests, the same for the same seed."""
        draw = random.Random(seed)
        at, arrivals = 0.0, []
        for _ in range(count):
            arrivals.append(Arrival(at, draw.randint(*self.prompt), draw.randint(*self.made)))
            at += draw.expovariate(self.rate)
        return arrivals


_FORM = (
    'Write requests as "rate=20 in=512 out=128" (requests per second, tokens of a prompt and of an answer, each a '
    'number or a range such as 64..512), or name a file of lines {"at": SECONDS, "in": TOKENS, "out": TOKENS}.'
)
_Length = Range(1, LONGEST)


def read_trace(path: Path) -> list[Arrival]:
    """The requests of a JSON-lines file, in order of their time. Raises ConfigError naming the first bad line."""
    arrivals: list[Arrival] = []
    for line in read_lines(path, "The trace", longest=_LINE.bytes):
        place = f"Line {line.number:,} of the trace {shown(path)}"
        if line.problem:
            raise ConfigError(f"{place} cannot be read: {line.problem}.")
        if not line.text.strip():
            continue
        if len(arrivals) >= MOST_REQUESTS:
            raise ConfigError(f"The trace {shown(path)} has more than {MOST_REQUESTS:,} requests; cut it.")
        values = parse_json(line.text, place, bounds=_LINE)
        try:
            at = convert(values.get("at"), float)
            sizes = [convert(values.get(name), int) for name in ("in", "out")]
        except BadValue as problem:
            raise ConfigError(f"{place}: {problem}. {_FORM}") from None
        if not 0 <= at < math.inf or any(_Length.problem(size) for size in sizes):
            raise ConfigError(f"{place} has a time below 0, or lengths out of 1 to {LONGEST:,}. {_FORM}")
        arrivals.append(Arrival(at, *sizes))
    if not arrivals:
        raise ConfigError(f"The trace {shown(path)} has no request. {_FORM}")
    arrivals.sort()
    first = arrivals[0].at
    return [arrival._replace(at=arrival.at - first) for arrival in arrivals]


def requests_of(
    text: str, count: int | None = None, *, lasting: float = 60.0, seed: int = 0
) -> list[Arrival]:
    """The requests that `--requests` describes: a trace if it is a file, else a rate, from which `count` requests are
    drawn, by default those of `lasting` seconds."""
    if "=" in text and not Path(text).is_file():
        rate = Rate.parse(text)
        usual = min(MOST_DRAWN, max(LEAST_DRAWN, math.ceil(rate.rate * lasting)))
        return rate.arrivals(count or usual, seed=seed)
    return read_trace(Path(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Percentiles: half of all values are at most `p50`, and so on; 0 without values."""

    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        ordered = sorted(values)
        if not ordered:
            return cls()
        picked = [
            ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] for share in (0.5, 0.95, 0.99)
        ]
        return cls(p50=picked[0], p95=picked[1], p99=picked[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Results for all requests, simulated or measured; times in seconds."""

    requests: int
    refused: int
    seconds: float
    """Seconds from the first request to the last token."""
    tokens_per_second: float
    """Generated tokens per second."""
    first_token: Spread
    """Seconds from a request to its first token."""
    per_token: Spread
    """Seconds between two tokens, as a mean per request."""
    latency: Spread
    """Seconds from a request to its last token."""

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], *, refused: int = 0) -> Served:
        span = max((each.last for each in outcomes), default=0.0) - min(
            (each.at for each in outcomes), default=0.0
        )
        tokens = sum(each.tokens for each in outcomes)
        return cls(
            requests=len(outcomes) + refused,
            refused=refused,
            seconds=span,
            tokens_per_second=tokens / span if span > 0 else 0.0,
            first_token=Spread.of([each.first - each.at for each in outcomes]),
            per_token=Spread.of(
                [(each.last - each.first) / (each.tokens - 1) for each in outcomes if each.tokens > 1]
            ),
            latency=Spread.of([each.last - each.at for each in outcomes]),
        )


# -- a queueing simulation: the server's own scheduler, over steps that only take time. Averages do not yield a 95th
# percentile, so each request is followed from its arrival to its last token, through the queue, the slots and the turns
# of the engine. As in the engine, a step computes all slots from the first to the last with a running text, and each of
# them attends to as many tokens as the longest text has.


class Costs(Protocol):
    """Seconds of an engine's work."""

    @property
    def request(self) -> float:
        """Seconds for a request to reach the engine and return, while the engine works on others."""

    def prefill(self, tokens: float) -> float:
        """Seconds for reading a prompt of `tokens` tokens."""

    def decode(self, batch: int, cached: float) -> float:
        """Seconds for one token of each of `batch` sequences, which attend to `cached` tokens each."""


def simulate(arrivals: Sequence[Arrival], limits: Limits, costs: Costs, *, replicas: int = 1) -> Served:
    """Simulate requests that are dealt to `replicas` engines in turn. Raises TooLong as the scheduler does."""
    outcomes: list[Outcome] = []
    refused = 0
    for replica in range(replicas):
        served, lost = _One(arrivals[replica::replicas], limits, costs).run()
        outcomes += served
        refused += lost
    return Served.of(outcomes, refused=refused)


class _One:
    """Simulation of one engine and its requests."""

    def __init__(self, arrivals: Sequence[Arrival], limits: Limits, costs: Costs) -> None:
        self.arrivals, self.limits, self.costs = arrivals, limits, costs
        self.scheduler = Scheduler(limits)
        self.outcomes: list[Outcome] = []
        self.refused = 0
        self.now = 0.0
        self.firsts: dict[int, float] = {}
        self.slots: dict[int, int] = {}
        self.free: list[int] = []
        """Free slots below the highest slot that has been used."""

    def run(self) -> tuple[list[Outcome], int]:
        """Serve all requests; return the outcome of each accepted request, and the number of refused ones."""
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
        """When a request reaches the engine. The time for its way back is included here, too."""
        return self.arrivals[number].at + self.costs.request

    def _take(self, number: int) -> None:
        arrival = self.arrivals[number]
        try:
            self.scheduler.submit(Job(number, arrival.prompt, arrival.made))
        except QueueFull:
            self.refused += 1

    def _step(self, turn: Turn, until: float) -> None:
        """Run a turn, repeated until something changes."""
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
                if read.job.made >= read.job.max_tokens:
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
    """How many turns pass before anything changes, and how many seconds they take.

    With prompts to read, it is one turn. Otherwise the same sequences continue until the first of them is done, or
    until a request arrives that finds a free slot, `until` seconds from now.
    """
    seconds = sum(_piece(read.start, read.stop, costs) for read in turn.reads)
    if not turn.decode:
        return 1, seconds
    cached = max(job.prompt + job.made for job in turn.decode)
    each = costs.decode(rows, cached)
    if turn.reads:
        return 1, seconds + each
    steps = min(job.max_tokens - job.made for job in turn.decode)
    if until < math.inf and each > 0:
        steps = max(1, min(steps, math.ceil(until / each)))
    return steps, steps * costs.decode(rows, cached + (steps - 1) / 2)


def _piece(start: int, stop: int, costs: Costs) -> float:
    """Seconds for a piece of a prompt. A later piece attends to the tokens before it, as in a prompt that is read at
    once."""
    if not start:
        return costs.prefill(stop)
    return max(costs.prefill(stop) - costs.prefill(start), costs.prefill(stop - start))
