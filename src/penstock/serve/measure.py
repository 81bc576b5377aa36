"""Asking a server as its clients do, and timing what comes: the steps of its engine, and a whole traffic."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.errors import EnvironmentProblem
from penstock.planner.serve import LENGTHS, StepCosts
from penstock.serve.scheduler import Limits
from penstock.serve.traffic import Arrival, Outcome, Served, simulate

REPEATS = 3
MOST_TIMED = 32
"""Texts at a time whose steps are timed. Beyond, steps are as much longer for each text."""
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16)
DECODED = 32
"""Tokens of a request that times the steps."""
STEADY = 4
"""Steps of all texts together that are enough to time one."""
BURST = 4
"""Prompts sent at once, to see how long the engine is busy with each."""
CHUNK = 512
"""Tokens of prompts that the server reads in a step."""
_TOKEN = b'"token_ids": ['


class Answer(NamedTuple):
    """An answer as it came, in seconds of `time.monotonic`."""

    at: float
    """The time at which it was asked for."""
    times: list[float]
    """The times at which its tokens came."""

    def outcome(self) -> Outcome:
        """The times and the tokens of this answer, as statistics of a traffic need them."""
        return Outcome(self.at, self.times[0], self.times[-1], len(self.times))


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """Requests of random token numbers, which go on to their full length."""

    host: str
    port: int
    vocabulary: int
    """Numbers are drawn below it."""
    key: str | None = None

    async def ask(self, prompt: int, made: int, draw: random.Random) -> Answer | int:
        """Request `made` tokens after a prompt of so many; returns the status where it is not 200."""
        ids = [draw.randrange(self.vocabulary) for _ in range(prompt)]
        settings = {
            "prompt": ids, "max_tokens": made, "temperature": 0, "ignore_eos": True, "stream": True,
            "return_token_ids": True,
        }  # fmt: skip
        at = time.monotonic()
        status, lines = await self.post("/v1/completions", settings)
        times: list[float] = []
        whole = False
        async for line in lines:
            if _TOKEN in line:
                times.append(time.monotonic())
            whole = whole or line.startswith(b"data: [DONE]")
        if status == 200 and not (whole and times):
            raise EnvironmentProblem("The server has broken off an answer.")
        return Answer(at, times) if status == 200 else status

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """The status of an answer, and its lines as they come."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        raw = json.dumps(body).encode()
        head = [
            f"POST {path} HTTP/1.1",
            f"Host: {self.host}",
            "Connection: close",
            f"Content-Length: {len(raw)}",
        ]
        head += [f"Authorization: Bearer {self.key}"] if self.key else []
        writer.write("\r\n".join([*head, "", ""]).encode() + raw)
        status = (await reader.readline()).split()
        if len(status) < 2 or not status[1].isdigit():
            writer.close()
            raise EnvironmentProblem(
                f"The server at {self.host}:{self.port} has closed a connection without an answer."
            )

        async def lines() -> Any:
            try:
                async for line in reader:
                    yield line
            finally:
                writer.close()

        return int(status[1]), lines()


async def replay(client: Client, arrivals: Sequence[Arrival], *, seed: int = 0) -> Served:
    """Send every request at its time, and see what comes. A request that is refused (429) counts as such; any other
    answer than 200 raises EnvironmentProblem."""
    draw = random.Random(seed)
    begun = time.monotonic()

    async def answer_to(arrival: Arrival) -> Answer | int:
        await asyncio.sleep(max(0.0, begun + arrival.at - time.monotonic()))
        return await client.ask(arrival.prompt, arrival.made, draw)

    outcomes = await asyncio.gather(*map(answer_to, arrivals))
    odd = sorted({status for status in outcomes if isinstance(status, int) and status != 429})
    if odd:
        raise EnvironmentProblem(f"The server has answered requests with {', '.join(map(str, odd))}.")
    answers = [answer_to.outcome() for answer_to in outcomes if isinstance(answer_to, Answer)]
    return Served.of(answers, refused=outcomes.count(429))


