"""The record of experts' loads: how many visits each expert of each mixture had in training, by label of the sample.

Torch-free: training fills it, `penstock experts` shows it, placement and the planner read it.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from penstock.boundary.files import read_text, shown
from penstock.boundary.trees import Bounds, parse_json
from penstock.errors import ConfigError, DataError
from penstock.report.page import Cell, Section, Tile, origin, page
from penstock.report.record import environment

MOST_WINDOWS = 32
"""Windows that a record keeps; when there are more, neighbours are merged, so that each is twice as long."""
_BOUNDS = Bounds(bytes=1 << 28, values=1 << 25)
_VERSION = 1

T = TypeVar("T")
Counts = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Window:
    """Visits within some consecutive steps."""

    until: int
    """The window's last step."""
    counts: tuple[Counts, ...]
    """Visits of each layer's experts."""


@dataclass(frozen=True, slots=True)
class LoadRecord:
    """Visits of tokens to experts since the beginning of a run. Padding, evaluation and recomputation are not
    counted."""

    layers: tuple[str, ...]
    """Names of the mixtures, in their order in the model."""
    labels: tuple[str, ...]
    """Names of the labels; empty where samples have none."""
    counts: tuple[tuple[Counts, ...], ...]
    """Visits of each layer, a row for each label, a number for each expert; one row where there are no labels."""
    windows: tuple[Window, ...] = ()
    """The same over time, without labels: consecutive windows."""

    def __post_init__(self) -> None:
        rows = max(1, len(self.labels))
        shapes = [[len(row) for row in layer] for layer in self.counts]
        complete = all(len(shape) == rows and len(set(shape)) == 1 and shape[0] for shape in shapes)
        sizes = [shape[:1] for shape in shapes]
        windows = all([[len(row)] for row in window.counts] == sizes for window in self.windows)
        every = [row for counts in (*self.counts, *(one.counts for one in self.windows)) for row in counts]
        least = min((visits for row in every for visits in row), default=0)
        if len(shapes) != len(self.layers) or not complete or not windows or least < 0:
            raise DataError(
                "This is no record of loads: it needs a row of visits, none below 0, for each layer, label and window."
            )

    @property
    def totals(self) -> tuple[Counts, ...]:
        """Visits of each layer's experts, summed over labels."""
        return tuple(tuple(map(sum, zip(*layer))) for layer in self.counts)

    @property
    def last(self) -> tuple[Counts, ...]:
        """Visits since the last window."""
        logged = count_sum([window.counts for window in self.windows], self.totals)
        return tuple(tuple(a - b for a, b in zip(*rows)) for rows in zip(self.totals, logged))

    def closed(self, step: int) -> LoadRecord:
        """The same record with a window that ends at `step`."""
        windows = [*self.windows, Window(step, self.last)]
        if len(windows) > MOST_WINDOWS:
            pairs = zip(windows[::2], windows[1::2])
            merged = [Window(b.until, count_sum([a.counts, b.counts], a.counts)) for a, b in pairs]
            windows = merged + windows[len(merged) * 2 :]
        return LoadRecord(self.layers, self.labels, self.counts, tuple(windows))

    def history(self) -> tuple[tuple[Counts, ...], tuple[Counts, ...] | None]:
        """Visits of each layer's experts from which a placement is made, and those of the last window, on which it is
        evaluated; with fewer than two windows all visits, and None."""
        if len(self.windows) < 2:
            return self.totals, None
        *earlier, last = [window.counts for window in self.windows]
        return count_sum(earlier, self.totals), last

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON holds them."""
        return {
            "version": _VERSION, "layers": list(self.layers), "labels": list(self.labels),
            "counts": [[list(row) for row in layer] for layer in self.counts],
            "windows": [{"until": one.until, "counts": [list(row) for row in one.counts]} for one in self.windows],
        }  # fmt: skip

    def to_json(self) -> str:
        """JSON that `read_loads` reads."""
        return json.dumps(self.to_dict())

    def to_csv(self) -> str:
        """A line for each layer, label and expert; the label is empty where samples have none."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(("layer", "label", "expert", "visits"))
        for name, layer in zip(self.layers, self.counts):
            for label, row in zip(self.labels or ("",), layer):
                writer.writerows((name, label, expert, visits) for expert, visits in enumerate(row))
        return out.getvalue()

    @classmethod
    def of_dict(cls, tree: Mapping[str, Any]) -> LoadRecord:
        """The inverse of `to_dict`. Raises DataError for anything else."""
        if tree.get("version") != _VERSION:
            raise DataError(
                f"This is no record of loads of version {_VERSION}; train writes one, as experts/loads.json of its "
                "output folder."
            )
        try:
            windows = [Window(_each(int, [one["until"]])[0], _rows(one["counts"])) for one in tree["windows"]]
            counts = tuple(map(_rows, tree["counts"]))
            return cls(_each(str, tree["layers"]), _each(str, tree["labels"]), counts, tuple(windows))
        except (KeyError, TypeError) as problem:
            raise DataError(
                f"This is no record of loads: it lacks a key or has a value of another type ({problem})."
            ) from None


