"""An evaluation as tables for the terminal, as JSON, and as one self-contained page, with pictures of a few samples."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from penstock.boundary.files import read_bytes
from penstock.data.source import Pixels
from penstock.disk import write_file
from penstock.infer.pictures import png
from penstock.report.confusion_figure import MOST_CLASSES, confusion_figure
from penstock.report.page import Cell, Section, Tile, origin, page
from penstock.report.record import environment
from penstock.tasks import Task
from penstock.train.evaluate import FolderEvaluation

_MOST_IN_TERMINAL = 12
"""Most classes for which a terminal shows the whole confusion matrix."""
_CONFUSIONS = 20
"""Number of most frequent confusions that are listed."""


def as_json(result: FolderEvaluation) -> dict[str, Any]:
    """The whole evaluation as JSON values."""
    counts = result.evaluation.counts
    report: dict[str, Any] = {
        "weights": result.weights, "model": result.model, "data": result.data, "unit": result.task.unit,
        "samples": result.evaluation.samples, "seconds": result.seconds, "metrics": dict(result.evaluation.metrics),
    }  # fmt: skip
    if counts is not None:
        report["macro"] = macro(table := counts.table(result.classes))
        report["classes"] = table
    if counts is not None and counts.confusion is not None:
        report["confusion"] = counts.confusion.astype(int).tolist()
    return report


def macro(table: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means over the classes that have samples. The precision of a class that was never predicted counts as 0."""
    present = [row for row in table if row["samples"]]
    return {
        name: sum(row[name] or 0.0 for row in present) / max(len(present), 1)
        for name in ("precision", "recall", "f1")
    }


def classes_section(table: Sequence[Mapping[str, Any]]) -> Section:
    """A table with a row for each class, and the means."""
    heads = [Cell("class", words=True), Cell("samples"), Cell("precision"), Cell("recall"), Cell("F1")]
    mean = {"name": "mean of classes", "samples": None} | macro(table)
    rows = [("strong" if row is mean else "", _cells(row)) for row in (*table, mean)]
    return Section(
        title="By class", columns=heads, rows=rows,
        text="Precision is the share of samples predicted as a class that belong to it; recall the share of a class's "
        "samples that were predicted as it. F1 is their harmonic mean.",
    )  # fmt: skip


def _cells(row: Mapping[str, Any]) -> list[Cell]:
    samples = "" if row["samples"] is None else f"{row['samples']:,}"
    shares = ("–" if row[name] is None else f"{row[name]:.2%}" for name in ("precision", "recall", "f1"))
    return [Cell(row["name"], words=True), Cell(samples), *map(Cell, shares)]


def confusion_section(report: Mapping[str, Any]) -> Section | None:
    """The confusion matrix as a table if it is small, else the most frequent confusions; None if there are none."""
    matrix, names = np.array(report.get("confusion", ())), [row["name"] for row in report.get("classes", ())]
    if not len(matrix):
        return None
    if len(names) <= _MOST_IN_TERMINAL:
        rows = [
            ("", [Cell(name, words=True), *(Cell(f"{count:,}") for count in row)])
            for name, row in zip(names, matrix.tolist())
        ]
        return Section(
            title="Confusion matrix", text="True classes in rows, predicted classes in columns.",
            columns=[Cell("true", words=True), *map(Cell, names)], rows=rows,
        )  # fmt: skip
    wrong = matrix * (1 - np.eye(len(matrix), dtype=matrix.dtype))
    order = np.argsort(wrong, axis=None, kind="stable")[::-1][:_CONFUSIONS]
    pairs = [divmod(int(place), len(names)) for place in order if wrong.flat[place]]
    heads = [Cell("true", words=True), Cell("predicted", words=True), Cell("samples"), Cell("of the class")]
    rows = [
        ("", [Cell(names[true], words=True), Cell(names[taken], words=True), Cell(f"{wrong[true, taken]:,}"),
              Cell(f"{wrong[true, taken] / matrix[true].sum():.1%}")])
        for true, taken in pairs
    ]  # fmt: skip
    return Section(
        title="Most frequent confusions", columns=heads, rows=rows,
        text="" if rows else "Every sample was predicted as its own class.",
    )  # fmt: skip


def metric_tiles(task: Task, metrics: Mapping[str, Any]) -> list[Tile]:
    """A tile for each of the task's main metrics."""
    tiles: list[Tile] = []
    for part in task.shown:
        fields = [(name, form) for _, name, form, _ in string.Formatter().parse(part) if name]
        if fields and all(metrics.get(name) is not None for name, _ in fields):
            name, form = fields[0]
            words = part.replace(f"{{{name}:{form}}}", "").strip().format_map(metrics)
            tiles.append(Tile(value=format(metrics[name], form or ""), words=words, lead=not tiles))
    return tiles


def to_html(result: FolderEvaluation) -> str:
    """The evaluation as one page that loads nothing from outside."""
    report = as_json(result)
    table, confusion = report.get("classes", ()), confusion_section(report)
    sections = [classes_section(table)] if table else []
    if confusion is not None and len(table) <= MOST_CLASSES:
        figure = partial(confusion_figure, report["confusion"], [row["name"] for row in table])
        confusion = Section(title="Confusion matrix", figures=[figure])
    sections += [confusion] if confusion is not None else []
    if result.sample:
        sections.append(Section(title="Samples", code=result.sample))
    lead = (
        f"{result.model}, from {result.weights}, on {report['samples']:,} {report['unit']} of {result.data}."
    )
    return page(
        "Evaluation", lead, metric_tiles(result.task, report["metrics"]), [*sections, origin(environment())]
    )


PICTURES = "pictures"
"""Folder in a run's folder with `0.png` and so on, in the order of an evaluation's `answers`."""
_LARGEST = 96
"""Pixels of a picture's longer side."""
_MOST_BYTES = 1 << 20


def write_pictures(images: Sequence[Pixels], folder: Path) -> None:
    """Write images (H, W, C) with one or three channels; large ones are reduced."""
    folder.mkdir()
    for number, pixels in enumerate(images):
        colors = pixels[..., : 3 if pixels.shape[-1] >= 3 else 1]
        scale = min(1.0, _LARGEST / max(colors.shape[:2]))
        if scale < 1:
            size = round(colors.shape[1] * scale), round(colors.shape[0] * scale)
            small = Image.fromarray(colors.squeeze(-1) if colors.shape[-1] == 1 else colors).resize(size)
            colors = np.asarray(small).reshape(size[1], size[0], -1)
        write_file(folder / f"{number}.png", [png(colors)])


def read_pictures(folder: Path) -> list[bytes]:
    """The pictures in a run's folder, in their order; empty if there are none."""
    files = sorted((folder / PICTURES).glob("*.png"), key=lambda file: (len(file.name), file.name))
    return [read_bytes(file, "The picture of a sample", limit=_MOST_BYTES) for file in files]
