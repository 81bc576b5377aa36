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


def explain_one(asked: PlanConfig, machine: Machine) -> None:
    """One layout in sentences, or as JSON in the form of a search that found only this layout."""
    assert asked.model is not None
    assert asked.explain is not None
    line = Plan.parse(asked.explain)
    check_line(line, asked.gpus, asked.global_batch)
    uneven = asked.uneven()
    one = predict(asked.model, machine, line, uneven=uneven)
    if asked.json:
        data = _question(asked, machine, one.gpus) | {"layouts": [_layout(one, asked, machine)]}
        print(json.dumps(data, indent=1))
        return
    print("\n".join(explain(asked.model, machine, line, uneven)))
    if said := _loads_line(asked, line, uneven):
        print(said)
    if said := totals_line(one, asked.samples(), machine, asked.price):
        print(said)


def search_all(asked: PlanConfig, machine: Machine) -> None:
    """Every layout; the fastest are shown, explained, and written to the files that were asked for."""
    assert asked.model is not None
    gpus = 8 if asked.gpus is None else asked.gpus
    batch = asked.global_batch
    base = None if asked.base is None else Plan.parse(asked.base)
    fixed = frozenset[str]() if asked.base is None else Plan.named(asked.base)
    if base is not None:
        batch = check_base(base, fixed, gpus, batch)
    uneven = asked.uneven()
    found = explore(
        asked.model, machine, gpus, global_batch=batch, base=base, fixed=fixed, keep=None, uneven=uneven
    )
    if not found.predictions:
        raise OutOfMemory(nothing_fits(asked.model, machine, gpus, found, uneven))
    if asked.run:
        print(_command(asked.model, machine, found))
        return
    levers: list[Lever] = []
    if asked.sensitivity or asked.html is not None:
        best = found.predictions[0]
        levers = sensitivity(asked.model, machine, gpus, best, base=base, fixed=fixed, uneven=uneven)
    if asked.toml is not None:
        write(asked.toml, plan_file(asked.model, found.predictions[0]))
    if asked.html is not None:
        write(asked.html, plan_page(asked, machine, gpus, found, levers, base=base, fixed=fixed))
    if asked.json:
        print(json.dumps(as_data(asked, machine, gpus, found, levers), indent=1))
    else:
        _show(asked, machine, gpus, found, levers if asked.sensitivity else [])


def _command(model: ModelConfig, machine: Machine, found: SearchResult) -> str:
    """The command that trains with the fastest layout Penstock can run. Raises ConfigError where there is none."""
    runs = best_runnable(found, model)
    if runs is None:
        raise ConfigError(
            f"penstock train runs none of the {len(found.predictions):,} layouts that fit; fix less with --base."
        )
    return penstock_train(model, machine, runs.plan).command


def _question(asked: PlanConfig, machine: Machine, gpus: int) -> dict[str, Any]:
    assert asked.model is not None
    return {
        "model": title(asked.model),
        "machine": machine.name,
        "gpus": gpus,
        "samples": asked.samples(),
        "price": asked.price,
        "expert_load": {str(ep): factor for ep, factor in asked.uneven().items()} or "even",
    }


def _loads_line(asked: PlanConfig, plan: Plan, uneven: Mapping[int, float]) -> str:
    """A line on what was taken for the loads of experts, of a model that has any."""
    assert asked.model is not None
    if not any(run.stack.experts for run in asked.model.graph.runs):
        return ""
    if asked.loads is None:
        return "experts: taken to be visited evenly; --loads RUN takes a run's record."
    return f"experts: the busiest of ep={plan.ep} devices has {uneven[plan.ep]:.2f} times the mean, by {asked.loads}."


