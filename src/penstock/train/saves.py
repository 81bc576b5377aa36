"""Saves of a run, at once or in the background while training goes on, and the files that it leaves at its end."""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock import checkpoint
from penstock.boundary.files import own_file, write_text
from penstock.checkpoint import BackgroundSaver, Checkpoint, Snapshot
from penstock.checkpoint.background import copied
from penstock.checkpoint.commit import commit
from penstock.checkpoint.coordinator import current_coordinator, main_first
from penstock.checkpoint.rewrite import folder_beside
from penstock.checkpoint.snapshot import Parts, take_apart
from penstock.config.run import Lora, RunConfig
from penstock.errors import PenstockError
from penstock.models.convert import save_pretrained
from penstock.models.lora import merged
from penstock.parallel import ParallelDims, whole_state
from penstock.parallel.agree import slowest
from penstock.train.resume import set_aside

_SECONDS = 10.0
"""Least time between checkpoints that `checkpoint_every` does not ask for."""


class Saves:
    """The checkpoints of one run. All ranks make one and call it alike."""

    def __init__(self, folder: Path, config: RunConfig, dims: ParallelDims) -> None:
        self.folder = folder
        self.newest_step = 0
        """The step that was saved last, or gone on from."""
        self.best = 0
        """The step whose checkpoint is kept however old it becomes."""
        self._dims = dims
        self._asked = bool(config.checkpoint_every)
        self._time = time.monotonic()
        self._held: Parts | None = None
        self._keep = config.keep
        self._saver = BackgroundSaver(folder, keep=config.keep) if config.save_in_background else None

    def save(self, snapshot: Snapshot, *, wait: bool) -> Path:
        """Commit a snapshot, after one that is held; in the background, where the run saves so, unless `wait`. Returns
        its folder.

        Raises:
            EnvironmentProblem, CheckpointError: it failed, or the save in the background before it did.
        """
        if self._held is not None and self._held.step == self.best != snapshot.step:
            self.wait()
            place = current_coordinator()
            commit(self.folder, self._held, keep=self._keep, best=self.best, coordinator=place)
        self._held = None
        if self._saver and not wait:
            self._saver.best = self.best
            self._saver.start(snapshot)
        else:
            checkpoint.save(self.folder, snapshot, keep=self._keep, best=self.best)
        self.newest_step, self._time = snapshot.step, time.monotonic()
        return self.folder / f"step-{snapshot.step}"

    def too_soon(self) -> bool:
        """Whether the last checkpoint is so new that another would cost time and save none."""
        if self._asked:
            return False
        return bool(slowest(float(time.monotonic() - self._time < _SECONDS), self._dims))

    def hold(self, snapshot: Snapshot) -> None:
        """Keep a copy of the best step so far in host memory, and write it with the next checkpoint."""
        self._held = copied(take_apart(snapshot, current_coordinator().rank), {})

    def find(self) -> Checkpoint | None:
        """The newest checkpoint that can be trusted."""
        self.wait()
        return checkpoint.find(self.folder)

    def wait(self) -> None:
        """Wait for a save under way; raises the error that it failed with."""
        if self._saver:
            self._saver.wait()

    def close(self) -> None:
        """Let a save under way finish; its failure is in the log."""
        if self._saver:
            with suppress(PenstockError, RuntimeError):
                self._saver.close()


def export(model: Any, output: Path, dims: ParallelDims, lora: Lora, card: str) -> Path:
    """Write the model as a Hugging Face folder, with adapters merged into their weights, and its `card`; one of an
    earlier run is set aside. All ranks must call this.
    """
    folder, partial = output / "export", own_file(output, "export.tmp")
    weights = whole_state(model, dims)

    def write() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        save_pretrained(model, partial, weights=merged(weights, lora, model), beside=folder_beside(output))
        write_text(partial / "README.md", card)
        set_aside(folder)
        partial.rename(folder)

    main_first(write)
    return folder
