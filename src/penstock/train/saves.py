"""Where a run saves itself: at once, or in the background while training goes on."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from penstock import checkpoint
from penstock.checkpoint import BackgroundSaver, Checkpoint, Snapshot
from penstock.config.run import RunConfig
from penstock.errors import PenstockError


class Saves:
    """The checkpoints of one run. All ranks make one and call it alike."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        self.folder = folder
        self.newest_step = 0
        """The step that was saved last, or gone on from."""
        self._keep = config.keep
        self._saver = BackgroundSaver(folder, keep=config.keep) if config.save_in_background else None

    def save(self, snapshot: Snapshot, *, wait: bool) -> Path:
        """Commit a snapshot; in the background, where the run saves so, unless `wait`. Returns its folder.

        Raises:
            EnvironmentProblem, CheckpointError: it failed, or the save in the background before it did.
        """
        if self._saver and not wait:
            self._saver.start(snapshot)
        else:
            checkpoint.save(self.folder, snapshot, keep=self._keep)
        self.newest_step = snapshot.step
        return self.folder / f"step-{snapshot.step}"

    def find(self) -> Checkpoint | None:
        """The newest checkpoint that can be trusted."""
        self.wait()
        return checkpoint.find(self.folder)

    def wait(self) -> None:
        """Wait for a save under way; raises what it failed with."""
        if self._saver:
            self._saver.wait()

    def close(self) -> None:
        """Let a save under way finish; its failure is in the log."""
        if self._saver:
            with suppress(PenstockError, RuntimeError):
                self._saver.close()