def as_data(
    asked: PlanConfig, machine: Machine, gpus: int, found: SearchResult, levers: Sequence[Lever]
) -> dict[str, Any]:
    """The answer as plain data, with units in the names."""
    assert asked.model is not None
    runs = best_runnable(found, asked.model)
    return {
        **_question(asked, machine, gpus),
        "layouts_tried": found.tried,
        "layouts_too_large": found.too_large,
        "layouts": [_layout(one, asked, machine) for one in found.predictions[: asked.top or 10]],
        "best_runnable": None if runs is None else _layout(runs, asked, machine),
        "run": [plain(one) for one in how_to_run(asked.model, machine, found.predictions[0].plan)],
        "sensitivity": [
            {"change": lever.words, "gain": lever.gain, "plan": lever.plan.line()} for lever in levers
        ],
    }


def _layout(one: Prediction, asked: PlanConfig, machine: Machine) -> dict[str, Any]:
    entry: dict[str, Any] = plain(one)
    entry["plan"] = one.plan.line()
    entry["tokens_per_second_per_gpu"] = one.tokens_per_second_per_gpu
    return entry | totals(one, asked.samples(), machine, asked.price)


def _show(
    asked: PlanConfig, machine: Machine, gpus: int, found: SearchResult, levers: Sequence[Lever]
) -> None:
    model, best = asked.model, found.predictions[0]
    assert model is not None
    console = plain_console()
    console.print(
        f"{title(model)} ({best.parameters / 1e9:.3g} billion parameters) on {gpus} {machine.name}, "
        f"{best.global_batch} samples a step: {found.tried:,} layouts, {len(found.predictions):,} fit."
    )
    section = layouts(model, found, asked.top or 10)
    console.print(terminal_table(section, console.width))
    console.print(section.text.replace("\n\n", "\n"), style="dim", soft_wrap=not sys.stdout.isatty())
    console.print(f"best: {best.plan.line()}", soft_wrap=True)
    if said := _loads_line(asked, best.plan, asked.uneven()):
        console.print(said, soft_wrap=True)
    runs = best_runnable(found, model)
    if runs is None:
        console.print("penstock train runs none of them yet.")
    elif runs is not best:
        slower = runs.iteration_seconds / best.iteration_seconds - 1
        console.print(
            f"best that penstock train runs: {runs.plan.line()} ({slower:.1%} slower)", soft_wrap=True
        )
    if said := totals_line(best, asked.samples(), machine, asked.price):
        console.print(said)
    # The best, and where Penstock does not run that, the best that it does.
    ways = how_to_run(model, machine, best.plan)
    if runs is not None and runs is not best:
        ways[:0] = how_to_run(model, machine, runs.plan)[:1]
    if ways:
        vision = model.graph.vision
        console.print("to run it:" if vision else "to run it, add your data and tokenizer to one of these:")
        show(ways, lambda line: console.print(line, soft_wrap=True))
    console.print("why the others are slower:")
    for line in why_others_lose(model, machine, found, best, asked.uneven()):
        console.print(f"  {line}", soft_wrap=True)
    if levers:
        console.print("what would help most:")
        for lever in levers:
            console.print(f"  {lever.gain:+.1%}  {lever.words}", soft_wrap=True)


def plan_file(config: ModelConfig, best: Prediction) -> str:
    """The best Plan of a model as TOML.

    A vision model's file is for `penstock train --config`. `train` has no other models, so their file holds only the
    Plan, for `Plan.from_toml`, and says in a comment what it was found for.
    """
    table = "[plan]\n" + dump_toml(best.plan)
    if config.graph.vision:
        name = config.short_form()
        model = f"[model]\n{dump_toml(config)}" if name == "custom" else f'model = "{name}"\n'
        return f"{model}\n{table}"
    tokens = " and ".join(str(length) for length in config.graph.lengths)
    return (
        f"# The fastest layout of {title(config)} with samples of {tokens} tokens on {best.gpus} {best.machine},\n"
        f"# {best.global_batch} samples a step. Plan.from_toml reads this.\n\n{table}"
    )


def write(path: str, text: str) -> None:
    """Write `text`, and create the folders for it."""
    write_text(path, text)
    print(f"written: {path}", file=sys.stderr)
