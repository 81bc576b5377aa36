"""Saves while training continues: the state is copied, and a thread commits the copy."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import torch
from torch import Tensor

from penstock.checkpoint.commit import commit
from penstock.checkpoint.coordinator import current_coordinator, new_group
from penstock.checkpoint.snapshot import Parts, Piece, Snapshot, take_apart
from penstock.disk import SecondThread

_log = logging.getLogger(__name__)


class BackgroundSaver:
    """Saves as `save` does, but the training loop only waits for the copy.

    The copy takes as much host memory as this rank's share of the state. That memory is reused by later saves, and is
    page-locked for a GPU. At most one save is in flight: the next one waits for it. If a save fails, the next `start`,
    `wait` or `close` raises its error, on all ranks alike; afterwards the saver can be used again.

    With torch.distributed, all ranks make a saver and make the same calls. It has its own gloo group, so that its
    messages do not mix with the training's collectives.
    """

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        self.folder = folder
        self.keep = keep
        self.best = 0
        """Step of the best checkpoint, which is kept in addition."""
        self._coordinator = current_coordinator(new_group())
        self._copies: dict[tuple[str, torch.Size], Tensor] = {}
        # Not a daemon: a process that ends normally finishes its save first.
        self._thread = SecondThread("penstock-checkpoint", daemon=False)
        self._saved: Path | None = None

    def start(self, snapshot: Snapshot) -> None:
        """Copy `snapshot` and begin to save it; afterwards the caller may change what it holds.

        Waits for the previous save. Raises EnvironmentProblem or CheckpointError if that failed; then `snapshot` is not
        saved.
        """
        self.wait()
        parts = copied(take_apart(snapshot, self._coordinator.rank), self._copies)
        self._thread.do(self._commit, parts)

    @property
    def busy(self) -> bool:
        """Whether a save is in flight."""
        return self._thread.busy

    def wait(self) -> Path | None:
        """Wait for the save in flight. Returns the last checkpoint that was committed, if any. Raises
        EnvironmentProblem or CheckpointError if it failed."""
        self._thread.wait()
        return self._saved

    def close(self) -> Path | None:
        """Wait as `wait` does, and free the memory of the copies."""
        try:
            return self.wait()
        finally:
            self._copies = {}

    def _commit(self, parts: Parts) -> None:
        try:
            self._saved = commit(
                self.folder, parts, keep=self.keep, best=self.best, coordinator=self._coordinator
            )
        except BaseException as problem:
            _log.error("The checkpoint of step %d could not be saved: %s", parts.step, problem)
            raise  # raised again where the training loop waits


@torch.no_grad()
def copied(parts: Parts, memory: dict[tuple[str, torch.Size], Tensor]) -> Parts:
    """A copy of the parts in host memory; `memory` keeps the copied tensors, for reuse by later copies."""
    pieces: dict[str, list[Piece]] = {}
    copies, devices = {}, set()
    for name, boxes in parts.pieces.items():
        pieces[name] = []
        for piece in boxes:
            values, key = piece.values, (name, piece.offsets)
            copy = memory.get(key)
            if copy is None or (copy.shape, copy.dtype) != (values.shape, values.dtype):
                copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
            copy.copy_(values, non_blocking=values.is_cuda)
            copies[key] = copy
            pieces[name].append(Piece(copy, piece.shape, piece.offsets))
            if values.is_cuda:
                devices.add(values.device)
    memory.clear()
    memory.update(copies)
    for device in devices:
        torch.cuda.synchronize(device)
    return dataclasses.replace(parts, pieces=pieces)
