"""Checkpoints that survive a kill at any instant, of one process or of many.

Note [The commit protocol]
    1. Each rank writes its own files into `step-N.tmp/`. They are hashed while they are written, and fsynced (see
       Note [Streaming]).
    2. Rank 0 writes `manifest.json` last, with every file's size and sha256. It is fsynced, then the directory.
    3. `step-N.tmp` is renamed to `step-N`. The rename is atomic: from then on the checkpoint exists.
    4. The parent directory is fsynced; then the text file `latest` is replaced by a rename.
    5. The new checkpoint is read back and verified. Only then are older ones pruned; at least two are kept.
A kill before 3 leaves a `.tmp`, which the next start removes. A kill after 3 leaves a whole checkpoint. An error on one
rank before 3 is raised on all ranks, and what was written is removed.
Reading never depends on `latest`, which is for people and scripts. It takes the newest `step-N` that verifies.

Nothing is pickled: tensors are safetensors, everything else is JSON.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from penstock.boundary.files import own_file
from penstock.checkpoint.coordinator import Coordinator, RankProblem, current_coordinator
from penstock.checkpoint.index import assign_chunks, file_name, held_pieces, to_json
from penstock.checkpoint.manifest import INDEX, MANIFEST, Manifest, manifest_text, verify
from penstock.checkpoint.snapshot import LOCAL, Parts, Snapshot, take_apart
from penstock.checkpoint.stages import merge_documents
from penstock.checkpoint.storage import write_chunks, write_json
from penstock.disk import Written, sync_folder, write_file
from penstock.errors import CheckpointError, EnvironmentProblem, PenstockError
from penstock.report.record import versions

_log = logging.getLogger(__name__)

LATEST = "latest"
_STEP = re.compile(r"step-(0|[1-9][0-9]{0,9})")
"""Names that saves give to checkpoints. Anything else in their folder, such as `step-041`, is left alone."""
_LEFT = re.compile(rf"({_STEP.pattern}(\.refused)?|{LATEST})\.tmp")


def save(folder: Path, snapshot: Snapshot, *, keep: int = 2, best: int = 0) -> Path:
    """Commit `snapshot` as `folder/step-N` and remove what is older than the newest `keep` (at least 2), except step
    `best`.

    With torch.distributed, all its ranks call this, each with its own snapshot of the same step. All of them must see
    `folder`. A `step-N` that exists and verifies is not written again: a run has one state at a step.

    Raises EnvironmentProblem if the disk has too little room or fails, on any rank; older checkpoints are untouched.
    Raises CheckpointError if the new checkpoint does not read back.
    """
    coordinator = current_coordinator()
    parts = take_apart(snapshot, coordinator.rank)
    return commit(folder, parts, keep=keep, best=best, coordinator=coordinator)


def commit(folder: Path, parts: Parts, *, keep: int, coordinator: Coordinator, best: int = 0) -> Path:
    """Do what `save` does, for a snapshot that is already split into parts."""
    final, temporary = folder / f"step-{parts.step}", folder / f"step-{parts.step}.tmp"
    part = coordinator.rank, coordinator.world
    try:
        if coordinator.first(lambda: _prepare(final, temporary, parts)):
            return final
        _write(temporary, parts, coordinator)
        coordinator.first(lambda: _publish(temporary, final))
        coordinator.all(lambda: verify(final, part=part, keep_cached=False))
    except Exception as problem:
        where, error = _cause(problem)
        if coordinator.rank == 0:
            _remove(temporary)
        if isinstance(error, OSError):
            raise EnvironmentProblem(
                f"Checkpoint {final} could not be written{where}: {error}. Older checkpoints are untouched. "
                f"Free space or replace the disk, then run the same command again to resume."
            ) from problem
        if error is problem:
            raise
        raise error from problem
    coordinator.first(lambda: _prune(folder, newest=parts.step, keep=max(keep, 2), best=best))
    return final


def _cause(problem: Exception) -> tuple[str, BaseException]:
    """The place of a problem in words, and the error of the lowest rank that failed."""
    if not isinstance(problem, RankProblem):
        return "", problem
    if isinstance(problem.error, PenstockError | OSError):
        return f" (rank {problem.rank})", problem.error
    return "", RuntimeError(f"Rank {problem.rank} failed to write a checkpoint: {problem.error}")


def _prepare(final: Path, temporary: Path, parts: Parts) -> bool:
    """Make an empty temporary folder. Returns True if the step already exists."""
    final.parent.mkdir(parents=True, exist_ok=True)
    if final.exists():
        try:
            verify(final)
        except CheckpointError as problem:
            _log.warning("%s It is written again.", problem)
            _set_aside(final)
        else:
            return True
    # Tensors make up nearly all of a checkpoint; a megabyte covers headers and JSON.
    _require_space(temporary, parts.whole_bytes() + 1_000_000)
    _remove(temporary)
    temporary.mkdir()
    return False


def _require_space(temporary: Path, size: int) -> None:
    """Require `size` and 5 % more, because files take whole blocks."""
    needed, free = 1.05 * size, shutil.disk_usage(temporary.parent).free
    if free < needed:
        raise EnvironmentProblem(
            f"{temporary.parent} has {free / 1e6:.0f} MB free; {temporary.stem} needs {needed / 1e6:.0f} MB. Nothing "
            f"that exists was changed: free space, then run the same command again."
        )


def _write(temporary: Path, parts: Parts, coordinator: Coordinator) -> None:
    """Steps 1 and 2 of Note [The commit protocol]."""

    def shared() -> None:
        if not temporary.is_dir():
            raise EnvironmentProblem(
                f"Rank {coordinator.rank} does not see {temporary}, which rank 0 has made. Set --output to a folder "
                f"that all nodes share."
            )

    coordinator.all(shared)
    rank, world = coordinator.rank, coordinator.world
    document = merge_documents(parts.document, coordinator)
    index = assign_chunks(coordinator.all(lambda: held_pieces(parts.pieces)))

    def own_files() -> dict[str, Written]:
        files = write_chunks(temporary, index, world, parts.pieces, rank=rank)
        documents: dict[str, object] = {}
        if parts.local:
            documents[file_name(LOCAL, rank, world, "json")] = parts.local
        if rank == 0:
            documents |= {INDEX: to_json(index), "state.json": document, "config.json": parts.config}
        return files | {name: write_json(temporary / name, content) for name, content in documents.items()}

    files = {name: written for share in coordinator.all(own_files) for name, written in share.items()}

    def manifest() -> None:
        listed = Manifest(parts.step, parts.plan, versions(), files, world)
        write_file(temporary / MANIFEST, [manifest_text(listed)])
        sync_folder(temporary)

    coordinator.first(manifest)


def _publish(temporary: Path, final: Path) -> None:
    """Steps 3 and 4 of Note [The commit protocol]."""
    temporary.rename(final)
    sync_folder(final.parent)
    _point_latest(final.parent, final.name)


def steps(folder: Path) -> list[int]:
    """Steps with a committed checkpoint, verified or not, in ascending order."""
    if not folder.is_dir():
        return []
    matches = (_STEP.fullmatch(entry.name) for entry in folder.iterdir() if entry.is_dir())
    return sorted(int(match[1]) for match in matches if match)


def clean(folder: Path) -> None:
    """Remove the files of interrupted saves. Rank 0 does it, and the other ranks wait."""

    def leftovers() -> None:
        for entry in [*folder.iterdir()] if folder.is_dir() else ():
            if _LEFT.fullmatch(entry.name):
                _log.info("Removing %s, which an interrupted save left.", entry)
                _remove(entry)

    current_coordinator().first(leftovers)


def _point_latest(folder: Path, name: str) -> None:
    temporary = own_file(folder, f"{LATEST}.tmp")
    write_file(temporary, [f"{name}\n".encode()])
    temporary.replace(folder / LATEST)
    sync_folder(folder)


def settle(folder: Path, refused: Iterable[Path], name: str) -> None:
    """Rename the `refused` checkpoints, so that they are not tried again, and let `latest` name the accepted one."""
    for path in refused:
        _set_aside(path)
    latest = folder / LATEST
    if not latest.is_file() or latest.read_bytes() != f"{name}\n".encode():
        _log.warning(
            "%s does not name %s, the newest checkpoint that verifies. It is rewritten.", latest, name
        )
        _point_latest(folder, name)


def _prune(folder: Path, *, newest: int, keep: int, best: int) -> None:
    for step in {*[step for step in steps(folder) if step <= newest][:-keep]} - {best}:
        _remove(folder / f"step-{step}")


def _set_aside(path: Path) -> None:
    target = path.with_name(f"{path.name}.refused")
    _remove(target)
    path.rename(target)


def _remove(path: Path) -> None:
    """Delete a file or directory. A kill half way leaves nothing that looks like a checkpoint."""
    if path.is_dir() and not path.is_symlink():
        folder = path
        if path.suffix != ".tmp":
            _remove(path.with_name(f"{path.name}.tmp"))
            folder = path.rename(path.with_name(f"{path.name}.tmp"))
        shutil.rmtree(folder)
    else:
        path.unlink(missing_ok=True)
