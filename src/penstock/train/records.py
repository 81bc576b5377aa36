"""What a run tells: one record per event, to the metrics file, the display, and TensorBoard if wished."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from penstock.train.display import Display
from penstock.train.metrics import MetricsFile, TensorBoard


class Records:
    """Where the records of a run go. Only rank 0's go anywhere: `main` says whether this is it."""

    def __init__(self, output: Path, display: Display | None, *, main: bool) -> None:
        self.path = output / "metrics.jsonl"
        self.display = display if display and main else Display()
        self._main = main
        self._metrics = MetricsFile(self.path)
        self._board: TensorBoard | None = None

    def open_tensorboard(self, *, resumed_at: int) -> None:
        """Write TensorBoard event files too. Raises EnvironmentProblem where tensorboardX is missing."""
        if self._main:
            self._board = TensorBoard(self.path.parent / "tensorboard", resumed_at=resumed_at)

    def rewind(self, step: int, *, again: Collection[str] = ()) -> None:
        """Forget what was recorded after `step`, and the events at it that will be recorded `again`."""
        if self._main:
            self._metrics.rewind(step, again=again)

    def write(self, event: str, step: int, **values: Any) -> None:
        """Record an event after `step`."""
        if not self._main:
            return
        record = {"event": event, "step": step, **values}
        self._metrics.write(record)
        self.display.show(record)
        if self._board:
            self._board.write(record)

    def close(self) -> None:
        """Close the files."""
        self._metrics.close()
        if self._board:
            self._board.close()