async def step_costs(
    client: Client, *, slots: int, longest: int, prompt: int | None = None, chunk: int = CHUNK
) -> StepCosts:
    """The seconds of reading a prompt, of a step of the engine, and of a request's way through the server. `longest`
    are the tokens of prompt and answer together, `prompt` those of the longest prompt, `chunk` those of prompts that
    are read in a step.
    """
    # Drawn again each time: of a prompt that has come before, the server still has keys and values.
    timing = _Timing(client, random.Random(), chunk)
    made = max(2, min(DECODED, longest // 2))
    for _ in range(2):  # what is made at first use
        await timing.group(min(slots, BURST), 2, made)
    most = max(2, min(prompt or longest - 1, longest - 1))
    sizes = [*(size for size in LENGTHS if size < most), most]
    reads = [(float(size), *await timing.prefill(size)) for size in sizes]
    batches = [*(size for size in BATCHES if size < slots), min(slots, MOST_TIMED)]
    far = min(most, longest - made)
    decodes = [(float(batch), *await timing.steps(batch, made, far)) for batch in batches]
    way = statistics.median(way for _, _, way in reads)
    return StepCosts(tuple((size, busy) for size, busy, _ in reads), tuple(decodes), request=way)


@dataclass(frozen=True, slots=True)
class _Timing:
    """Times the steps of a server that serves no other client."""

    client: Client
    draw: random.Random
    chunk: int

    async def group(self, batch: int, prompt: int, tokens: int) -> list[Answer]:
        """Answers to requests that are sent at once."""
        requests = (self.client.ask(prompt, tokens, self.draw) for _ in range(batch))
        return [answer for answer in await asyncio.gather(*requests) if isinstance(answer, Answer)]

    async def prefill(self, tokens: int) -> tuple[float, float]:
        """Seconds for which the engine is busy with a prompt, and those that its request takes besides: the former is
        what each of several prompts adds to the time of one."""
        alone: list[float] = []
        together: list[float] = []
        for _ in range(REPEATS):
            alone += [reply.times[0] - reply.at for reply in await self.group(1, tokens, 1)]
            every = await self.group(BURST, tokens, 1)
            together.append(max(reply.times[0] for reply in every) - min(reply.at for reply in every))
        single = statistics.median(alone)
        busy = min(single, max(0.0, (statistics.median(together) - single) / (BURST - 1)))
        return busy, single - busy

    async def steps(self, batch: int, made: int, far: int) -> tuple[float, float]:
        """Seconds of a step with an empty cache, and of each token in the cache of the longest text."""
        # All prompts must have been read while there are still tokens to make.
        far = max(2, min(far, self.chunk * max(1, made - 2 * STEADY) // batch))
        near, long = await self._step(batch, 1, made), await self._step(batch, far, made)
        each = max(0.0, (long[0] - near[0]) / max(1.0, long[1] - near[1]))
        return max(0.0, near[0] - each * near[1]), each

    async def _step(self, batch: int, prompt: int, made: int) -> tuple[float, float]:
        """Seconds of a step of so many texts, and how many tokens each had then on average."""
        steady = [_steady(await self.group(batch, prompt, made)) for _ in range(REPEATS)]
        seconds, tokens = (statistics.median(each) for each in zip(*steady, strict=True))
        return seconds, prompt + tokens


def _steady(answers: Sequence[Answer]) -> tuple[float, float]:
    """Seconds of a step while all texts were under way, and the tokens that each had made then on average."""
    begin, end = max(answer.times[0] for answer in answers), min(answer.times[-1] for answer in answers)
    first = min(answers, key=lambda answer: answer.times[0])
    places = [place for place, at in enumerate(first.times) if begin <= at <= end]
    if len(places) <= STEADY:  # of few tokens, all that there are
        places = list(range(len(first.times)))
    low, high = places[0], places[-1]
    return (first.times[high] - first.times[low]) / max(1, high - low), (low + 1 + high) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One traffic, simulated from steps that were timed, and as it came."""

    simulated: Served
    measured: Served


async def compare(client: Client, arrivals: Sequence[Arrival], limits: Limits) -> Measured:
    """Time the steps of a server that has nothing else to do, simulate the traffic from them, and send it."""
    longest = max(arrival.prompt + arrival.made for arrival in arrivals)
    prompt = max(arrival.prompt for arrival in arrivals)
    costs = await step_costs(client, slots=limits.slots, longest=longest, prompt=prompt, chunk=limits.chunk)
    return Measured(simulated=simulate(arrivals, limits, costs), measured=await replay(client, arrivals))
