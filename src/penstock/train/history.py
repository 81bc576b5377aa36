"""Records of a run, as far as its page shows them: of a run that goes on, or of a `metrics.jsonl`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.boundary.files import shown
from penstock.config.load import from_dict, read_file
from penstock.config.run import RunConfig
from penstock.errors import ConfigError
from penstock.train.callbacks import Record
from penstock.train.metrics import read_metrics

Points = list[tuple[float, float]]

_MOST = 4000
"""Logs that are kept; beyond, every second one is dropped."""
_DRAWN = 300
"""Points of a curve that is drawn."""


@dataclass(slots=True)
class History:
    """The records of one run."""

    folder: Path
    start: dict[str, Any] = field(default_factory=dict)
    """The latest record of a start, with the run's facts."""
    prediction: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    logs: list[dict[str, Any]] = field(default_factory=list)
    losses: Points = field(default_factory=list)
    """Step and loss; of a long run, means of several steps."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    resumed: list[int] = field(default_factory=list)
    """Steps at which a start went on."""

    @property
    def name(self) -> str:
        """The run's folder, for people."""
        return self.folder.name or str(self.folder.resolve().name)

    @property
    def step(self) -> int:
        """Optimizer steps recorded."""
        return max(
            (record["step"] for each in (self.logs, self.evaluations) for record in each[-1:]), default=0
        )

    @property
    def total(self) -> int:
        """Optimizer steps of the whole run."""
        return int(self.start.get("total", 0))

    @property
    def classes(self) -> list[str]:
        """Names of the classes of its data."""
        return list(self.start.get("classes", ()))

    def add(self, records: Iterable[Record]) -> None:
        """Take further records. After a rewind, those of later steps are forgotten."""
        for record in records:
            event, step = record["event"], record["step"]
            if event in ("start", "resume", "rewind"):
                self._forget_after(step)
            if event == "resume":
                self.resumed.append(step)
            if event in ("start", "resume"):
                self.start = dict(record)
            elif event == "prediction":
                self.prediction = dict(record)
            elif event == "summary":
                self.summary = dict(record)
            elif event == "evaluation":
                self.evaluations.append(dict(record))
            elif event == "steps":
                losses = record.get("losses") or [record["loss"]]
                first = step - len(losses) + 1
                self.losses += [(first + n, loss) for n, loss in enumerate(losses) if _is_finite(loss)]
                self.logs.append({name: value for name, value in record.items() if name != "losses"})
        if len(self.logs) > _MOST:
            del self.logs[1::2]
        if len(self.losses) > _MOST * 2:
            self.losses = thinned(self.losses, _MOST)

    def _forget_after(self, step: int) -> None:
        self.logs = [record for record in self.logs if record["step"] <= step]
        self.evaluations = [record for record in self.evaluations if record["step"] <= step]
        self.losses = [point for point in self.losses if point[0] <= step]

    def series(self, name: str) -> Points:
        """A number of the logs, by step."""
        points = [(record["step"], record[name]) for record in self.logs if _is_finite(record.get(name))]
        return thinned(points, _DRAWN)

    def evaluated(self, name: str) -> Points:
        """A metric of the evaluations, by step."""
        return [(record["step"], record[name]) for record in self.evaluations if _is_finite(record.get(name))]

    def config(self) -> RunConfig:
        """The settings of the run."""
        path = self.folder / "run.toml"
        return from_dict(RunConfig, read_file(path), origin=str(path))


def read_history(folder: Path) -> History:
    """The history of a run's folder. Raises ConfigError where there is none."""
    path = folder / "metrics.jsonl"
    if not path.is_file() or not (folder / "run.toml").is_file():
        raise ConfigError(
            f"There is no run in {shown(folder)}, which would have run.toml and metrics.jsonl; give the output folder "
            "of a run."
        )
    history = History(folder)
    history.add(read_metrics(path))
    if not history.start:
        raise ConfigError(f"The run in {shown(folder)} has not begun; its page shows nothing yet.")
    return history


def thinned(points: Points, most: int) -> Points:
    """At most `most` points: means of as many neighbours as that takes."""
    width = math.ceil(len(points) / most)
    if width <= 1:
        return points
    groups = [points[begin : begin + width] for begin in range(0, len(points), width)]
    return [(group[-1][0], math.fsum(value for _, value in group) / len(group)) for group in groups]


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
