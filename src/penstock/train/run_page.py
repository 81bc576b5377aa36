"""The page of a run, rewritten while it trains, and one page that compares several runs."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from penstock import __version__
from penstock.boundary.files import shown, write_text
from penstock.config.model import changes
from penstock.report.figures import Bar, Line, lines, memory_bars
from penstock.report.page import Cell, Picture, Section, Tile, page
from penstock.report.units import duration
from penstock.tasks import Task, task_of
from penstock.tasks.class_counts import ClassCounts
from penstock.train.callbacks import Callback, Record
from penstock.train.evaluation_page import classes_section, metric_tiles
from penstock.train.metrics import History, Points, read_history, thinned

_log = logging.getLogger(__name__)

PAGE = "train.html"
SECONDS = 2.0
"""Least seconds between two writings of a page."""
_SHARE = 0.02
"""Largest share of a run's time that writing its page may take."""
_REFRESH = 5
"""Seconds after which a browser reloads the page of a running run."""
_DRAWN = 300
"""Most points of a curve."""
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_NOT_METRICS = {"step", "epoch", "samples", "seconds"}


class RunPage(Callback):
    """Keeps `train.html` in the run's folder up to date: one file, which a browser reloads while the run continues."""

    def __init__(self) -> None:
        self._history: History | None = None
        self._due = 0.0

    def on_record(self, record: Record) -> None:
        """Add the record, and write the page unless it was written recently."""
        if record["event"] in ("start", "resume"):
            self._history = History(Path(record["output"]))
            self._history = read_history(self._history.folder)
        elif self._history is not None:
            self._history.add([record])
        if time.monotonic() >= self._due:
            self._write(running=True)

    def on_end(self) -> None:
        """Write the final page of a run."""
        self._write(running=False)

    def _write(self, *, running: bool) -> None:
        if self._history is None:
            return
        started = time.monotonic()
        try:
            write_text(self._history.folder / PAGE, to_html([self._history], running=running))
        except Exception:  # noqa: BLE001  # the run is worth more than its page
            _log.warning("%s could not be written.", self._history.folder / PAGE, exc_info=True)
        ended = time.monotonic()
        self._due = ended + max(SECONDS, (ended - started) / _SHARE)


def to_html(runs: Sequence[History], *, running: bool = False) -> str:
    """The page of one run, or of several in comparison; browsers reload the page of a `running` one."""
    config = runs[0].config()
    task = task_of(config.model, config.task, init_from=config.reads_like)
    now = datetime.now(UTC).isoformat(sep=" ", timespec="seconds")
    if len(runs) == 1:
        (run,) = runs
        sections = [
            *_curves(runs), *_by_class(run), *_samples(run), *_memory(runs), _settings(run),
        ]  # fmt: skip
        title, lead = run.name, f"{_state(run, running)} {run.start['model']}, on {run.start['data']}."
        tiles = _tiles(run, task)
    else:
        sections = [_beside(runs, task), *_curves(runs), *_memory(runs), _differences(runs)]
        title, lead = f"{len(runs)} runs", f"{', '.join(run.name for run in runs)}, beside each other."
        tiles = []
    footer = f"Penstock {__version__}, {now}"
    return page(title, lead, tiles, sections, footer, refresh=_REFRESH if running else 0)


def _state(run: History, running: bool) -> str:
    if run.step >= run.total:
        return f"Finished after {run.total:,} steps."
    if not running:
        return f"Stopped after step {run.step:,} of {run.total:,}; the same command goes on."
    rate = run.logs[-1].get("step_seconds_median") if run.logs else None
    left = "" if rate is None else f", about {duration(rate * (run.total - run.step))} left"
    return f"Running: step {run.step:,} of {run.total:,}{left}."


def _tiles(run: History, task: Task) -> list[Tile]:
    tiles = metric_tiles(task, run.evaluations[-1])[:3] if run.evaluations else []
    if run.logs:
        last = run.logs[-1]
        tiles.append(Tile(value=f"{last['loss']:.4f}", words="training loss", lead=not tiles))
        for name, unit in (("tokens_per_second", "tokens/s"), ("samples_per_second", "samples/s")):
            if last.get(name) is not None:
                tiles.append(Tile(value=f"{last[name]:,.0f}", words=unit))
                break
    tiles.append(Tile(value=f"{run.step:,} of {run.total:,}", words="steps"))
    return tiles


