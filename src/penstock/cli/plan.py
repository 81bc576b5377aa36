"""`penstock plan`: the best parallel layouts of a model on a cluster, their costs, and why the others are
slower."""

from __future__ import annotations

import json as json_module
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from penstock.cli._app import configured
from penstock.cli.plan_file import check_writable, plan_file, write
from penstock.cli.plan_inputs import (
    check_base,
    check_line,
    check_numbers,
    model_to_plan,
    only,
    samples_of_run,
    whole,
)
from penstock.cli.plan_table import COLUMNS, LEGEND, TOTALS, best_runnable, error_words, grouped, row, totals
from penstock.config.convert import plain
from penstock.config.machine import Machine, load_machine
from penstock.config.model import ModelConfig, ViTConfig, title
from penstock.config.plan import Plan
from penstock.errors import ExitCode, OutOfMemory

if TYPE_CHECKING:
    from penstock.planner.prediction import Prediction
    from penstock.planner.search import Found


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """The model to plan."""

    model: ModelConfig | None = None
    """Preset, such as gpt-175b, llama3-8b or vit-l16; single fields can be overridden."""


@configured(PlanConfig, positional="model")
def plan(
    asked: PlanConfig,
    *,
    machine: Annotated[str, Parameter(help="Name of a known machine, or a file that probe wrote.")] = "h100",
    gpus: Annotated[int | None, Parameter(converter=whole, help="Number of devices; 8 if omitted.")] = None,
    global_batch: Annotated[
        int | None, Parameter(converter=whole, help="Samples of one optimizer step, over all devices.")
    ] = None,
    sequence: Annotated[
        int | None, Parameter(converter=whole, help="The same as --model.sequence: tokens of a sample.")
    ] = None,
    tokens: Annotated[
        float | None, Parameter(help="Tokens to train on: gives days and device hours.")
    ] = None,
    images: Annotated[float | None, Parameter(help="Images to train a vision model on, per epoch.")] = None,
    epochs: Annotated[float, Parameter(help="Passes over --tokens or --images.")] = 1.0,
    base: Annotated[
        str | None,
        Parameter(help="Fixed settings, as a Plan line; the rest is searched."),
    ] = None,
    explain: Annotated[str | None, Parameter(help="Explain this Plan line instead of searching.")] = None,
    sensitivity: Annotated[bool, Parameter(negative="", help="Show what would help most.")] = False,
    top: Annotated[
        int | None, Parameter(converter=whole, help="Number of layouts to show; 10 if omitted.")
    ] = None,
    price: Annotated[float | None, Parameter(help="Price of one device hour: gives the cost.")] = None,
    json: Annotated[bool, Parameter(negative="", help="Print everything as JSON.")] = False,
    toml: Annotated[
        Path | None,
        Parameter(help="Write the best Plan to a file; for vision models, `train --config` reads it."),
    ] = None,
    html: Annotated[Path | None, Parameter(help="Write a page with figures.")] = None,
    compute: Annotated[
        float | None, Parameter(help="FLOPs to spend: says how large a model to train, by scaling laws.")
    ] = None,
    budget_gpu_hours: Annotated[
        float | None, Parameter(help="The same, in hours of --machine's devices.")
    ] = None,
    served_tokens: Annotated[
        float, Parameter(help="Tokens that the model will serve: favours smaller models.")
    ] = 0.0,
) -> int:
    """Find the fastest parallel layout of MODEL on a cluster, with memory, time and why the others are
    slower.

    MODEL is a preset of any family, such as gpt-175b or vit-l16.

    With --compute or --budget-gpu-hours and no MODEL, show what model size and how many tokens scaling laws
    advise.
    """
    check_numbers(
        above_zero={
            "--tokens": tokens, "--images": images, "--epochs": epochs, "--compute": compute,
            "--budget-gpu-hours": budget_gpu_hours,
        },
        from_zero={"--price": price, "--served-tokens": served_tokens},
        from_one={"--gpus": gpus, "--global-batch": global_batch, "--sequence": sequence, "--top": top},
    )  # fmt: skip
    if compute is not None or budget_gpu_hours is not None:
        option = "--compute" if compute is not None else "--budget-gpu-hours"
        sought: dict[str, Any] = {"--gpus": gpus, "--global-batch": global_batch, "--sequence": sequence}
        run: dict[str, Any] = {"--tokens": tokens, "--images": images, "--base": base, "--price": price}
        only(
            option,
            {"a model": asked.model, "--explain": explain, "--toml": toml, "--top": top, **sought, **run}
            | {"--sensitivity": sensitivity or None, "--epochs": None if epochs == 1.0 else epochs},
        )
        return _scaling(
            load_machine(machine), compute, budget_gpu_hours, served_tokens, as_json=json, html=html
        )
    config = model_to_plan(asked.model, sequence)
    only("A model", {"--served-tokens": served_tokens or None})
    device = load_machine(machine)
    samples = samples_of_run(config, tokens=tokens, images=images, epochs=epochs, price=price)
    question = {
        "model": title(config),
        "machine": device.name,
        "gpus": 8 if gpus is None else gpus,
        "samples": samples,
        "price": price,
    }
    if explain is not None:
        only(
            "--explain",
            {"--toml": toml, "--html": html, "--base": base, "--top": top}
            | {"--sensitivity": sensitivity or None},
        )
        line = Plan.parse(explain)
        check_line(line, gpus, global_batch)
        return _explain(config, device, line, question, as_json=json)
    gpus = 8 if gpus is None else gpus
    top = 10 if top is None else top
    given = None if base is None else Plan.parse(base)
    fixed = frozenset[str]() if base is None else Plan.named(base)
    if given is not None:
        global_batch = check_base(given, fixed, gpus, global_batch)
    check_writable(toml, html)
    from penstock.planner.search import explore, nothing_fits

    found = explore(config, device, gpus, global_batch=global_batch, base=given, fixed=fixed, keep=None)
    if not found.predictions:
        raise OutOfMemory(nothing_fits(config, device, gpus, found))
    levers = _levers(config, device, gpus, found, given, fixed) if sensitivity or html else []
    if toml is not None:
        write(toml, plan_file(config, found.predictions[0]))
    if html is not None:
        from penstock.cli.plan_page import plan_page

        write(
            html,
            plan_page(
                config, device, gpus, found, levers, samples=samples, base=given, fixed=fixed, price=price
            ),
        )
    if json:
        print(json_module.dumps(as_data(question, found, top, levers, device), indent=1))
    else:
        _show(config, device, gpus, found, top, samples, price, levers if sensitivity else [])
    return int(ExitCode.DONE)


