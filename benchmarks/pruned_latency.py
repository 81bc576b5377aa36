"""The share of time that pruning gains on a CPU, beside that of operations it removes and the planner's forecast.

    OMP_NUM_THREADS=1 python benchmarks/pruned_latency.py --output benchmarks/results/pruned_latency_cpu.json

Models have the shapes of presets, random weights and shares of their heads and hidden features removed, alike in each
block and to multiples of 8, as `penstock compress` cuts them; BERT reads 128 tokens. `fp32` is `weights=packed`, `int8`
`weights=int8`. The whole model and its cuts take turns in rounds whose order is reversed each time; ratios are medians
of the ratios within a round. Of each cut

    removed     1 − FLOPs of the cut / FLOPs of the whole
    gained      1 − seconds of the cut / seconds of the whole
    predicted   the same of the planner's forecast: in int8 where the machine has a rate of such layers
    returned    gained / removed

Embeddings and what is not a product are not pruned, so that `returned` can be below 1. On one core it takes about four
minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.compress.cut import sized
from penstock.config.compress import Prune
from penstock.config.formats import Products
from penstock.config.machine import Machine, load_machine
from penstock.config.model import ModelConfig, preset
from penstock.config.plan import Plan
from penstock.export.export import inputs_of
from penstock.models import create
from penstock.models.anatomy import set_switch
from penstock.planner.describe import totals
from penstock.planner.prediction import predict_pass
from penstock.planner.rates import VECTOR
from penstock.planner.terms import assumption
from penstock.products.convert import store_linears
from penstock.report.record import environment
from penstock.train.prepare import machine_for

TOKENS = 128
FORMS: dict[str, Products] = {"fp32": "packed", "int8": "int8"}
"""The products of each type."""


def config_of(name: str) -> ModelConfig:
    """The preset; of a text model with `TOKENS` positions."""
    config = preset(name)
    return config if config.graph.vision else replace(config, sequence=TOKENS)  # type: ignore[call-arg]


def cut(config: ModelConfig, share: float) -> ModelConfig:
    """The model without this share of heads and of hidden features."""
    return sized(config, Prune(heads=share, hidden=share), multiple=VECTOR) if share else config


def opened(config: ModelConfig, kind: str) -> nn.Module:
    """A model of these sizes, ready for inference."""
    torch.manual_seed(0)
    model = create(config).eval().requires_grad_(False)
    set_switch(model, "attention", "auto")
    return store_linears(model, FORMS[kind])


def raced(models: Sequence[nn.Module], inputs: Sequence[Tensor], rounds: int) -> list[list[float]]:
    """Seconds of a pass of each model in each round."""
    seconds: list[list[float]] = [[] for _ in models]
    with torch.inference_mode():
        for number in range(rounds + 1):
            for place in list(range(len(models)))[:: -1 if number % 2 else 1]:
                started = time.perf_counter()
                models[place](*inputs)
                if number:  # the first warms up
                    seconds[place].append(time.perf_counter() - started)
    return seconds


def forecast(config: ModelConfig, machine: Machine, kind: str, batch: int) -> float | None:
    """Predicted seconds of a pass; None where the machine has no rate of these products."""
    weights: Products = FORMS[kind]
    if kind == "int8" and assumption(machine, weights):
        return None
    plan = Plan(micro_batch=batch, attention="auto")
    return predict_pass(config, machine, plan, weights=weights, heads=True)


def cells(
    name: str, config: ModelConfig, kind: str, batch: int, shares: Sequence[float], machine: Machine, rounds: int
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each share that is removed."""
    configs = [config, *(cut(config, share) for share in shares)]
    models: list[Any] = [opened(one, kind) for one in configs]
    inputs = list(inputs_of(models[0], batch, TOKENS, TOKENS).values())
    seconds = raced(models, inputs, rounds)
    flops = [totals(one).model_flops for one in configs]
    predicted = [forecast(one, machine, kind, batch) for one in configs]
    rows = []
    for place, share in enumerate(shares, 1):
        ratios = [own / whole for own, whole in zip(seconds[place], seconds[0], strict=True)]
        removed, gained = 1 - flops[place] / flops[0], 1 - statistics.median(ratios)
        first, ours = predicted[0], predicted[place]
        rows.append(
            {
                "model": name, "type": kind, "batch": batch, "share": share, "removed": removed, "gained": gained,
                "between": [1 - max(ratios), 1 - min(ratios)], "returned": gained / removed,
                "predicted": None if first is None or ours is None else 1 - ours / first,
                "seconds": statistics.median(seconds[place]), "whole_seconds": statistics.median(seconds[0]),
            }
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="vit-s16,bert-base")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--shares", default="0.25,0.5")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--machine", help="a file of penstock probe; none: what is quickly measured")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    machine = load_machine(given.machine) if given.machine else machine_for(torch.device("cpu"))
    shares, rows = [float(one) for one in given.shares.split(",")], list[dict[str, Any]]()
    for name in given.models.split(","):
        for kind in FORMS:
            for batch in map(int, given.batches.split(",")):
                made = cells(name, config_of(name), kind, batch, shares, machine, given.rounds)
                for row in made:
                    told = ", ".join(
                        f"{key} {'none' if row[key] is None else format(row[key], '.3f')}"
                        for key in ("removed", "gained", "predicted", "returned")
                    )
                    print(
                        f"{name} {kind} batch {batch}, {row['share']:.0%} of heads and widths: {told}",
                        flush=True,
                    )
                rows += made
                if given.output:
                    about = {"threads": given.threads, "load_average": os.getloadavg()[1], **environment()}
                    given.output.write_text(
                        json.dumps({"environment": about, "cells": rows}, indent=1) + "\n"
                    )


if __name__ == "__main__":
    main()