def _metrics(runs: Sequence[History]) -> list[str]:
    """Names of the metrics of evaluations, in their order, without the loss."""
    names: dict[str, None] = {}
    for run in runs:
        for record in run.evaluations:
            names |= {
                name: None for name, value in record.items()
                if isinstance(value, float) and name not in _NOT_METRICS and name != "loss"
            }  # fmt: skip
    return list(names)


def _curves(runs: Sequence[History]) -> Iterator[Section]:
    """Loss, metrics, learning rate and speed over the steps."""
    alone = len(runs) == 1

    def label(run: History, words: str) -> str:
        return words if alone else f"{run.name}, {words}"

    loss = [
        line
        for run in runs
        for line in (
            Line(label=label(run, "training"), points=thinned(run.losses, _DRAWN)),
            _marked(label(run, "validation"), run.evaluated("loss"), bold=alone),
        )
    ]
    yield _section("Loss", [(loss, "loss")])
    names = _metrics(runs)
    drawn: list[tuple[list[Line], str]] = []
    for name in names:
        curves = [_marked(run.name if not alone else name, run.evaluated(name), bold=alone) for run in runs]
        drawn.append((curves, name))
    if any(len(line.points) > 1 for curves, _ in drawn for line in curves):
        yield _section(
            "Validation", [each for each in drawn if any(len(line.points) > 1 for line in each[0])]
        )
    rates = [Line(label=label(run, "learning rate"), points=run.series("lr")) for run in runs]
    top = max((value for line in rates for _, value in line.points), default=0.0)
    power = math.floor(math.log10(top)) if top > 0 else 0
    rates = [Line(label=line.label, points=[(x, y / 10.0**power) for x, y in line.points]) for line in rates]
    yield _section("Learning rate", [(rates, f"learning rate × 10{str(power).translate(_RAISED)}")])
    yield _section("Speed", list(_speed(runs, label)))


def _speed(runs: Sequence[History], label: Callable[[History, str], str]) -> Iterator[tuple[list[Line], str]]:
    samples = []
    for run in runs:
        points = run.series("samples_per_second")
        samples.append(Line(label=label(run, "measured"), points=points))
        predicted = run.prediction.get("samples_per_second")
        if predicted and points:
            ends: Points = [(points[0][0], predicted), (points[-1][0], predicted)]
            samples.append(Line(label=label(run, "predicted"), points=ends))
    yield samples, "samples/s"
    tokens = [Line(label=label(run, "measured"), points=run.series("tokens_per_second")) for run in runs]
    yield tokens, "tokens/s"


def _marked(label: str, points: Points, *, bold: bool) -> Line:
    tips = [f"{label}, step {step:,.0f}: {value:.4g}" for step, value in points]
    return Line(label=label, points=points, bold=bold, tips=tips)


def _section(title: str, drawn: Sequence[tuple[list[Line], str]]) -> Section:
    """Figures of those curves that have more than one point, in one section."""
    figures = [
        partial(lines, curves, title=f"{title}: {y_label}", x_label="step", y_label=y_label)
        for curves, y_label in drawn
        if len({x for line in curves for x, _ in line.points}) > 1
    ]
    return Section(title=title, figures=figures, text="" if figures else "Nothing is measured yet.")


def _by_class(run: History) -> Iterator[Section]:
    counts = run.evaluations[-1].get("by_class") if run.evaluations else None
    if counts:
        read = ClassCounts(**{name: np.array(values, np.float64) for name, values in counts.items()})
        names = run.classes if len(run.classes) == len(read.true) else ()
        yield classes_section(read.table(names))


def _samples(run: History) -> Iterator[Section]:
    from penstock.train.evaluation_page import read_pictures

    last = run.evaluations[-1] if run.evaluations else {}
    if answers := last.get("answers"):
        pictures = [
            Picture(png=png, words=_answer(*answer), look="wrong" if answer[0] != answer[1] else "")
            for png, answer in zip(read_pictures(run.folder), answers)
        ]
        yield Section(title="Samples", pictures=pictures, text="Validation images and the model's answers.")
    elif last.get("sample"):
        yield Section(title="Samples", code=last["sample"])


