"""The answers of `penstock plan` about layouts: in a terminal, as JSON and as TOML. The page is in `plan_page`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.boundary.files import write_text
from penstock.cli.plan_config import PlanConfig, check_base, check_line
from penstock.cli.plan_page import plan_page
from penstock.cli.plan_table import best_runnable, layouts, totals, totals_line
from penstock.cli.plan_tools import how_to_run, penstock_train, show
from penstock.config.convert import plain
from penstock.config.load import dump_toml
from penstock.config.machine import Machine
from penstock.config.model import ModelConfig, title
from penstock.config.plan import Plan
from penstock.errors import ConfigError, OutOfMemory
from penstock.planner.explain import Lever, explain, sensitivity, why_others_lose
from penstock.planner.prediction import Prediction, predict
from penstock.planner.search import SearchResult, explore, nothing_fits
from penstock.report.page import plain_console, terminal_table


def explain_one(config: PlanConfig, machine: Machine) -> None:
    """Explain one layout in sentences, or as JSON in the form of a search with only this layout."""
    assert config.model is not None
    assert config.explain is not None
    line = Plan.parse(config.explain)
    check_line(line, config.gpus, config.global_batch)
    uneven = config.uneven()
    prediction = predict(config.model, machine, line, uneven=uneven)
    if config.json:
        layout = _layout(prediction, config, machine)
        data = _question(config, machine, prediction.gpus) | {"layouts": [layout]}
        print(json.dumps(data, indent=1))
        return
    print("\n".join(explain(config.model, machine, line, uneven)))
    if words := _loads_line(config, line, uneven):
        print(words)
    if words := totals_line(prediction, config.samples(), machine, config.price):
        print(words)


def search_all(config: PlanConfig, machine: Machine) -> None:
    """Search all layouts; show the fastest, explain them, and write them to the files that the settings name."""
    assert config.model is not None
    gpus = 8 if config.gpus is None else config.gpus
    batch = config.global_batch
    base = None if config.base is None else Plan.parse(config.base)
    fixed = frozenset[str]() if config.base is None else Plan.named(config.base)
    if base is not None:
        batch = check_base(base, fixed, gpus, batch)
    uneven = config.uneven()
    result = explore(
        config.model, machine, gpus, global_batch=batch, base=base, fixed=fixed, keep=None, uneven=uneven
    )
    if not result.predictions:
        raise OutOfMemory(nothing_fits(config.model, machine, gpus, result, uneven))
    if config.run:
        print(_command(config.model, machine, result))
        return
    levers: list[Lever] = []
    if config.sensitivity or config.html is not None:
        best = result.predictions[0]
        levers = sensitivity(config.model, machine, gpus, best, base=base, fixed=fixed, uneven=uneven)
    if config.toml is not None:
        write(config.toml, plan_file(config.model, result.predictions[0]))
    if config.html is not None:
        write(config.html, plan_page(config, machine, gpus, result, levers, base=base, fixed=fixed))
    if config.json:
        print(json.dumps(as_data(config, machine, gpus, result, levers), indent=1))
    else:
        _show(config, machine, gpus, result, levers if config.sensitivity else [])


def _command(model: ModelConfig, machine: Machine, result: SearchResult) -> str:
    """The command that trains with the fastest layout Penstock can run. Raises ConfigError where there is none."""
    runs = best_runnable(result, model)
    if runs is None:
        raise ConfigError(
            f"penstock train runs none of the {len(result.predictions):,} layouts that fit; fix less with --base."
        )
    return penstock_train(model, machine, runs.plan).command


def _question(config: PlanConfig, machine: Machine, gpus: int) -> dict[str, Any]:
    assert config.model is not None
    return {
        "model": title(config.model),
        "machine": machine.name,
        "gpus": gpus,
        "samples": config.samples(),
        "price": config.price,
        "expert_load": {str(ep): factor for ep, factor in config.uneven().items()} or "even",
    }


def _loads_line(config: PlanConfig, plan: Plan, uneven: Mapping[int, float]) -> str:
    """A line on the loads of experts that were assumed; empty for a model without experts."""
    assert config.model is not None
    if not any(run.stack.mixes for run in config.model.graph.runs):
        return ""
    if config.loads is None:
        return "experts: assumed to be visited evenly; --loads RUN reads a run's record instead."
    return f"experts: the busiest of ep={plan.ep} devices has {uneven[plan.ep]:.2f} times the mean, by {config.loads}."


def as_data(
    config: PlanConfig, machine: Machine, gpus: int, result: SearchResult, levers: Sequence[Lever]
) -> dict[str, Any]:
    """The answer as plain data, with units in the names."""
    assert config.model is not None
    runs = best_runnable(result, config.model)
    return {
        **_question(config, machine, gpus),
        "layouts_tried": result.tried,
        "layouts_too_large": result.too_large,
        "layouts": [_layout(one, config, machine) for one in result.predictions[: config.top or 10]],
        "best_runnable": None if runs is None else _layout(runs, config, machine),
        "run": [plain(one) for one in how_to_run(config.model, machine, result.predictions[0].plan)],
        "sensitivity": [
            {"change": lever.words, "gain": lever.gain, "plan": lever.plan.line()} for lever in levers
        ],
    }


def _layout(one: Prediction, config: PlanConfig, machine: Machine) -> dict[str, Any]:
    entry: dict[str, Any] = plain(one)
    entry["plan"] = one.plan.line()
    entry["tokens_per_second_per_gpu"] = one.tokens_per_second_per_gpu
    return entry | totals(one, config.samples(), machine, config.price)


def _show(
    config: PlanConfig, machine: Machine, gpus: int, result: SearchResult, levers: Sequence[Lever]
) -> None:
    model, best = config.model, result.predictions[0]
    assert model is not None
    console = plain_console()
    console.print(
        f"{title(model)} ({best.parameters / 1e9:.3g} billion parameters) on {gpus} {machine.name}, "
        f"{best.global_batch} samples a step: {result.tried:,} layouts, {len(result.predictions):,} fit."
    )
    section = layouts(model, result, config.top or 10)
    console.print(terminal_table(section, console.width))
    console.print(section.text.replace("\n\n", "\n"), style="dim", soft_wrap=not sys.stdout.isatty())
    console.print(f"best: {best.plan.line()}", soft_wrap=True)
    if words := _loads_line(config, best.plan, config.uneven()):
        console.print(words, soft_wrap=True)
    runs = best_runnable(result, model)
    if runs is None:
        console.print("penstock train runs none of them yet.")
    elif runs is not best:
        slower = runs.iteration_seconds / best.iteration_seconds - 1
        console.print(
            f"best that penstock train runs: {runs.plan.line()} ({slower:.1%} slower)", soft_wrap=True
        )
    if words := totals_line(best, config.samples(), machine, config.price):
        console.print(words)
    # The best, and where Penstock does not run that, the best that it does.
    ways = how_to_run(model, machine, best.plan)
    if runs is not None and runs is not best:
        ways[:0] = how_to_run(model, machine, runs.plan)[:1]
    if ways:
        vision = model.graph.vision
        console.print("to run it:" if vision else "to run it, add your data and tokenizer to one of these:")
        show(ways, lambda line: console.print(line, soft_wrap=True))
    console.print("why the others are slower:")
    for line in why_others_lose(model, machine, result, best, config.uneven()):
        console.print(f"  {line}", soft_wrap=True)
    if levers:
        console.print("what would help most:")
        for lever in levers:
            console.print(f"  {lever.gain:+.1%}  {lever.words}", soft_wrap=True)


def plan_file(model: ModelConfig, best: Prediction) -> str:
    """The best Plan of a model as TOML.

    A vision model's file is for `penstock train --config`. `train` has no other models, so their file holds only the
    Plan, for `Plan.from_toml`, and names the model and devices in a comment.
    """
    table = "[plan]\n" + dump_toml(best.plan)
    if model.graph.vision:
        name = model.short_form()
        head = f"[model]\n{dump_toml(model)}" if name == "custom" else f'model = "{name}"\n'
        return f"{head}\n{table}"
    tokens = " and ".join(str(length) for length in model.graph.lengths)
    return (
        f"# The fastest layout of {title(model)} with samples of {tokens} tokens on {best.gpus} {best.machine},\n"
        f"# {best.global_batch} samples a step. Plan.from_toml reads this.\n\n{table}"
    )


def write(path: str, text: str) -> None:
    """Write `text`, and create the folders for it."""
    write_text(path, text)
    print(f"written: {path}", file=sys.stderr)
