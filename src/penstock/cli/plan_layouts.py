"""The answers of `penstock plan` about layouts: in a terminal and as JSON. The page is in `plan_page`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from penstock.boundary.files import write_text
from penstock.cli.plan_config import PlanConfig, check_base, check_line
from penstock.cli.plan_page import best_runnable, costs_of, layouts, plan_page
from penstock.cli.plan_tools import how_to_run, penstock_train
from penstock.config.convert import plain
from penstock.config.machine import Machine, load_machine
from penstock.config.plan import Plan
from penstock.errors import ConfigError
from penstock.planner.cost import run_words, step_words
from penstock.planner.explain import (
    BestLayout,
    Lever,
    answer,
    explain,
    is_layout,
    sensitivity,
    why_others_lose,
    with_base,
)
from penstock.planner.prediction import Prediction
from penstock.planner.search import base_of
from penstock.planner.show import beside
from penstock.report.page import plain_console, terminal_table

BEST = "best of all"
Sides = dict[str, tuple[Prediction, dict[str, float]]]
"""Layouts to compare, by name, with what they cost."""


def explain_lines(config: PlanConfig, machine: Machine) -> None:
    """Explain one layout in sentences; or show the best layout that each line allows beside the best of all."""
    assert config.explain is not None
    lines = {line.strip(): with_base(config.base, line.strip()) for line in config.explain.split("|")}
    first, *more_lines = lines.values()
    if more_lines or not is_layout(first, config.gpus):
        _compare(config, machine, lines)
        return
    gpus = Plan.parse(first).gpus
    check_line(Plan.parse(first), config.global_batch)
    choice = _answer(config, machine, first, gpus)
    if config.json:
        layout = _layout(choice.best, costs_of(config, choice.best, machine))
        print(json.dumps(_question(config, machine, gpus, choice) | {"layouts": [layout]}, indent=1))
        return
    print("\n".join(explain(config.planned, machine, choice.best.plan, config.uneven())))
    _notes(plain_console(), config, machine, choice)


def _answer(config: PlanConfig, machine: Machine, line: str | None, gpus: int) -> BestLayout:
    batch = config.global_batch
    if line is not None and not is_layout(line, gpus):
        base = base_of(line, config.planned, machine, gpus)
        option = "--base" if config.explain is None else "--explain"
        batch = check_base(base.plan, base.fixed, gpus, batch, option)
    return answer(
        config.planned, machine, gpus, line, global_batch=batch, uneven=config.uneven(), name=config.called
    )


def _compare(config: PlanConfig, machine: Machine, lines: Mapping[str, str]) -> None:
    """Show the best layout that each line allows, beside the best of all."""
    named_lines = {BEST: config.base, **lines}
    choices = {name: _answer(config, machine, line, config.devices) for name, line in named_lines.items()}
    best = choices[BEST]
    if config.json:
        named = [
            {"asked": name} | _layout(choice.best, costs_of(config, choice.best, machine))
            for name, choice in choices.items()
        ]
        print(json.dumps(_question(config, machine, best.best.gpus, best) | {"layouts": named}, indent=1))
        return
    console = plain_console()
    console.print(f"{config.called}, the best layout of all beside the best with other settings:")
    sides = {name: (choice.best, costs_of(config, choice.best, machine)) for name, choice in choices.items()}
    console.print(terminal_table(beside(sides, vision=config.planned.graph.vision), console.width))
    for name, choice in choices.items():
        console.print(f"{name}: {choice.best.plan.line()}", soft_wrap=True)
        if choice is not best:
            console.print(f"  {choice.against(best.best)}", soft_wrap=True)
    for words in sorted({choice.assumed for choice in choices.values()} - {""}):
        console.print(words, soft_wrap=True)


def search_all(config: PlanConfig, machine: Machine) -> None:
    """Search all layouts; show the fastest, explain them, and write them to the files that the settings name."""
    model, gpus = config.planned, config.devices
    choice = _answer(config, machine, config.base, gpus)
    result = choice.result
    if config.run:
        runs = best_runnable(result, model, machine)
        if runs is None:
            raise ConfigError(
                f"penstock train runs none of the {len(result):,} layouts that fit; fix less with --base."
            )
        print(penstock_train(model, machine, runs.plan).command)
        return
    levers: list[Lever] = []
    base = base_of(config.base, model, machine, gpus)
    if config.sensitivity or config.html is not None:
        levers = sensitivity(
            model, machine, gpus, choice.best, base=base.plan, fixed=base.fixed, uneven=config.uneven()
        )
    sides = {machine.name: (choice.best, costs_of(config, choice.best, machine))}
    if config.against is not None:
        against = load_machine(config.against)
        best = _answer(config, against, config.base, gpus).best
        sides |= {against.name: (best, costs_of(config, best, against, config.against_price))}
    if config.html is not None:
        write_text(config.html, plan_page(config, machine, result, levers, base, sides))
        print(f"written: {config.html}", file=sys.stderr)
    if config.json:
        print(json.dumps(as_data(config, machine, choice, levers, sides), indent=1))
    else:
        _show(config, machine, choice, levers if config.sensitivity else [], sides)


def _question(config: PlanConfig, machine: Machine, gpus: int, choice: BestLayout) -> dict[str, Any]:
    return {
        "model": config.called, "machine": machine.name, "gpus": gpus, "samples": config.samples(),
        "price": config.price, "grams_per_kwh": config.grams_per_kwh,
        "expert_load": {str(ep): factor for ep, factor in config.uneven().items()} or "even",
        "assumed": choice.assumed,
    }  # fmt: skip


def _lengths_line(config: PlanConfig) -> str:
    """A line on the tokens of a sample, where a file says only how many the model can have; empty for a preset."""
    if config.name is None or config.planned.graph.vision:
        return ""
    tokens = " and ".join(f"{length:,}" for length in config.planned.graph.lengths)
    return f"samples of {tokens} tokens; --model.sequence sets how many."


def _loads_line(config: PlanConfig, plan: Plan) -> str:
    """A line on the loads of experts that were assumed; empty for a model without experts."""
    if not any(run.stack.mixes for run in config.planned.graph.runs):
        return ""
    if config.loads is None:
        return "experts: assumed to be visited evenly; --loads RUN reads a run's record instead."
    load = config.uneven()[plan.ep]
    return f"experts: the busiest of ep={plan.ep} devices has {load:.2f} times the mean, by {config.loads}."


def as_data(
    config: PlanConfig, machine: Machine, choice: BestLayout, levers: Sequence[Lever], sides: Sides
) -> dict[str, Any]:
    """The answer as plain data, with units in the names."""
    result = choice.result
    runs = best_runnable(result, config.planned, machine)
    against = [_layout(*compared) for compared in [*sides.values()][1:]]
    tried, top = {"layouts_tried": result.tried, "layouts_too_large": result.too_large}, config.top or 10
    fastest = [_layout(layout, costs_of(config, layout, machine)) for layout in result[:top]]
    return {
        **_question(config, machine, choice.best.gpus, choice), **tried, "layouts": fastest,
        "best_runnable": None if runs is None else _layout(runs, costs_of(config, runs, machine)),
        "run": [plain(way) for way in how_to_run(config.planned, machine, choice.best.plan)],
        "sensitivity": [
            {"change": lever.words, "gain": lever.gain, "plan": lever.plan.line()} for lever in levers
        ],
        **({"against": against[0]} if against else {}),
    }  # fmt: skip


def _layout(layout: Prediction, by_name: dict[str, float]) -> dict[str, Any]:
    derived = {"plan": layout.plan.line(), "tokens_per_second_per_gpu": layout.tokens_per_second_per_gpu}
    return plain(layout) | derived | by_name  # type: ignore[no-any-return]


def _notes(console: Console, config: PlanConfig, machine: Machine, choice: BestLayout) -> None:
    """Print what was assumed, and what a step and the whole run take."""
    by_name = costs_of(config, choice.best, machine)
    run = ", ".join(f"{value} {words}" for value, words in run_words(by_name))
    loads = _loads_line(config, choice.best.plan)
    for words in filter(None, (_lengths_line(config), choice.assumed, loads, step_words(by_name), run)):
        console.print(words, soft_wrap=True)


def _show(
    config: PlanConfig, machine: Machine, choice: BestLayout, levers: Sequence[Lever], sides: Sides
) -> None:
    model, best, result = config.planned, choice.best, choice.result
    console = plain_console()
    console.print(
        f"{config.called} ({best.parameters / 1e9:.3g} billion parameters) on {best.gpus} {machine.name}, "
        f"{best.global_batch} samples a step: {result.tried:,} layouts, {len(result):,} fit."
    )
    section = layouts(model, result, config.top or 10)
    console.print(terminal_table(section, console.width))
    console.print(section.text.replace("\n\n", "\n"), style="dim", soft_wrap=not sys.stdout.isatty())
    console.print(f"best: {best.plan.line()}", soft_wrap=True)
    runs = best_runnable(result, model, machine)
    if machine.device == "other":
        console.print(f"Penstock does not run on {machine.name}: this is a plan only.")
    elif runs is None:
        console.print("penstock train runs none of them yet.")
    elif runs is not best:
        slower = f"({runs.iteration_seconds / best.iteration_seconds - 1:.1%} slower)"
        console.print(f"best that penstock train runs: {runs.plan.line()} {slower}", soft_wrap=True)
    _notes(console, config, machine, choice)
    if len(sides) > 1:
        console.print(terminal_table(beside(sides, vision=model.graph.vision), console.width))
        for name, (layout, _) in [*sides.items()][1:]:
            console.print(f"best on {name}: {layout.plan.line()}", soft_wrap=True)
    # The best, and where Penstock does not run that, the best that it does.
    ways = how_to_run(model, machine, best.plan)
    if runs is not None and runs is not best:
        ways[:0] = how_to_run(model, machine, runs.plan)[:1]
    if ways:
        vision = model.graph.vision
        console.print("to run it:" if vision else "to run it, add your data and tokenizer to one of these:")
    for way in ways:
        console.print(f"  {way.tool}: {way.command}", soft_wrap=True)
        if way.notes:
            notes = "; ".join(way.notes)
            console.print(f"    {way.tool.split()[0]}: set by hand {notes}.", soft_wrap=True)
    console.print("why the others are slower:")
    for line in why_others_lose(model, machine, result, best, config.uneven()):
        console.print(f"  {line}", soft_wrap=True)
    if levers:
        console.print("what would help most:")
        for lever in levers:
            console.print(f"  {lever.gain:+.1%}  {lever.words}", soft_wrap=True)
