"""Where a training step's time goes on this machine, beside the least that a perfect program would need.

    python benchmarks/step_parts.py --output benchmarks/results/step_parts_cpu.json
    python benchmarks/step_parts.py --model gpt2 --plan 'precision=O1 compile=blocks optimizer=fused loss=chunked'
    python benchmarks/step_parts.py --model vit-b16 --samples 256 --device cuda --output FILE

Each cell is a model, a batch and a Plan: one of those that the ladder finds fastest on such machines, unless --plan
names others. The step of `generation` is a whole call: GPT-2 reads a batch of prompts and continues each by as many
tokens. A step is profiled after warm-up and compilation; beside it stands the median time of steps that are not. Cells
of other machines in the output stay.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from language_train import batch_of, our_loss, sized
from penstock.build import build
from penstock.config.decoding import Decoding
from penstock.config.machine import Machine
from penstock.config.model import PRESETS, ModelConfig
from penstock.config.plan import Plan
from penstock.config.run import Recipe
from penstock.infer.generator import Generator
from penstock.models import create
from penstock.planner.ideal import Least, _least, least_of_step, row_of
from penstock.planner.operators import COLLECTIVE
from penstock.planner.serve import Passes, Serving
from penstock.probe import machine_for, resolve_device
from penstock.report.record import environment
from penstock.train.step_table import STEP, as_text, step_table

CELLS = {"vit-s16": (8, 0), "bert-base": (4, 128), "gpt2": (1, 512), "marian-base": (4, 128)}
"""Samples of a batch, and tokens of each, by model."""
GENERATION, PROMPTS, PROMPT, NEW = "generation", 8, 64, 32
"""Texts of a batch, tokens of their prompts, and tokens that each gets."""
MASKED = 0.15
WARM_UP, TIMED, PROFILED = 3, 5, 2


def faster_in_half(machine: Machine) -> bool:
    """Whether it multiplies bf16 faster than fp32."""
    return machine.achievable_flops.get("bf16", 0.0) > 1.1 * machine.achievable_flops.get("fp32", 1.0)


def plans(machine: Machine, model: ModelConfig) -> list[Plan]:
    """The fastest of `vit_train.py` and `language_train.py` on such a machine."""
    base = Plan(matmul="medium", optimizer="fused", host_memory="keep", compile="whole")
    if machine.device == "cuda":
        base = Plan(precision="O1", matmul="high", optimizer="fused", compile="whole")
    elif faster_in_half(machine):
        base = replace(base, precision="O3", attention="auto")
    return [replace(base, compile="blocks") if model.graph.vision else base]


def stepper(model: ModelConfig, samples: int, plan: Plan, device: torch.device) -> Callable[[], Any]:
    """One optimizer step on random samples."""
    recipe = Recipe(clip_norm=None)
    if model.graph.vision:
        pixels = model.graph.inputs[0]
        generator = torch.Generator().manual_seed(0)
        shape = samples, pixels.channels, pixels.image_size, pixels.image_size  # type: ignore[union-attr]
        images = torch.randn(shape, generator=generator).to(device)
        targets = torch.arange(samples, device=device) % model.classes
        built = build(model, plan, device=device, recipe=recipe, seed=0)
        return lambda: built.step([(images, targets)])
    batch = batch_of(model, samples, device)
    built = build(model, plan, device=device, recipe=recipe, loss=our_loss, seed=0)
    return lambda: built.step([batch])


def generation(
    plan: Plan, machine: Machine, device: torch.device
) -> tuple[Callable[[], Any], Mapping[str, Least]]:
    """One call that generates a batch of texts, and the least work of it."""
    torch.manual_seed(0)
    model = PRESETS["gpt2"]
    generator = Generator(create(model), plan, ends=(), device=device)
    prompts = torch.randint(0, model.vocabulary, (PROMPTS, PROMPT)).tolist()
    settings = Decoding(max_tokens=NEW)
    width = 4.0 if plan.precision == "O0" else 2.0
    serving = Serving(
        batch=PROMPTS, prompt=PROMPT, generated=NEW, half=width == 2, weight_bytes=width, cache_bytes=width
    )
    passes, least = Passes(model, machine, serving), dict[str, Least]()
    for times, part in passes.parts():
        for op in part.forward:
            if op.kind not in COLLECTIVE and op.module != "loss":
                row, one = row_of(op, compiled=False), _least(op, passes.rates)
                least[row] = Least(*(a + times * b for a, b in zip(least.get(row, Least()), one)))
    return lambda: generator.generate(prompts, settings), least


def profiled(step: Callable[[], Any], device: torch.device, trace: Path) -> float:
    """Write a trace of some steps, and return the median seconds of others."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(WARM_UP):
        step()
    seconds = []
    for _ in range(TIMED):
        wait()
        start = time.perf_counter()
        step()
        wait()
        seconds.append(time.perf_counter() - start)
    cuda = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    with profile(activities=[ProfilerActivity.CPU, *cuda]) as events:
        for _ in range(PROFILED):
            with record_function(STEP):
                step()
                wait()
    events.export_chrome_trace(str(trace))
    return statistics.median(seconds)


