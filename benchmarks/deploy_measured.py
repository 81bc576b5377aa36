"""What `penstock deploy` simulates for our own server on this machine, beside what came of the same traffic.

    OMP_NUM_THREADS=1 python benchmarks/deploy_measured.py --output benchmarks/results/deploy_measured_cpu.json

Each case is a model with random weights behind `penstock serve`. In each round the steps of its engine are timed as
`penstock deploy --measure` times them, traffic at shares of the capacity that follows is drawn, simulated and sent, and
the steps are timed again. `from its steps` is the mean of the simulations from the steps before and after, which
corrects for drift of a shared machine's speed; `from the machine` is what deploy says before any server runs, from a
probe at the beginning of the round. Errors are medians over rounds.

Requests come at random (a Poisson process), `requests` of them, with lengths drawn between the case's limits.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from penstock.cli.deploy_servers import limits_of, penstock, server_started
from penstock.config.machine import Machine
from penstock.config.model import PRESETS, ModelConfig
from penstock.models import create
from penstock.models.convert import save_pretrained
from penstock.planner.serve import Serving, StepCosts, predicted_costs
from penstock.probe import probe
from penstock.report.record import environment
from penstock.serve.deploy import Layout
from penstock.serve.measure import Client, replay, step_costs
from penstock.serve.scheduler import Limits
from penstock.serve.settings import DeployConfig
from penstock.serve.traffic import Arrival, Rate, Served, simulate

SMALL: Any = PRESETS["gpt2"]
LLAMA: Any = PRESETS["llama-tiny"]


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
    with server_started(penstock(DeployConfig(model=case.model), str(folder), machine, layout)[1:]) as port:
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
        rate = Rate(rate=share * capacity(case, costs), prompt=case.prompt, made=case.made)
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
