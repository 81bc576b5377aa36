"""What `penstock deploy` simulates for our own server on this machine, beside what came of the same traffic.

    OMP_NUM_THREADS=1 python benchmarks/deploy_measured.py --output benchmarks/results/deploy_measured_cpu.json

Each case is a model with random weights behind `penstock serve`. In each round the steps of its engine are timed as
a client sees them, traffic at shares of the capacity that follows is drawn, simulated and sent, and
the steps are timed again. `from its steps` is the mean of the simulations from the steps before and after, which
corrects for drift of a shared machine's speed; `from the machine` is what deploy says before any server runs, from a
probe at the beginning of the round. Errors are medians over rounds.

Requests come at random (a Poisson process), `requests` of them, with lengths drawn between the case's limits.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from penstock.config.machine import Machine
from penstock.config.model import PRESETS, ModelConfig
from penstock.errors import EnvironmentProblem
from penstock.models import create
from penstock.models.convert import save_pretrained
from penstock.planner.serve import LENGTHS, Serving, StepCosts, predicted_costs
from penstock.probe import probe
from penstock.report.record import environment
from penstock.serve.deploy import Layout, server_command
from penstock.serve.scheduler import Limits
from penstock.serve.settings import DeployConfig
from penstock.serve.traffic import Arrival, Outcome, Rate, Served, simulate

SMALL: Any = PRESETS["gpt2"]
LLAMA: Any = PRESETS["llama-tiny"]
WAITING = 10_000
"""Requests that may wait: enough that none is refused, so that waiting shows as time."""
_PORT = re.compile(r":(\d+)/v1")
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
        return await client.ask(arrival.prompt, arrival.answer, draw)

    outcomes = await asyncio.gather(*map(answer_to, arrivals))
    odd = sorted({status for status in outcomes if isinstance(status, int) and status != 429})
    if odd:
        raise EnvironmentProblem(f"The server has answered requests with {', '.join(map(str, odd))}.")
    answers = [answer_to.outcome() for answer_to in outcomes if isinstance(answer_to, Answer)]
    return Served.of(answers, refused=outcomes.count(429))


async def step_costs(
    client: Client, *, slots: int, longest: int, prompt: int | None = None, chunk: int = 512
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


def limits_of(layout: Layout) -> Limits:
    """The limits of a layout's server."""
    return Limits(
        slots=layout.slots, waiting=WAITING, context=layout.context,
        cache=min(layout.cache_tokens, layout.slots * Limits().blocks(layout.context)),
    )  # fmt: skip