def kernels(trace: Path) -> dict[str, float]:
    """Milliseconds a step of the ten kernels that take longest on a GPU; none on a CPU."""
    took: Counter[str] = Counter()
    for event in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]:
        if event.get("cat") == "kernel":
            took[event["name"][:120]] += event["dur"] / 1e3 / PROFILED
    return dict(took.most_common(10))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = *CELLS, GENERATION
    parser.add_argument(
        "--model", nargs="+", choices=sorted({*every, *PRESETS}), metavar="NAME", help="all cells by default"
    )
    parser.add_argument("--samples", type=int, help="of a batch, instead of the cell's")
    parser.add_argument("--sequence", type=int, default=0, help="tokens of a sample, instead of the cell's")
    parser.add_argument("--plan", action="append", help="a Plan to profile; may be given again")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path, help="other cells in it stay")
    options = parser.parse_args()
    device = resolve_device(options.device)
    machine = machine_for(device)
    stored = json.loads(options.output.read_text()) if options.output and options.output.exists() else {}
    cells = stored.get("cells", {})

    def keep(key: str, step: Callable[[], Any], least: Mapping[str, Least]) -> None:
        """Measure a cell, print it, and store it."""
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json"
            seconds = profiled(step, device, trace)
            rows = step_table(trace, least)
            longest = kernels(trace)
        cells[key] = {
            "step_ms": 1e3 * seconds,
            "parts": rows,
            "kernels": longest,
            "environment": environment(),
        }
        print(f"{key}: {1e3 * seconds:.1f} ms a step\n{as_text(rows)}", flush=True)
        if options.output:
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps({"cells": cells}, indent=1) + "\n")

    given = [Plan.parse(line) for line in options.plan or []]
    for name in options.model or every:
        if name == GENERATION:
            for plan in given or [Plan(precision="O3" if faster_in_half(machine) else "O0")]:
                key = f"{name}, gpt2, {PROMPTS} x {PROMPT} + {NEW} tokens, {plan.line()}, {machine.name}"
                keep(key, *generation(plan, machine, device))
            continue
        samples, sequence = CELLS.get(name, (1, 0))
        samples, sequence = options.samples or samples, options.sequence or sequence
        model = PRESETS[name] if not sequence else sized(PRESETS[name], sequence)
        for plan in (replace(one, micro_batch=samples) for one in given or plans(machine, model)):
            words = MASKED if name.startswith("bert") else 1.0
            size = f"{samples} x {sequence} tokens" if sequence else f"{samples} images"
            key = f"{name}, {size}, {plan.line()}, {machine.name}"
            keep(key, stepper(model, samples, plan, device), least_of_step(model, machine, plan, words=words))


if __name__ == "__main__":
    main()
