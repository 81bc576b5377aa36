"""Asking a server as its clients do, and timing what comes: the steps of its engine, and a whole traffic."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import EnvironmentProblem
from penstock.infer.scheduler import Limits
from penstock.infer.simulate import simulate
from penstock.infer.traffic import Arrival, Outcome, Served
from penstock.planner.serve import StepCosts

REPEATS = 3
MOST_TIMED = 64
"""Texts at a time whose steps are timed. Beyond, steps are as much longer for each text."""
DECODED = 24
"""Tokens of a request that times the steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """Requests of random token numbers, which go on to their full length."""

    host: str
    port: int
    vocabulary: int
    """Numbers are drawn below it."""
    key: str | None = None

    async def ask(self, prompt: int, made: int, draw: random.Random) -> Outcome | int:
        """Ask for `made` tokens after a prompt of so many; gives the status where that is not 200. Times are of
        `time.monotonic`."""
        ids = [draw.randrange(self.vocabulary) for _ in range(prompt)]
        settings = {"prompt": ids, "max_tokens": made, "temperature": 0, "ignore_eos": True, "stream": True}
        at = time.monotonic()
        status, lines = await self.post("/v1/completions", settings)
        first = last = 0.0
        whole = False
        async for line in lines:
            if line.startswith(b"data: {"):
                last = time.monotonic()
                first = first or last
            whole = whole or line.startswith(b"data: [DONE]")
        if status == 200 and not whole:
            raise EnvironmentProblem("The server has broken off an answer.")
        return Outcome(at, first, last, made) if status == 200 else status

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

    async def one(arrival: Arrival) -> Outcome | int:
        await asyncio.sleep(max(0.0, begun + arrival.at - time.monotonic()))
        return await client.ask(arrival.prompt, arrival.made, draw)

    found = await asyncio.gather(*map(one, arrivals))
    odd = sorted({status for status in found if isinstance(status, int) and status != 429})
    if odd:
        raise EnvironmentProblem(f"The server has answered requests with {', '.join(map(str, odd))}.")
    return Served.of([one for one in found if isinstance(one, Outcome)], refused=found.count(429))


async def step_costs(client: Client, *, slots: int, longest: int) -> StepCosts:
    """What reading a prompt and a step of the engine take, as clients see them: with a request's way through the
    server, which a prediction leaves out. `longest` is that of prompt and answer together.
    """
    draw = random.Random(0)
    made = max(2, min(DECODED, longest // 2))

    async def group(batch: int, prompt: int, tokens: int) -> list[Outcome]:
        found = await asyncio.gather(*(client.ask(prompt, tokens, draw) for _ in range(batch)))
        return [one for one in found if isinstance(one, Outcome)]

    async def prefill(tokens: int) -> float:
        times = [one.last - one.at for _ in range(REPEATS) for one in await group(1, tokens, 1)]
        return statistics.median(times)

    async def step(batch: int, prompt: int) -> float:
        times = [
            (one.last - one.first) / (made - 1)
            for _ in range(REPEATS)
            for one in await group(batch, prompt, made)
        ]
        return statistics.median(times)

    await group(min(slots, 4), 2, made)  # what is made at first use
    sizes = sorted({1, max(2, longest // 4), max(3, longest - 1)})
    prefills = [(float(size), await prefill(size)) for size in sizes]
    decodes = []
    far = max(2, longest - made)
    batches = [size for size in (1, 2, 4, 8, 16, 32) if size < slots] + [min(slots, MOST_TIMED)]
    for batch in batches:
        near, long = await step(batch, 1), await step(batch, far)
        each = max(0.0, (long - near) / (far - 1))
        decodes.append((float(batch), near - each * made / 2, each))
    return StepCosts(tuple(prefills), tuple(decodes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One traffic, simulated from steps that were timed, and as it came."""

    simulated: Served
    measured: Served


async def compare(client: Client, arrivals: Sequence[Arrival], limits: Limits) -> Measured:
    """Time the steps of a server that has nothing else to do, simulate the traffic from them, and send it."""
    costs = await step_costs(
        client, slots=limits.slots, longest=max(one.prompt + one.made for one in arrivals)
    )
    return Measured(simulated=simulate(arrivals, limits, costs), measured=await replay(client, arrivals))