def _answer(true: str, answer: str, probability: float) -> str:
    return f"{answer} {probability:.0%}" + (f", is {true}" if answer != true else "")


def _memory(runs: Sequence[History]) -> Iterator[Section]:
    """Memory: bars for the measured, marks for the predicted values."""
    bars = []
    for run in runs:
        measured: Record = run.summary.get("measured") or next(
            (record for record in reversed(run.logs) if record.get("memory_kind")), {}
        )
        if measured.get("memory_bytes"):
            kind = measured.get("memory_kind", "")
            predicted = run.prediction.get("memory_bytes")
            bars.append(
                Bar(
                    label=run.name, state="kept", value=measured["memory_bytes"] / 1e6,
                    predicted=None if predicted is None else predicted / 1e6, note=f" MB {kind}",
                )
            )  # fmt: skip
    if bars:
        figure = partial(memory_bars, bars, title="Memory", x_label="peak memory, MB", kept="measured")
        text = "A prediction counts tensors." if any("process" in bar.note for bar in bars) else ""
        yield Section(title="Memory, predicted and measured", figures=[figure], text=text)


def _settings(run: History) -> Section:
    start = run.start
    facts = {
        "Plan": start["plan"], "parameters": f"{start['parameters']:,}",
        "data": f"{start['data']}, {start['samples']:,} {start['unit']}, {start['batch']} a step",
        "machine": f"{start['machine']} ({start['device']})", "folder": shown(run.folder),
    }  # fmt: skip
    if run.resumed:
        facts["resumed after"] = ", ".join(f"step {step:,}" for step in run.resumed)
    code = f"penstock train --config {shown(run.folder / 'run.toml')}"
    return Section(title="Settings", code=code, facts=facts)


def _beside(runs: Sequence[History], task: Task) -> Section:
    names = ["loss", *_metrics(runs)]
    heads = [
        Cell("run", words=True), Cell("steps"), *(Cell(name) for name in names), Cell("step time"),
        Cell("predicted", rank=1), Cell("memory, MB", rank=2), Cell("predicted, MB", rank=3),
    ]  # fmt: skip
    rows = []
    for run in runs:
        last = run.evaluations[-1] if run.evaluations else {}
        log = run.summary.get("measured") or (run.logs[-1] if run.logs else {})
        numbers = [
            log.get("step_seconds_median"), run.prediction.get("iteration_seconds"),
            log.get("memory_bytes"), run.prediction.get("memory_bytes"),
        ]  # fmt: skip
        times = ["" if value is None else duration(value, 3) for value in numbers[:2]]
        sizes = ["" if value is None else f"{value / 1e6:,.1f}" for value in numbers[2:]]
        metrics = ["" if last.get(name) is None else f"{last[name]:.4g}" for name in names]
        cells = [f"{run.step:,} of {run.total:,}", *metrics, *times, *sizes]
        rows.append(("", [Cell(run.name, words=True), *map(Cell, cells)]))
    return Section(
        title="At the latest evaluation", columns=heads, rows=rows, text=f"Metrics are of validation {task.unit}."
    )  # fmt: skip


def _differences(runs: Sequence[History]) -> Section:
    first, *others = [run.config() for run in runs]
    rows = []
    for run, config in zip(runs[1:], others, strict=True):
        if type(config.model) is not type(first.model):
            words = f"model {run.start['model']}"
        else:
            options = [
                option for name in ("model", "task", "data", "recipe", "plan", "seed", "init_from")
                for option in _changes(first, config, name)
            ]  # fmt: skip
            words = " ".join(options) or "nothing"
        rows.append(("", [Cell(run.name, words=True), Cell(words, words=True)]))
    heads = [Cell("run", words=True), Cell(f"differs from {runs[0].name} by", words=True)]
    return Section(title="Settings that differ", columns=heads, rows=rows)


def _changes(first: Any, second: Any, name: str) -> list[str]:
    old, new = getattr(first, name), getattr(second, name)
    if hasattr(new, "__dataclass_fields__"):
        return list(changes(old, new, name))
    return [f"--{name} {new}"] if old != new else []
