"""The page of a run, rewritten while it trains, and one page that compares several runs."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np

from penstock import __version__
from penstock.boundary.files import shown, write_text
from penstock.config.convert import word
from penstock.config.model import changes
from penstock.report.figures import Bar, Line, lines, memory_bars
from penstock.report.page import Cell, Picture, Section, Tile, page
from penstock.report.units import duration
from penstock.tasks import Task, task_of
from penstock.tasks.class_counts import ClassCounts
from penstock.tasks.task import plain
from penstock.train.callbacks import Callback, Record
from penstock.train.evaluation_page import classes_section, metric_tiles, read_pictures
from penstock.train.metrics import DRAWN, History, Points, read_history, thinned

_log = logging.getLogger(__name__)

PAGE = "train.html"
SECONDS = 2.0
"""Least seconds between two writings of a page."""
_SHARE = 0.02
"""Largest share of a run's time that writing its page may take."""
_REFRESH = 5
"""Seconds after which a browser reloads the page of a running run."""
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_COMPARED = {"model", "task", "data", "recipe", "plan", "seed", "init_from"}
"""Settings that a comparison of runs lists where they differ."""
_NOT_METRICS = {"step", "epoch", "samples", "seconds", "loss"}


class RunPage(Callback):
    """Keeps `train.html` in the run's folder up to date: one file, which a browser reloads while the run continues."""

    def __init__(self) -> None:
        self._history: History | None = None
        self._due = 0.0

    def on_record(self, record: Record) -> None:
        """Add the record, and write the page unless it was written recently."""
        if record["event"] in ("start", "resume"):
            self._history = read_history(Path(record["output"]))
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
        sections = [*_curves(runs), *_by_class(run), *_samples(run), *_memory(runs), _settings(run)]
        title, lead = run.name, f"{_state(run, running)} {run.start['model']}, on {run.start['data']}."
        tiles = _tiles(run, task)
    else:
        sections = [_beside(runs, task), *_curves(runs), *_memory(runs), _differences(runs)]
        title, lead = f"{len(runs)} runs", f"{', '.join(run.name for run in runs)}, in comparison."
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
        tiles.append(Tile(value=plain(last["loss"], ".4f"), words="training loss", lead=not tiles))
        for unit in ("tokens", "samples"):
            if (rate := last.get(f"{unit}_per_second")) is not None:
                tiles.append(Tile(value=f"{rate:,.0f}", words=f"{unit}/s"))
                break
    tiles.append(Tile(value=f"{run.step:,} of {run.total:,}", words="steps"))
    return tiles


def _metrics(runs: Sequence[History]) -> list[str]:
    """Names of the metrics of evaluations, in their order, without the loss."""
    records = [record for run in runs for record in run.evaluations]
    names = [name for record in records for name, value in record.items() if isinstance(value, float)]
    return [name for name in dict.fromkeys(names) if name not in _NOT_METRICS]


def _curves(runs: Sequence[History]) -> Iterator[Section]:
    """Loss, metrics, learning rate and speed over the steps."""
    alone = len(runs) == 1
    losses, rates, samples, tokens = list[Line](), list[Line](), list[Line](), list[Line]()
    lrs = [run.series("lr") for run in runs]
    top = max((value for points in lrs for _, value in points), default=0.0)
    power = math.floor(math.log10(top)) if top > 0 else 0
    for run, rate in zip(runs, lrs):
        begin = "" if alone else f"{run.name}, "
        losses.append(Line(label=f"{begin}training", points=thinned(run.losses, DRAWN)))
        losses.append(_marked(f"{begin}validation", run.evaluated("loss"), bold=alone))
        rates.append(Line(label=f"{begin}learning rate", points=[(x, y / 10.0**power) for x, y in rate]))
        speed, predicted = run.series("samples_per_second"), run.prediction.get("samples_per_second")
        samples.append(Line(label=f"{begin}measured", points=speed))
        if predicted and speed:
            ends = [(speed[0][0], predicted), (speed[-1][0], predicted)]
            samples.append(Line(label=f"{begin}predicted", points=ends))
        tokens.append(Line(label=f"{begin}measured", points=run.series("tokens_per_second")))
    metrics = {
        name: [_marked(name if alone else run.name, run.evaluated(name), bold=alone) for run in runs]
        for name in _metrics(runs)
    }
    yield _section("Loss", {"loss": losses})
    if any(len(line.points) > 1 for curves in metrics.values() for line in curves):
        yield _section("Validation", metrics)
    yield _section("Learning rate", {f"learning rate × 10{str(power).translate(_RAISED)}": rates})
    yield _section("Speed", {"samples/s": samples, "tokens/s": tokens})


def _marked(label: str, points: Points, *, bold: bool) -> Line:
    tips = [f"{label}, step {step:,.0f}: {value:.4g}" for step, value in points]
    return Line(label=label, points=points, bold=bold, tips=tips)


def _section(title: str, drawn: Mapping[str, list[Line]]) -> Section:
    """A section with a figure for each y axis, by its name, whose curves have points at more than one step."""
    figures = [
        partial(lines, curves, title=f"{title}: {y_label}", x_label="step", y_label=y_label)
        for y_label, curves in drawn.items()
        if len({x for line in curves for x, _ in line.points}) > 1
    ]
    return Section(title=title, figures=figures, text="" if figures else "Nothing is measured yet.")


def _by_class(run: History) -> Iterator[Section]:
    counts = run.evaluations[-1].get("by_class") if run.evaluations else None
    if counts:
        read = ClassCounts(**{name: np.array(values, np.float64) for name, values in counts.items()})
        names = run.start.get("classes", ())
        yield classes_section(read.table(names if len(names) == len(read.true) else ()))


def _samples(run: History) -> Iterator[Section]:
    last = run.evaluations[-1] if run.evaluations else {}
    if answers := last.get("answers"):
        pictures = []
        for png, (true, answer, probability) in zip(read_pictures(run.folder), answers):
            words = f"{answer} {probability:.0%}" + (f", is {true}" if answer != true else "")
            pictures.append(Picture(png=png, words=words, look="wrong" if answer != true else ""))
        yield Section(title="Samples", pictures=pictures, text="Validation images and the model's answers.")
    elif last.get("sample"):
        yield Section(title="Samples", code=last["sample"])


def _memory(runs: Sequence[History]) -> Iterator[Section]:
    """Memory: bars for the measured, marks for the predicted values."""
    bars = []
    for run in runs:
        measured: Record = run.summary.get("measured") or next(
            (record for record in reversed(run.logs) if record.get("memory_kind")), {}
        )
        if measured.get("memory_bytes"):
            predicted = run.prediction.get("memory_bytes")
            bars.append(Bar(
                label=run.name, state="kept", value=measured["memory_bytes"] / 1e6,
                predicted=None if predicted is None else predicted / 1e6, note=f" MB {measured['memory_kind']}",
            ))  # fmt: skip
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
            differences = [each for each in changes(first, config) if each[0].partition(".")[0] in _COMPARED]
            words = " ".join(f"--{name} {word(value)}" for name, value in differences) or "nothing"
        rows.append(("", [Cell(run.name, words=True), Cell(words, words=True)]))
    heads = [Cell("run", words=True), Cell(f"differs from {runs[0].name} by", words=True)]
    return Section(title="Settings that differ", columns=heads, rows=rows)
