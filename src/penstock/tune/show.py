"""A tuned script for the terminal, and written to a file. Free of torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.boundary.files import write_text
from penstock.ladder.result import Estimate
from penstock.ladder.tables import mebibytes, nothing_words, seconds
from penstock.report.chart import signed
from penstock.report.page import PLAIN_WIDTH, Cell, Section, terminal_table
from penstock.tune.result import TuneReport, TuneStep

if TYPE_CHECKING:
    from rich.table import Table

_LOOKS = {"kept": "strong", "offered": "strong"}


def write(report: TuneReport, folder: Path | str) -> Path:
    """Write tune.json into a folder; returns its path."""
    path = Path(folder) / "tune.json"
    write_text(path, json.dumps(report.to_dict(), indent=1) + "\n")
    return path


def table(report: TuneReport, width: int = PLAIN_WIDTH) -> Table:
    """A row for each rung that was measured, those of the fastest line first."""
    columns = [
        Cell("rung", words=True), Cell("step", rank=0), Cell("interval", rank=1), Cell("in all", rank=2),
        Cell("predicted", "alone", rank=4), Cell("MiB", rank=6), Cell("compile s", rank=5),
        Cell("loss change", rank=3), Cell("explained", rank=4), Cell("verdict", words=True),
    ]  # fmt: skip
    rows = [(_LOOKS.get(step.status, ""), _row(step)) for step in report.steps if step.ratio is not None]
    made = terminal_table(Section(title="", columns=columns, rows=rows), width)
    made.title, made.title_justify, made.title_style = f"Tuning {report.script}", "left", "bold"
    return made


def _row(step: TuneStep) -> list[Cell]:
    change, allowed = step.loss_difference, step.allowed_difference
    return [
        Cell(step.title, words=True),
        Cell(_times(step.ratio)),
        Cell(f"{step.ratio.low:.2f}–{step.ratio.high:.2f}" if step.ratio else ""),
        Cell(_times(step.to_baseline)),
        Cell("" if step.predicted is None else f"{step.predicted:.2f}×"),
        Cell(mebibytes(step.memory_bytes)),
        Cell(seconds(step.compile_seconds)),
        Cell("" if change is None else signed(change, 4)),
        Cell("" if allowed is None else f"±{allowed:.4f}"),
        Cell(f"{step.status}: {step.reason}" if step.reason else step.status, words=True),
    ]


def _times(ratio: Estimate | None) -> str:
    return "" if ratio is None else f"{ratio.value:.2f}×"


def remarks(report: TuneReport, *, every: bool = False) -> list[str]:
    """Lines that the table has no room for; with `every` also why rungs were not measured."""
    facts = report.facts
    model = f"{facts.model} of {facts.parameters:,} weights" if facts.model else "No module"
    lines = [
        f"{model}, trained by {facts.optimizer} on {facts.device}: {1000 * report.step_seconds:.1f} ms a step as it "
        f"is. Two processes of it may differ by {report.floor:.1%}."
    ]
    if len(report.losses) > 1:
        losses = ", ".join(f"{loss:.4f}" for loss in report.losses)
        lines.append(f"Its loss under other seeds, after the same steps: {losses}.")
    absent = [step for step in report.steps if step.ratio is None]
    if every:
        lines += [f"{step.title}: {step.status}: {step.reason}" for step in absent]
    elif absent:
        lines.append(
            f"{len(absent)} more optimisations do not apply to this script, or failed in it (--all lists why)."
        )
    return [*lines, *report.notes]


def ending(report: TuneReport) -> list[tuple[str, str]]:
    """The settings that tuning ends with, each in words and with the command that runs the script under them."""
    endings = []
    if report.fastest is not None:
        line, ratio, command = report.fastest
        endings.append((f"Fastest of all, with other results: {_interval(ratio)} with {line}", command))
    if report.nearest is not None:
        words = nothing_words(report.nearest, None)
        words = words.replace("so the plain Plan stands", "so the script stays as it is").replace(
            "climb", "tuning"
        )
    elif report.speedup.value == 1.0:
        words = "Nothing that applies here was measured, so the script stays as it is."
    else:
        words = f"Same results: {_interval(report.speedup)} as fast as the script as it is"
    return [*endings, (words, report.command)]


def _interval(ratio: Estimate) -> str:
    return f"{ratio.value:.2f}× ({ratio.low:.2f} to {ratio.high:.2f})"
