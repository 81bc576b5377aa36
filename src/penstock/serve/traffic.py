"""Requests over time, read from a trace or drawn at random; a simulation of a server's queue and steps; and the
resulting latencies."""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from penstock.boundary.files import quoted, shown
from penstock.boundary.text import read_lines
from penstock.boundary.trees import Bounds, parse_json
from penstock.config.convert import BadValue, Checked, Count, Positive, Range, convert
from penstock.errors import ConfigError
from penstock.serve.scheduler import Job, Limits, QueueFull, Scheduler, Turn

LONGEST = 1 << 24
"""Maximum number of tokens of a prompt or an answer in a trace."""
MOST_REQUESTS = 1_000_000
LEAST_DRAWN, MOST_DRAWN = 1_000, 20_000
"""Fewest and most requests to draw for a rate, if no number is given."""
_LINE = Bounds(bytes=1 << 16, values=100)


class Arrival(NamedTuple):
    """One request: its arrival, in seconds after the first, and the numbers of tokens of its prompt and its answer."""

    at: float
    prompt: int
    answer: int


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
    answer: tuple[int, int]
    """Fewest and most tokens of an answer, in the same way."""

    @classmethod
    def parse(cls, text: str) -> Rate:
        """The rate in words NAME=VALUE: rate, in and out; a range is `in=64..512`. Raises ConfigError with every
        problem."""
        kinds = {"rate": lambda value: convert(value, Positive, text=True), "in": _lengths, "out": _lengths}
        words: dict[str, Any] = dict(word.partition("=")[::2] for word in text.split())
        problems = [f"{quoted(name)} is not part of a rate." for name in words if name not in kinds]
        problems += [f"{name}= is missing." for name in kinds if name not in words]
        for name in [name for name in kinds if name in words]:
            try:
                words[name] = kinds[name](words[name])
            except BadValue as problem:
                problems.append(problem.sentence(f"{name}="))
        if problems:
            raise ConfigError([f"requests {quoted(text)}: {problem}" for problem in problems] + [_FORM])
        return cls(rate=words["rate"], prompt=words["in"], answer=words["out"])

    def arrivals(self, count: int, *, seed: int = 0) -> list[Arrival]:
        """`count` requests, the same for the same seed."""
        draw = random.Random(seed)
        at, arrivals = 0.0, []
        for _ in range(count):
            arrivals.append(Arrival(at, draw.randint(*self.prompt), draw.randint(*self.answer)))
            at += draw.expovariate(self.rate)
        return arrivals


def _lengths(value: str) -> tuple[int, int]:
    """Fewest and most tokens, from a number or a range."""
    low, dots, high = value.partition("..")
    first = convert(low, Count, text=True)
    last = convert(high, Count, text=True) if dots else first
    if not first <= last <= LONGEST:
        raise BadValue(value, f"must be 1 to {LONGEST:,} tokens, the fewest first.")
    return first, last


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
        span = max((o.last for o in outcomes), default=0.0) - min((o.at for o in outcomes), default=0.0)
        tokens = sum(outcome.tokens for outcome in outcomes)
        return cls(
            requests=len(outcomes) + refused,
            refused=refused,
            seconds=span,
            tokens_per_second=tokens / span if span > 0 else 0.0,
            first_token=Spread.of([outcome.first - outcome.at for outcome in outcomes]),
            per_token=Spread.of([(o.last - o.first) / (o.tokens - 1) for o in outcomes if o.tokens > 1]),
            latency=Spread.of([outcome.last - outcome.at for outcome in outcomes]),
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
        served, lost = _simulate_one(arrivals[replica::replicas], limits, costs)
        outcomes += served
        refused += lost
    return Served.of(outcomes, refused=refused)


def _simulate_one(arrivals: Sequence[Arrival], limits: Limits, costs: Costs) -> tuple[list[Outcome], int]:
    """Simulate one engine: the outcome of each accepted request, and the number of refused ones."""
    scheduler, now, refused = Scheduler(limits), 0.0, 0
    # A request reaches the engine after its way to it; the time for its way back is included here, too.
    coming = deque((arrival.at + costs.request, Job(n, *arrival[1:])) for n, arrival in enumerate(arrivals))
    outcomes, firsts = list[Outcome](), dict[int, float]()
    slots, free = 0, list[int]()  # slots that have been used, and those of them that are free now
    while coming or scheduler.running or scheduler.waiting:
        while coming and coming[0][0] <= now:
            try:
                scheduler.submit(coming.popleft()[1])
            except QueueFull:
                refused += 1
        turn = scheduler.turn()
        if not turn:
            now = max(now, coming[0][0]) if coming else now
            continue
        for read in turn.reads:
            if read.job.slot is None:
                if not free:
                    free, slots = [slots], slots + 1
                read.job.slot = heapq.heappop(free)
        used = [job.slot for job in turn.decode if job.slot is not None]
        until = coming[0][0] - now if coming and scheduler.running < limits.slots else math.inf
        # The turn is repeated until something changes.
        steps, seconds = _steps(turn, max(used) - min(used) + 1 if used else 0, costs, until)
        now += seconds
        for read in turn.reads:
            scheduler.has_read(read)
            if read.job.generated:
                firsts[read.job.number] = now
        done = [read.job for read in turn.reads if read.job.generated >= read.job.max_tokens]
        done += [job for job in turn.decode if scheduler.has_made(job, steps)]
        for job in done:
            scheduler.remove(job.number)
            assert job.slot is not None
            heapq.heappush(free, job.slot)
            outcomes.append(Outcome(arrivals[job.number].at, firsts[job.number], now, job.generated))
    return outcomes, refused


def _steps(turn: Turn, rows: int, costs: Costs, until: float) -> tuple[int, float]:
    """How many turns pass before anything changes, and how many seconds they take.

    With prompts to read, it is one turn. Otherwise the same sequences continue until the first of them is done, or
    until a request arrives that finds a free slot, `until` seconds from now.
    """
    seconds = sum(_piece(read.start, read.stop, costs) for read in turn.reads)
    if not turn.decode:
        return 1, seconds
    cached = max(job.prompt + job.generated for job in turn.decode)
    step_seconds = costs.decode(rows, cached)
    if turn.reads:
        return 1, seconds + step_seconds
    steps = min(job.max_tokens - job.generated for job in turn.decode)
    if until < math.inf and step_seconds > 0:
        steps = max(1, min(steps, math.ceil(until / step_seconds)))
    return steps, steps * costs.decode(rows, cached + (steps - 1) / 2)


def _piece(start: int, stop: int, costs: Costs) -> float:
    """Seconds for a piece of a prompt. A later piece attends to the tokens before it, as in a prompt that is read at
    once."""
    if not start:
        return costs.prefill(stop)
    return max(costs.prefill(stop) - costs.prefill(start), costs.prefill(stop - start))
