"""The records of a run, one per event. They go to `metrics.jsonl`, the display and the callbacks."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from penstock.boundary.files import naming, own_file, read_bytes, write_text
from penstock.boundary.trees import parse_json
from penstock.errors import PenstockError
from penstock.train.callbacks import Callback, call_method
from penstock.train.display import Display

_LIMIT = 1 << 32
"""Bytes of a `metrics.jsonl`."""


class Records:
    """Writer of a run's records. Only rank 0 writes: `main` says whether this is it.

    `metrics.jsonl` has one JSON object a line, and each whole line is on its way to the disk at once. A kill can tear
    only the last line. `rewind`, called when a run resumes, drops that and everything that the run is about to do
    again, so no step is ever reported twice.
    """

    def __init__(
        self, output: Path, display: Display | None, *, callbacks: Sequence[Callback] = (), main: bool = True
    ) -> None:
        self._output = output
        self.display = display if display and main else Display()
        self._main = main
        self._file: BinaryIO | None = None
        self._callbacks = tuple(callbacks) if main else ()

    @property
    def path(self) -> Path:
        """The file; refused where it is a link."""
        return own_file(self._output, "metrics.jsonl")

    def rewind(self, step: int, *, again: Collection[str] = ()) -> None:
        """Keep the records up to the checkpoint of `step`; the file is replaced atomically.

        `again` names events that will be recorded again at `step` itself.
        """
        if not (self._main and self.path.exists()):
            return
        self._close_file()  # or what follows would be written to the file that is replaced
        lines = [
            line
            for line, record in _whole_lines(self.path)
            if record["step"] < step or (record["step"] == step and record["event"] not in again)
        ]
        write_text(self.path, "".join(lines))

    def write(self, event: str, step: int, **values: Any) -> None:
        """Record an event after `step`. Numbers that are not finite become null, which JSON can say."""
        if not self._main:
            return
        record = {"event": event, "step": step, **values}
        with naming(self.path):
            if self._file is None:
                # Without a buffer: closing it would write again what could not be written, and fail again.
                self._file = cast(BinaryIO, self.path.open("ab", buffering=0))
            unwritten = json.dumps(_finite(record), allow_nan=False).encode() + b"\n"
            while unwritten:
                unwritten = unwritten[self._file.write(unwritten) :]
        self.display.show(record)
        for callback in self._callbacks:
            call_method(callback, record)

    def close(self) -> None:
        """Close the file, and notify the callbacks that the run has ended."""
        self._close_file()
        for callback in self._callbacks:
            callback.on_end()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole records of a `metrics.jsonl`."""
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
