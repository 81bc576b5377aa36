"""The records of a run, one per event, for `metrics.jsonl` and callbacks; and how a run's page reads them."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from penstock.boundary.files import naming, own_file, read_bytes, shown, write_text
from penstock.boundary.trees import parse_json
from penstock.config.load import from_dict, read_file
from penstock.config.run import RunConfig
from penstock.errors import ConfigError, PenstockError
from penstock.train.callbacks import Callback, Record, call_method, is_number

_LIMIT = 1 << 32
"""Most bytes of a `metrics.jsonl`."""


class Records:
    """Writes a run's records, on rank 0 (`main`) only.

    `metrics.jsonl` has one JSON object per line, and each line is passed to the system as a whole, so that a kill can
    tear only the last one. `rewind`, called when a run resumes, drops a torn line and everything that the run will
    repeat, so no step is ever reported twice.
    """

    def __init__(self, output: Path, callbacks: Sequence[Callback] = (), *, main: bool = True) -> None:
        self._output = output
        self._main = main
        self._file: BinaryIO | None = None
        self._callbacks = tuple(callbacks) if main else ()

    @property
    def path(self) -> Path:
        """The file. Raises an error if it is a link."""
        return own_file(self._output, "metrics.jsonl")

    def rewind(self, step: int, *, again: Collection[str] = ()) -> None:
        """Keep the records up to the checkpoint of `step`, without the events in `again`, which will be recorded again
        at `step` itself. The file is replaced atomically."""
        if not (self._main and self.path.exists()):
            return
        self._close_file()  # else later records would go to the replaced file
        lines = [
            line
            for line, record in _whole_lines(self.path)
            if record["step"] < step or (record["step"] == step and record["event"] not in again)
        ]
        write_text(self.path, "".join(lines))

    def write(self, event: str, step: int, **values: Any) -> None:
        """Record an event after `step`. NaN and infinities, which JSON lacks, become null."""
        if not self._main:
            return
        record = {"event": event, "step": step, **values}
        with naming(self.path):
            if self._file is None:
                # Unbuffered: closing a buffer would write again what could not be written, and fail again.
                self._file = cast(BinaryIO, self.path.open("ab", buffering=0))
            unwritten = json.dumps(_finite(record), allow_nan=False).encode() + b"\n"
            while unwritten:
                unwritten = unwritten[self._file.write(unwritten) :]
        for callback in self._callbacks:
            call_method(callback, record)

    def close(self) -> None:
        """Close the file, and call every callback's `on_end`, even if another one fails."""
        with ExitStack() as ends:
            for callback in reversed(self._callbacks):
                ends.callback(callback.on_end)
            self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete records of a `metrics.jsonl`."""
    return [record for _, record in _whole_lines(path)]


def _whole_lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    lines = []
    text = read_bytes(path, "The record of the run", limit=_LIMIT).decode(errors="replace")
    for line in text.splitlines(keepends=True):
        try:
            record = parse_json(line, "The record")
        except PenstockError:
            continue
        if line.endswith("\n") and isinstance(record.get("step"), int) and "event" in record:
            lines.append((line, record))
    return lines


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


Points = list[tuple[float, float]]

_MOST = 4000
"""Most log records that are kept; beyond that every second one is dropped."""
DRAWN = 300
"""Most points of a drawn curve."""


@dataclass(slots=True)
class History:
    """The records of one run."""

    folder: Path
    start: dict[str, Any] = field(default_factory=dict)
    """The latest start record, with facts about the run."""
    prediction: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    logs: list[dict[str, Any]] = field(default_factory=list)
    losses: Points = field(default_factory=list)
    """Step and loss; for a long run, means of several steps."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    resumed: list[int] = field(default_factory=list)
    """Steps at which the run was resumed."""

    @property
    def name(self) -> str:
        """Name of the run's folder, for people."""
        return self.folder.name or str(self.folder.resolve().name)

    @property
    def step(self) -> int:
        """Number of optimizer steps recorded."""
        return max((each[-1]["step"] for each in (self.logs, self.evaluations) if each), default=0)

    @property
    def total(self) -> int:
        """Number of optimizer steps of the whole run."""
        return int(self.start.get("total", 0))

    def add(self, records: Iterable[Record]) -> None:
        """Add further records. After a rewind, records of later steps are dropped."""
        for record in map(dict, records):
            event, step = record["event"], record["step"]
            if event in ("start", "resume", "rewind"):
                self.logs = [log for log in self.logs if log["step"] <= step]
                self.evaluations = [each for each in self.evaluations if each["step"] <= step]
                self.losses = [point for point in self.losses if point[0] <= step]
            if event == "resume":
                self.resumed.append(step)
            if event in ("start", "resume"):
                self.start = record
            elif event == "prediction":
                self.prediction = record
            elif event == "summary":
                self.summary = record
            elif event == "evaluation":
                self.evaluations.append(record)
            elif event == "steps":
                losses = record.pop("losses", None) or [record["loss"]]
                self.losses += [
                    (n, loss) for n, loss in enumerate(losses, step - len(losses) + 1) if is_number(loss)
                ]
                self.logs.append(record)
        if len(self.logs) > _MOST:
            del self.logs[1::2]
        if len(self.losses) > _MOST * 2:
            self.losses = thinned(self.losses, _MOST)

    def series(self, name: str) -> Points:
        """A number from the logs, by step."""
        return thinned(_points(self.logs, name), DRAWN)

    def evaluated(self, name: str) -> Points:
        """A metric from the evaluations, by step."""
        return _points(self.evaluations, name)

    def config(self) -> RunConfig:
        """The settings of the run."""
        path = self.folder / "run.toml"
        return from_dict(RunConfig, read_file(path), origin=str(path))


def read_history(folder: Path) -> History:
    """The history in a run's folder. Raises ConfigError if there is none."""
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
    """At most `most` points, each the mean of the same number of neighbours."""
    width = math.ceil(len(points) / most)
    if width <= 1:
        return points
    groups = [points[begin : begin + width] for begin in range(0, len(points), width)]
    return [(group[-1][0], math.fsum(value for _, value in group) / len(group)) for group in groups]


def _points(records: Iterable[Record], name: str) -> Points:
    return [(record["step"], record[name]) for record in records if is_number(record.get(name))]