@contextmanager
def server_started(words: Sequence[str]) -> Iterator[int]:
    """Run `penstock` with the words of our server, and yield the port that it listens on.

    Raises EnvironmentProblem where it does not start.
    """
    words = [*words, "--port", "0", "--waiting", str(WAITING)]
    process = subprocess.Popen([sys.executable, "-m", "penstock", *words], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = _PORT.search(process.stdout.readline())
        if port is None:
            raise EnvironmentProblem(
                f"The server has not started; run it alone to see why: penstock {' '.join(words)}"
            )
        yield int(port[1])
    finally:
        process.terminate()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@dataclass(frozen=True)
class Case:
    """A model, how it is served, and what is asked of it."""

    model: ModelConfig
    slots: int
    prompt: tuple[int, int]
    made: tuple[int, int]

    @property
    def mean(self) -> tuple[float, float]:
        """Tokens of a prompt and of an answer."""
        return sum(self.prompt) / 2, sum(self.made) / 2


CASES = {
    "gpt2, 6 blocks of 384": Case(
        replace(SMALL, width=384, depth=6, heads=6, mlp_width=1536, vocabulary=8192, sequence=512),
        8, (16, 128), (16, 48),
    ),
    "gpt2": Case(SMALL, 8, (16, 128), (16, 48)),
    "llama of 8 blocks of 256": Case(
        replace(LLAMA, width=256, depth=8, heads=8, mlp_width=704, sequence=512),
        16, (8, 64), (8, 64),
    ),
}  # fmt: skip
FIGURES = {
    "tokens_per_second": lambda one: one.tokens_per_second,
    "latency_p50": lambda one: one.latency.p50,
    "latency_p95": lambda one: one.latency.p95,
    "first_token_p95": lambda one: one.first_token.p95,
}


def capacity(case: Case, costs: StepCosts) -> float:
    """Requests per second where all slots are busy."""
    prompt, made = case.mean
    step = costs.decode(case.slots, case.prompt[1] + made / 2)
    return 1.0 / (costs.prefill(prompt) + (made - 1) * step / case.slots)


def figures(served: Served) -> dict[str, float]:
    return {name: of(served) for name, of in FIGURES.items()}


def together(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each figure."""
    return {name: statistics.fmean(one[name] for one in found) for name in FIGURES}


def round_of(case: Case, folder: Path, given: argparse.Namespace, seed: int) -> list[dict[str, Any]]:
    """One server, and its traffic at each share of its capacity."""
    machine = probe("cpu", quick=True)
    longest = case.prompt[1] + case.made[1]
    layout = Layout(
        type="fp32", tp=1, pp=1, replicas=1, slots=case.slots, memory_bytes=0, context=longest,
        cache_tokens=case.slots * Limits().blocks(longest),
    )  # fmt: skip
    with server_started(
        server_command(DeployConfig(model=case.model, weights=str(folder)), machine, layout)[1:]
    ) as port:
        client = Client(host="127.0.0.1", port=port, vocabulary=getattr(case.model, "vocabulary", 2))
        return asyncio.run(_measured(case, client, machine, layout, given, seed))


async def _measured(
    case: Case, client: Client, machine: Machine, layout: Layout, given: argparse.Namespace, seed: int
) -> list[dict[str, Any]]:
    limits, longest = limits_of(layout), layout.context
    serving = Serving(weight_bytes=4.0, cache_bytes=4.0, half=False)
    told = predicted_costs(case.model, machine, serving, slots=case.slots, longest=longest)

    async def timed() -> StepCosts:
        return await step_costs(client, slots=case.slots, longest=longest, prompt=case.prompt[1])

    costs = await timed()
    found = []
    for place, share in enumerate(given.shares):
        rate = Rate(rate=share * capacity(case, costs), prompt=case.prompt, answer=case.made)
        arrivals: list[Arrival] = rate.arrivals(given.requests, seed=seed)
        # Other prompts each time: of those that have come before, the server still has keys and values.
        measured = await replay(client, arrivals, seed=seed * len(given.shares) + place)
        before, costs = costs, await timed()
        simulated = [figures(simulate(arrivals, limits, each)) for each in (before, costs)]
        found.append({
            "share": share, "rate": rate.rate, "measured": figures(measured), "from its steps": together(simulated),
            "from the machine": figures(simulate(arrivals, limits, told)),
            "steps": {"before": asdict(before), "after": asdict(costs), "told": asdict(told)},
        })  # fmt: skip
    return found


def summary(name: str, case: Case, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The JSON of a case at one share of its capacity."""
    errors = {
        how: {
            figure: statistics.median(one[how][figure] / one["measured"][figure] - 1 for one in rounds)
            for figure in FIGURES
        }
        for how in ("from its steps", "from the machine")
    }
    return {
        "case": name, "slots": case.slots, "prompt": case.prompt, "made": case.made, "share": rounds[0]["share"],
        "errors": errors, "rounds": rounds,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="cases whose name contains this")
    parser.add_argument(
        "--shares", default=[0.5, 0.9], type=lambda text: [float(one) for one in text.split(",")]
    )
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="cases in it that are not measured now stay")
    given = parser.parse_args()
    stored = given.output is not None and given.output.exists()
    cells = json.loads(given.output.read_text(encoding="utf-8"))["cells"] if stored else []
    for name, case in CASES.items():
        if (given.only or "") not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            save_pretrained(create(case.model), folder)
            every = [round_of(case, Path(folder), given, seed) for seed in range(given.rounds)]
        for same in zip(*every, strict=True):
            one = summary(name, case, list(same))
            others = [cell for cell in cells if (cell["case"], cell["share"]) != (name, one["share"])]
            cells = [*others, one]
            for how, errors in one["errors"].items():
                said = ", ".join(f"{figure} {error:+.1%}" for figure, error in errors.items())
                print(f"{name} at {one['share']:.0%}, {how}: {said}", flush=True)
        if given.output:
            record = {"settings": vars(given) | {"output": ""}, "environment": environment(), "cells": cells}
            given.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
