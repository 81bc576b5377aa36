"""The answers of `penstock plan` about layouts, as data for --json and as lines and tables. The page is in
`plan_page`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.text import Text

from penstock.boundary.files import write_text
from penstock.cli._display import Part
from penstock.cli.plan_config import PlanConfig, check_base, check_line
from penstock.cli.plan_page import Sides, layouts, plan_page
from penstock.cli.plan_tools import how_to_run, penstock_train
from penstock.config.convert import plain
from penstock.config.machine import Machine, load_machine
from penstock.config.plan import Plan
from penstock.config.rules import problems
from penstock.errors import ConfigError
from penstock.ladder.predicted import PredictedRung, predicted_climb
from penstock.planner.cost import costs, run_words, step_words
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
from penstock.report.page import Cell, Section
from penstock.report.units import GIB, duration

BEST = "best of all"
Answer = tuple[dict[str, Any], Iterator[Part]]


def find(config: PlanConfig, machine: Machine) -> Answer:
    """The answer that the settings ask for, as data and as lines and tables. Writes the page that they name."""
    question = _Question(config, machine)
    if config.ladder:
        return question.climb()
    if config.explain is None:
        return question.search()
    lines = {line.strip(): with_base(config.base, line.strip()) for line in config.explain.split("|")}
    first, *others = lines.values()
    return question.compare(lines) if others or not is_layout(first, config.gpus) else question.explain(first)


class _Question:
    """A model whose layouts on a machine the settings ask for."""

    def __init__(self, config: PlanConfig, machine: Machine) -> None:
        assert config.model is not None  # `PlanConfig.check`
        self.config, self.machine, self.model = config, machine, config.model
        self.uneven = config.uneven()

    def climb(self) -> Answer:
        """How much faster each rung makes training, and its share of the whole gain."""
        config, gpus = self.config, self.config.gpus or 1
        rungs = predicted_climb(self.model, self.machine, gpus=gpus, global_batch=config.global_batch)
        climb = [plain(rung) | {"plan": rung.prediction.plan.line()} for rung in rungs]
        data = {"model": config.called, "machine": self.machine.name, "gpus": gpus, "rungs": climb}
        lead = f"{config.called} on {gpus} {self.machine.name}, {rungs[0].prediction.global_batch} samples a step"
        return data, _climbed(f"{lead}, predicted: each rung on top of those before it.", rungs)

    def explain(self, line: str) -> Answer:
        """One layout in sentences."""
        plan = Plan.parse(line)
        check_line(plan, self.config.global_batch)
        choice = self.best(line, plan.gpus)
        sentences = explain(self.model, self.machine, choice.best.plan, self.uneven)
        data = self.data(choice) | {"layouts": [self.entry(choice.best)]}
        return data, iter([*sentences, *self.notes(choice)])

    def compare(self, lines: Mapping[str, str]) -> Answer:
        """The best layout that each line allows, beside the best of all."""
        named_lines = {BEST: self.config.base, **lines}
        choices = {name: self.best(line, self.config.devices) for name, line in named_lines.items()}
        named = [{"asked": name} | self.entry(choice.best) for name, choice in choices.items()]
        return self.data(choices[BEST]) | {"layouts": named}, self._compared(choices)

    def search(self) -> Answer:
        """The fastest of all layouts."""
        config, machine, model, gpus = self.config, self.machine, self.model, self.config.devices
        choice = self.best(config.base, gpus)
        runs = next((one for one in choice.result if not problems(one.plan, model, machine, run=True)), None)
        if config.run and runs is None:
            raise ConfigError(
                f"penstock train runs none of the {len(choice.result):,} layouts that fit; fix less with --base."
            )
        if config.run and runs is not None:
            return {}, iter([penstock_train(model, machine, runs.plan).command])
        levers, base = list[Lever](), base_of(config.base, model, machine, gpus)
        if config.sensitivity or config.html is not None:
            levers = sensitivity(
                model, machine, gpus, choice.best, base=base.plan, fixed=base.fixed, uneven=self.uneven
            )
        sides: Sides = {machine.name: (choice.best, self.costs(choice.best))}
        against: dict[str, Any] = {}
        if config.against is not None:
            price = config.price if config.against_price is None else config.against_price
            other = _Question(replace(config, price=price), load_machine(config.against))
            best = other.best(config.base, gpus).best
            name = other.machine.name + " of --against" * (other.machine.name in sides)
            sides[name], against = (best, other.costs(best)), {"against": other.entry(best)}
        if config.html is not None:
            page = plan_page(config.called, model, machine, choice.result, levers, base, sides, self.uneven)
            write_text(config.html, page)
            print(f"written: {config.html}", file=sys.stderr)
        data = self.data(choice) | {
            "layouts_tried": choice.result.tried, "layouts_too_large": choice.result.too_large,
            "layouts": [self.entry(layout) for layout in choice.result[: config.top or 10]],
            "best_runnable": None if runs is None else self.entry(runs),
            "run": [plain(way) for way in how_to_run(model, machine, choice.best.plan)],
            "sensitivity": [
                {"change": lever.words, "gain": lever.gain, "plan": lever.plan.line()} for lever in levers
            ],
            **against,
        }  # fmt: skip
        return data, self._ranked(choice, runs, levers if config.sensitivity else [], sides)

    def best(self, line: str | None, gpus: int) -> BestLayout:
        """The best layout with the settings of a Plan line."""
        config, batch = self.config, self.config.global_batch
        if line is not None and not is_layout(line, gpus):
            base = base_of(line, self.model, self.machine, gpus)
            option = "--base" if config.explain is None else "--explain"
            batch = check_base(base.plan, base.fixed, gpus, batch, option)
        return answer(
            self.model, self.machine, gpus, line, global_batch=batch, uneven=self.uneven, name=config.called
        )

    def costs(self, layout: Prediction) -> dict[str, float]:
        """The `costs` of a layout for the length of the run and the prices in the settings."""
        return costs(layout, self.machine, self.config.terms)

    def entry(self, layout: Prediction) -> dict[str, Any]:
        """A layout and its costs as plain data, with units in the names."""
        derived = {"plan": layout.plan.line(), "tokens_per_second_per_gpu": layout.tokens_per_second_per_gpu}
        return {**plain(layout), **derived, **self.costs(layout)}

    def data(self, choice: BestLayout) -> dict[str, Any]:
        """The question and its assumptions, as plain data."""
        config = self.config
        return {
            "model": config.called, "machine": self.machine.name, "gpus": choice.best.gpus,
            "samples": config.terms.samples, "price": config.price, "grams_per_kwh": config.grams_per_kwh,
            "expert_load": {str(ep): factor for ep, factor in self.uneven.items()} or "even",
            "assumed": choice.assumed,
        }  # fmt: skip

    def notes(self, choice: BestLayout) -> Iterator[str]:
        """Lines on what was assumed, and on what a step and the whole run take."""
        config, graph = self.config, self.model.graph
        if config.name is not None and not graph.vision:  # a file says only how many tokens a sample can have
            tokens = " and ".join(f"{length:,}" for length in graph.lengths)
            yield f"samples of {tokens} tokens; --model.sequence sets how many."
        if choice.assumed:
            yield choice.assumed
        if any(run.stack.mixes for run in graph.runs):
            ep = choice.best.plan.ep
            yield (
                "experts: assumed to be visited evenly; --loads RUN reads a run's record instead."
                if config.loads is None
                else f"experts: the busiest of ep={ep} devices has {self.uneven[ep]:.2f} times the mean, by "
                f"{config.loads}."
            )
        by_name = self.costs(choice.best)
        yield step_words(by_name)
        if run := ", ".join(f"{value} {words}" for value, words in run_words(by_name)):
            yield run

    def _compared(self, choices: Mapping[str, BestLayout]) -> Iterator[Part]:
        best = choices[BEST]
        yield f"{self.config.called}, the best layout of all beside the best with other settings:"
        sides = {name: (choice.best, self.costs(choice.best)) for name, choice in choices.items()}
        yield beside(sides, vision=self.model.graph.vision)
        for name, choice in choices.items():
            yield f"{name}: {choice.best.plan.line()}"
            if choice is not best:
                yield f"  {choice.against(best.best)}"
        yield from sorted({choice.assumed for choice in choices.values()} - {""})

    def _ranked(
        self, choice: BestLayout, runs: Prediction | None, levers: Sequence[Lever], sides: Sides
    ) -> Iterator[Part]:
        model, machine, best, result = self.model, self.machine, choice.best, choice.result
        yield (
            f"{self.config.called} ({best.parameters / 1e9:.3g} billion parameters) on {best.gpus} {machine.name}, "
            f"{best.global_batch} samples a step: {result.tried:,} layouts, {len(result):,} fit."
        )
        yield layouts(model, result, self.config.top or 10)
        yield f"best: {best.plan.line()}"
        # The best, and where Penstock does not run that, the best that it does.
        ways = how_to_run(model, machine, best.plan)
        if machine.device == "other":
            yield f"Penstock does not run on {machine.name}: this is a plan only."
        elif runs is None:
            yield "penstock train runs none of them yet."
        elif runs is not best:
            slower = runs.iteration_seconds / best.iteration_seconds - 1
            yield f"best that penstock train runs: {runs.plan.line()} ({slower:.1%} slower)"
            ways[:0] = how_to_run(model, machine, runs.plan)[:1]
        yield from self.notes(choice)
        vision = model.graph.vision
        if len(sides) > 1:
            yield beside(sides, vision=vision)
            yield from (f"best on {name}: {layout.plan.line()}" for name, (layout, _) in [*sides.items()][1:])
        if ways:
            yield "to run it:" if vision else "to run it, add your data and tokenizer to one of these:"
        for way in ways:
            yield f"  {way.tool}: {way.command}"
            if way.notes:
                yield f"    {way.tool.split()[0]}: set by hand {'; '.join(way.notes)}."
        yield "why the others are slower:"
        yield from (f"  {line}" for line in why_others_lose(model, machine, result, best, self.uneven))
        if levers:
            yield "what would help most:"
            yield from (f"  {lever.gain:+.1%}  {lever.words}" for lever in levers)


def _climbed(lead: str, rungs: list[PredictedRung]) -> Iterator[Part]:
    path, offered = [rung for rung in rungs if rung.kept], [rung for rung in rungs[1:] if not rung.kept]
    yield Text(lead)
    yield _rungs([rungs[0], *path])
    if path:
        yield f"all together: {path[-1].to_baseline:.2f} times as fast: {path[-1].prediction.plan.line()}"
    if offered:
        yield Text("These change results, and are shown one by one on top of all of the above:", style="bold")
        yield _rungs(offered)
    yield Text("penstock ladder measures the same climb on the machine that it runs on.", style="dim")


def _rungs(rungs: list[PredictedRung]) -> Section:
    heads = [
        Cell("rung", words=True), Cell("a step"), Cell("samples/s", rank=2), Cell("× before"), Cell("× baseline"),
        Cell("share"), Cell("MFU", rank=1), Cell("GiB"), Cell("changes", words=True, rank=3),
    ]  # fmt: skip
    rows = []
    for rung in rungs:
        prediction = rung.prediction
        look, too_much = ("", "") if prediction.fits else ("faint", " too much")
        cells = (
            duration(prediction.iteration_seconds, 3), f"{prediction.samples_per_second:,.1f}",
            f"{rung.to_previous:.2f}×", f"{rung.to_baseline:.2f}×", f"{rung.share:.0%}" if rung.kept else "",
            f"{prediction.mfu:.1%}", f"{prediction.memory_bytes / GIB:.1f}{too_much}",
        )  # fmt: skip
        rows.append((look, [Cell(rung.title, words=True), *map(Cell, cells), Cell(rung.change, words=True)]))
    return Section(title="The climb", columns=heads, rows=rows)