def read_loads(path: Path) -> LoadRecord:
    """The record in a file, or in the output folder of a run.

    Raises:
        DataError: there is no such file, or it is not a record.
    """
    file = path / "experts" / "loads.json" if path.is_dir() else path
    if not file.is_file():
        raise DataError(
            f"There is no record of experts' loads at {shown(file)}. Runs of models with mixtures of experts write it "
            "with each checkpoint; give such a run's output folder, or what `penstock experts RUN --json` printed."
        )
    raw = read_text(file, "The record of loads", limit=_BOUNDS.bytes)
    tree = parse_json(raw, f"The record {shown(file)}", error=DataError, bounds=_BOUNDS)
    return LoadRecord.of_dict(tree)


EVEN: Mapping[int, float] = {}
"""The unevenness assumed without a record: none, which is the aim of balance losses and biases."""


def unevenness(record: LoadRecord, experts: int) -> Mapping[int, float]:
    """By `ep`: visits of the busiest of `ep` devices over the mean of all, if each holds equally many consecutive
    experts. Averaged over layers, because every layer waits for its busiest device in each step.

    Raises:
        ConfigError: the record has another number of experts.
    """
    for name, loads in zip(record.layers, record.totals):
        if len(loads) != experts:
            raise ConfigError(
                f"The record of loads has {len(loads)} experts in {name}, but the model has {experts}; give its record."
            )
    if not record.layers:
        raise ConfigError("The record of loads has no layers; give one of a model with mixtures of experts.")
    factors = {}
    for ep in range(1, experts + 1):
        if experts % ep == 0:
            size = experts // ep
            shares = [[sum(row[i : i + size]) for i in range(0, experts, size)] for row in record.totals]
            factors[ep] = sum(map(imbalance, shares)) / len(shares)
    return factors


def imbalance(loads: Sequence[int]) -> float:
    """The largest load over the mean load; 1 where there are none."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


def count_sum(parts: Sequence[Sequence[Sequence[int]]], shape: Sequence[Sequence[int]]) -> tuple[Counts, ...]:
    """The sum of several windows' counts, each of shape `shape`."""
    return tuple(
        tuple(sum(counts[layer][expert] for counts in parts) for expert in range(len(row)))
        for layer, row in enumerate(shape)
    )


def _each(kind: type[T], values: Iterable[Any]) -> tuple[T, ...]:
    """The values as a tuple. Raises TypeError for a value of another type than `kind`."""
    checked = tuple(values)
    for value in checked:
        if type(value) is not kind:
            raise TypeError(value)
    return checked


def _rows(values: Iterable[Any]) -> tuple[Counts, ...]:
    return tuple(_each(int, row) for row in values)


def loads_table(record: LoadRecord) -> Section:
    """A row for each layer: how evenly its experts are visited."""
    return _table("Layers", "layer", zip(record.layers, record.totals))


def _table(title: str, first: str, loads_by_name: Iterable[tuple[str, Sequence[int]]]) -> Section:
    heads = first, "experts", "visits", "largest over mean", "busiest", "least visited", "without visits"
    rows = []
    for name, loads in loads_by_name:
        busiest, least = (best(range(len(loads)), key=loads.__getitem__) for best in (max, min))
        cells = (
            name, str(len(loads)), f"{sum(loads):,}", f"{imbalance(loads):.3f}", f"{busiest}: {loads[busiest]:,}",
            f"{least}: {loads[least]:,}", str(loads.count(0)),
        )  # fmt: skip
        rows.append(("", [Cell(text, words=place == 0) for place, text in enumerate(cells)]))
    columns = [Cell(head, words=place == 0, rank=place) for place, head in enumerate(heads)]
    return Section(title=title, columns=columns, rows=rows)


def loads_page(record: LoadRecord) -> str:
    """The record as an HTML document."""
    worst = max(map(imbalance, record.totals), default=1.0)
    steps = record.windows[-1].until if record.windows else 0
    tiles = [
        Tile(value=f"{worst:.2f}", words="largest over mean visits, of the most uneven layer", lead=True),
        Tile(value=f"{sum(map(sum, record.totals)):,}", words="visits"),
        Tile(value=f"{steps:,}", words="steps logged"),
    ]
    sections = [loads_table(record)]
    for name, loads in zip(record.layers, record.counts) if record.labels else ():
        sections.append(_table(name, "label", zip(record.labels, loads)))
    lead = "How often tokens visited each expert in training. Padding and evaluation count for nothing."
    return page("Experts' loads", lead, tiles, [*sections, origin(environment())])
