"""Latency of inference on a CPU, predicted beside measured.

    penstock probe --output machine.json
    OMP_NUM_THREADS=1 python benchmarks/predicted_inference.py --machine machine.json \\
        --output benchmarks/results/predicted_inference_cpu.json

A `pass` with weights in `int8` is that of a model in a folder that `penstock compress --quantise int8` writes: linear
layers of blocks in int8, each row of inputs with a scale of its own, all else in fp32. With `packed` ones all is in
fp32. Layers in fp32 have their weights laid out for the processor, as `weights=auto` has them. BERT, MiniLM and GPT-2
read 128 tokens, ViT 224 pixels. `generation` is a whole call: GPT-2 reads a prompt of 32 tokens and continues it by 32.
Weights are random. Cells take turns in rounds whose order is reversed each time; `measured` is the median of their
seconds, and `error` is predicted / measured − 1. The machine's rates must be of as many threads, measured on a quiet
machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from penstock.compress.quantise import candidates
from penstock.config.decoding import Decoding
from penstock.config.formats import Products
from penstock.config.machine import Machine, load_machine
from penstock.config.model import PRESETS, ModelConfig
from penstock.config.plan import Plan
from penstock.export.export import inputs_of
from penstock.infer.generator import Generator
from penstock.models import create
from penstock.models.anatomy import set_switch
from penstock.models.rounded import round_rows
from penstock.planner.prediction import predict_pass
from penstock.planner.serve import Serving, predict_inference
from penstock.products.blocks import join_blocks
from penstock.products.convert import store_linears
from penstock.products.rounded import store_rounded
from penstock.report.record import environment
from penstock.train.prepare import machine_for

TOKENS = 128
PROMPT, NEW = 32, 32
BATCHES = (1, 8)
WEIGHTS: tuple[Products, ...] = ("int8", "packed")
_BERT: Any = PRESETS["bert-base"]
MODELS: dict[str, ModelConfig] = {
    "bert-base": replace(_BERT, sequence=TOKENS, head="none"),
    "minilm": replace(_BERT, sequence=TOKENS, head="none", width=384, depth=6, heads=12),
    "vit-s16": PRESETS["vit-s16"],
    "gpt2": replace(PRESETS["gpt2"], sequence=TOKENS),  # type: ignore[call-arg]
}
Call = Callable[[], Any]


def passed(config: ModelConfig, batch: int, weights: Products) -> Call:
    """A pass of a model."""
    torch.manual_seed(0)
    model = create(config).eval().requires_grad_(False)
    set_switch(model, "attention", "auto")
    if weights == "int8":
        linears, _ = candidates(model, "int8")
        store_rounded(model, {name: ("int8", round_rows(linear.weight)) for name, linear in linears.items()})
    store_linears(model, "packed")
    join_blocks(model)
    inputs = inputs_of(model, batch, TOKENS, TOKENS)
    inputs.pop("lengths", None)  # texts without padding
    return lambda: model(**inputs)


def generation(config: ModelConfig, batch: int, weights: Products) -> Call:
    """A call that continues prompts."""
    torch.manual_seed(0)
    generator = Generator(create(config), Plan(), weights=weights, ends=())
    prompts = torch.randint(0, config.graph.heads[0].vocabulary, (batch, PROMPT)).tolist()  # type: ignore[union-attr]
    return lambda: generator.generate(prompts, Decoding(max_tokens=NEW))


def predicted(config: ModelConfig, machine: Machine, work: str, batch: int, weights: Products) -> float:
    """Predicted seconds of a cell."""
    if work == "pass":
        return predict_pass(config, machine, Plan(micro_batch=batch, attention="auto"), weights=weights)
    serving = Serving(
        batch=batch,
        prompt=PROMPT,
        generated=NEW,
        half=False,
        weight_bytes=1.0 if weights == "int8" else 4.0,
        cache_bytes=4.0,
        weights=weights,
    )
    forecast = predict_inference(config, machine, serving)
    return batch * NEW / forecast.tokens_per_second


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--machine", help="a file of penstock probe; none: what is quickly measured")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    machine = load_machine(given.machine) if given.machine else machine_for(torch.device("cpu"))
    keys, calls = list[tuple[str, str, int, Products]](), list[Call]()
    for name in given.models.split(","):
        for work, prepare in (("pass", passed), ("generation", generation))[: 2 if name == "gpt2" else 1]:
            for weights in WEIGHTS:
                for batch in BATCHES:
                    keys.append((name, work, batch, weights))
                    calls.append(prepare(MODELS[name], batch, weights))
    seconds: list[list[float]] = [[] for _ in calls]
    with torch.inference_mode():
        for number in range(given.rounds + 1):
            for place in list(range(len(calls)))[:: -1 if number % 2 else 1]:
                started = time.perf_counter()
                calls[place]()
                if number:  # the first warms up
                    seconds[place].append(time.perf_counter() - started)
    cells = []
    for (name, work, batch, weights), times in zip(keys, seconds, strict=True):
        measured, forecast = statistics.median(times), predicted(MODELS[name], machine, work, batch, weights)
        error = forecast / measured - 1
        cells.append(
            {"model": name, "work": work, "batch": batch, "weights": weights, "predicted": forecast,
             "measured": measured, "error": error, "least": min(times), "most": max(times)}
        )  # fmt: skip
        beside = f"{1e3 * forecast:.1f} ms predicted, {1e3 * measured:.1f} measured, {error:+.1%}"
        print(f"{name} {work} {weights} batch {batch}: {beside}")
    if given.output:
        about = {"threads": given.threads, "rounds": given.rounds, "machine_notes": list(machine.notes)}
        about |= {"load_average": os.getloadavg()[1], **environment()}
        given.output.write_text(
            json.dumps({"environment": about, "cells": cells}, indent=1) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
