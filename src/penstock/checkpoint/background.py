"""Saving while training goes on: a copy is made, and a thread of its own commits it."""

from __future__ import annotations

import dataclasses
import logging
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.checkpoint.commit import commit
from penstock.checkpoint.pieces import Parts, Piece, take_apart
from penstock.checkpoint.snapshot import Snapshot
from penstock.checkpoint.team import Team, new_group

_log = logging.getLogger(__name__)


class BackgroundSaver:
    """Saves as `save` does, of which the training loop waits for the copy alone.

    The copy takes the memory of this rank's share on the host, which is kept from save to save (page-locked for a
    GPU). One save is in flight at most: the next one waits for it. A failure is raised by the next `start`, `wait` or
    `close`, on all ranks alike; the saver goes on working after it.

    Where torch.distributed runs, all ranks make one and call it alike; it talks in a gloo group of its own, so that
    nothing of it mixes with the training's collectives.
    """

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        self.folder = folder
        self.keep = keep
        self._team = Team()
        if dist.is_available() and dist.is_initialized():
            group = new_group()
            self._team = Team(dist.get_rank(group), dist.get_world_size(group), group)
        self._copies: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._saved: Path | None = None
        self._problem: BaseException | None = None

    def start(self, snapshot: Snapshot) -> None:
        """Copy `snapshot` and begin to save it; afterwards the caller may change what it holds.

        Waits for the save before it.

        Raises:
            EnvironmentProblem, CheckpointError: the save before it failed; `snapshot` is not saved then.
        """
        self.wait()
        parts = self._copied(take_apart(snapshot, self._team.rank))
        # No daemon: a process that ends in good order finishes its save first.
        self._thread = threading.Thread(target=self._commit, args=(parts,), name="penstock-checkpoint")
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a save is in flight."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> Path | None:
        """Wait for the save in flight; the last checkpoint that was committed, if any.

        Raises:
            EnvironmentProblem, CheckpointError: it failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem
        return self._saved

    def close(self) -> Path | None:
        """As `wait`, and give the memory of the copies back."""
        try:
            return self.wait()
        finally:
            self._copies = {}

    def _commit(self, parts: Parts) -> None:
        try:
            self._saved = commit(self.folder, parts, keep=self.keep, team=self._team)
        except BaseException as problem:  # noqa: BLE001  # raised again where the loop waits
            _log.error("The checkpoint of step %d could not be saved: %s", parts.step, problem)
            self._problem = problem

    @torch.no_grad()
    def _copied(self, parts: Parts) -> Parts:
        """The same parts in host memory of their own."""
        pieces, copies, devices = {}, {}, set()
        for name, piece in parts.pieces.items():
            values = piece.values
            copy = self._copies.get(name)
            if copy is None or (copy.shape, copy.dtype) != (values.shape, values.dtype):
                copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
            copy.copy_(values, non_blocking=values.is_cuda)
            copies[name] = copy
            pieces[name] = Piece(copy, piece.shape, piece.offsets)
            if values.is_cuda:
                devices.add(values.device)
        self._copies = copies
        for device in devices:
            torch.cuda.synchronize(device)
        return dataclasses.replace(parts, pieces=pieces)