def _explain(
    config: ModelConfig,
    machine: Machine,
    line: Plan,
    question: dict[str, Any],
    *,
    as_json: bool,
) -> int:
    """One layout in sentences, or as JSON in the form of a search that found only this layout."""
    from penstock.planner.explain import explain as words
    from penstock.planner.prediction import predict

    one = predict(config, machine, line)
    if as_json:
        print(
            json_module.dumps(
                question | {"gpus": one.gpus, "layouts": [_layout(one, question, machine)]}, indent=1
            )
        )
        return int(ExitCode.DONE)
    print("\n".join(words(config, machine, line)))
    said = totals(one, question["samples"], machine, question["price"])
    if said:
        print(", ".join(f"{grouped(value)} {TOTALS[name]}" for name, value in said.items()))
    return int(ExitCode.DONE)


def _scaling(
    machine: Machine,
    compute: float | None,
    hours: float | None,
    served: float,
    *,
    as_json: bool,
    html: Path | None,
) -> int:
    from penstock.cli import plan_scaling

    flops = plan_scaling.compute_of(machine, compute, hours)
    if html is not None:
        write(html, plan_scaling.scaling_page(machine, flops, hours, served))
    if as_json:
        print(plan_scaling.as_json(flops, served))
    else:
        print(plan_scaling.as_text(machine, flops, hours, served))
    return int(ExitCode.DONE)


def _levers(
    config: ModelConfig,
    machine: Machine,
    gpus: int,
    found: Found,
    base: Plan | None,
    fixed: frozenset[str],
) -> list[Any]:
    from penstock.planner.explain import sensitivity

    return sensitivity(config, machine, gpus, found.predictions[0], base=base, fixed=fixed)


def as_data(
    question: dict[str, Any], found: Found, top: int, levers: list[Any], machine: Machine
) -> dict[str, Any]:
    """The answer as plain data, with units in the names."""
    layouts = [_layout(one, question, machine) for one in found.predictions[:top]]
    runs = best_runnable(found)
    return {
        **question,
        "layouts_tried": found.tried,
        "layouts_too_large": found.too_large,
        "layouts": layouts,
        "best_runnable": None if runs is None else _layout(runs, question, machine),
        "sensitivity": [
            {"change": lever.words, "gain": lever.gain, "plan": lever.plan.line()} for lever in levers
        ],
    }


def _layout(one: Prediction, question: dict[str, Any], machine: Machine) -> dict[str, Any]:
    entry: dict[str, Any] = plain(one)
    entry["plan"] = one.plan.line()
    entry["tokens_per_second_per_gpu"] = one.tokens_per_second_per_gpu
    return entry | totals(one, question["samples"], machine, question["price"])


def _show(
    config: ModelConfig, machine: Machine, gpus: int, found: Found, top: int,
    samples: float | None, price: float | None, levers: list[Any],
) -> None:  # fmt: skip
    from rich.console import Console
    from rich.table import Table

    from penstock.planner.explain import why_others_lose

    best = found.predictions[0]
    console = Console(width=None if sys.stdout.isatty() else 132, highlight=False)
    console.print(
        f"{title(config)} ({best.parameters / 1e9:.3g} billion parameters) on {gpus} {machine.name}, "
        f"{best.global_batch} samples a step: {found.tried:,} layouts, {len(found.predictions):,} fit."
    )
    table = Table(box=None, pad_edge=False)
    for name in ("", *COLUMNS):
        table.add_column(name, justify="right")
    for rank, one in enumerate(found.predictions[:top], 1):
        table.add_row(str(rank), *row(one))
    console.print(table)
    console.print(LEGEND, style="dim", soft_wrap=not sys.stdout.isatty())
    console.print(error_words(found), style="dim", soft_wrap=not sys.stdout.isatty())
    console.print(f"best: {best.plan.line()}", soft_wrap=True)
    runs = best_runnable(found)
    # `train` has only vision models; a language model is passed to `build` as a module.
    ours = isinstance(config, ViTConfig)
    runner = "penstock train runs" if ours else "penstock.build runs on a model of your own"
    if runs is None:
        console.print(f"{'penstock train' if ours else 'penstock.build'} runs none of them yet.")
    elif runs is not best:
        slower = runs.iteration_seconds / best.iteration_seconds - 1
        console.print(f"best that {runner}: {runs.plan.line()} ({slower:.1%} slower)", soft_wrap=True)
    said = totals(best, samples, machine, price)
    if said:
        console.print(", ".join(f"{grouped(value)} {TOTALS[name]}" for name, value in said.items()))
    console.print("why the others are slower:")
    for line in why_others_lose(config, machine, found, best):
        console.print(f"  {line}", soft_wrap=True)
    if levers:
        console.print("what would help most:")
        for lever in levers:
            console.print(f"  {lever.gain:+.1%}  {lever.words}", soft_wrap=True)
