"""Checkpoints that survive a kill at any instant and refuse what changed since it was written.

Note [The commit protocol]
    1. Everything is written into `step-N.tmp/`, each file hashed while it is written and fsynced.
    2. `manifest.json`, with every file's size and sha256, is written last and fsynced, then the directory.
    3. `step-N.tmp` is renamed to `step-N`: the one atomic instant at which the checkpoint exists.
    4. The parent directory is fsynced; then the text file `latest` is replaced by a rename.
    5. The new checkpoint is read back and verified; only then are older ones pruned; at least two are kept.
A kill before 3 leaves a `.tmp` that the next start removes; a kill after it leaves a whole checkpoint.
Reading never depends on `latest`, which is for people and scripts: the newest `step-N` that verifies is
taken.

Nothing is pickled: weights and state tensors are safetensors, everything else is JSON.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint.tensorfile import Written, load_tensors, save_tensors, write_file
from penstock.checkpoint.tree import pack, unpack
from penstock.errors import CheckpointError, EnvironmentProblem

_log = logging.getLogger(__name__)

FORMAT = 1
_MANIFEST = "manifest.json"
_LATEST = "latest"
_MANIFEST_LIMIT = 16_000_000
_STEP = re.compile(r"step-(\d+)")
_FILE_NAME = re.compile(r"[A-Za-z0-9_]+\.(safetensors|json)")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All of a run at one step.

    `weights` maps sets of tensors by Penstock's parameter names: `weights` itself, and `ema` where there is
    an average. `state` maps names to trees (see `penstock.checkpoint.tree`): optimizer, random generators,
    loader position and so on.
    """

    step: int
    weights: Mapping[str, Mapping[str, Tensor]]
    state: Mapping[str, Any]
    config: Mapping[str, Any]
    plan: str = ""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint directory must hold, bit for bit."""

    step: int
    plan: str
    versions: Mapping[str, str]
    files: Mapping[str, Written] = field(default_factory=dict)


def save(folder: Path, snapshot: Snapshot, *, keep: int = 2) -> Path:
    """Commit `snapshot` as `folder/step-N` and prune what is older than the newest `keep` (at least 2).

    A `step-N` that is there already and verifies is left as it is: a run's state at a step is unique.

    Raises:
        EnvironmentProblem: the disk has too little room or fails; older checkpoints are untouched.
        CheckpointError: what was written does not read back.
    """
    final = folder / f"step-{snapshot.step}"
    temporary = folder / f"step-{snapshot.step}.tmp"
    folder.mkdir(parents=True, exist_ok=True)
    if final.exists():
        try:
            verify(final)
        except CheckpointError as problem:
            _log.warning("%s It is written again.", problem)
            _set_aside(final)
        else:
            return final
    try:
        _require_space(folder, snapshot)
        _remove(temporary)
        temporary.mkdir()
        _write(temporary, snapshot)
        temporary.rename(final)
        _sync_directory(folder)
        _point_latest(folder, final.name)
    except OSError as problem:
        _remove(temporary)
        raise EnvironmentProblem(
            f"Checkpoint {final} could not be written: {problem}. Older checkpoints are untouched. "
            f"Free space or mend the disk, then run the same command again to resume."
        ) from problem
    verify(final)
    _prune(folder, newest=snapshot.step, keep=max(keep, 2))
    return final


def newest(folder: Path) -> Snapshot | None:
    """The newest checkpoint in `folder` that verifies, or None where there is none at all.

    Each one that is refused is logged by name and, once an older one has been accepted, renamed to
    `step-N.refused` so that it is neither tried again nor in the way.

    Raises:
        CheckpointError: there are checkpoints, and none can be trusted.
    """
    refused: list[tuple[Path, CheckpointError]] = []
    for step in reversed(steps(folder)):
        path = folder / f"step-{step}"
        try:
            snapshot = load(path)
        except CheckpointError as problem:
            _log.warning("%s The checkpoint before it is tried.", problem)
            refused.append((path, problem))
            continue
        for bad, _ in refused:
            _set_aside(bad)
        _check_latest(folder, path.name)
        return snapshot
    if refused:
        listed = "\n".join(f"- {problem}" for _, problem in refused)
        raise CheckpointError(
            f"No checkpoint in {folder} can be trusted:\n{listed}\n"
            f"Restore one from a backup, or start anew with --no-resume."
        )
    return None


def load(path: Path) -> Snapshot:
    """Read the checkpoint directory `path` after verifying every byte of it.

    Raises:
        CheckpointError: as `verify`, or a file's content is not what its name says.
    """
    try:
        return _load(path)
    except OSError as problem:
        raise CheckpointError(f"Checkpoint {path} is refused: it cannot be read ({problem}).") from problem


def _load(path: Path) -> Snapshot:
    manifest = verify(path)
    documents = {name: _read_json(path / f"{name}.json") for name in ("state", "config")}
    tensors = {
        name.removesuffix(".safetensors"): load_tensors(path / name)
        for name in manifest.files
        if name.endswith(".safetensors")
    }
    weights = {name: tensors.pop(name) for name in documents["state"]["weights"]}
    merged = {name: tensor for group in tensors.values() for name, tensor in group.items()}
    state = unpack(documents["state"]["state"], merged)
    return Snapshot(manifest.step, weights, state, documents["config"], manifest.plan)


def verify(path: Path) -> Manifest:
    """Hold every file of the checkpoint directory `path` against its manifest: sizes first, then checksums.

    Raises:
        CheckpointError: naming the first file that is missing, of another size, or of other content.
    """
    manifest = _read_manifest(path)
    for name, written in manifest.files.items():
        file = path / name
        if file.is_symlink() or not file.is_file():
            raise CheckpointError(f"Checkpoint {path} is refused: {name} is missing.")
        if (size := file.stat().st_size) != written.bytes:
            raise CheckpointError(
                f"Checkpoint {path} is refused: {name} has {size} bytes instead of {written.bytes}."
            )
    for name, written in manifest.files.items():
        with (path / name).open("rb") as opened:
            if hashlib.file_digest(opened, "sha256").hexdigest() != written.sha256:
                raise CheckpointError(
                    f"Checkpoint {path} is refused: {name} has changed since it was written (sha256 differs)."
                )
    return manifest


def steps(folder: Path) -> list[int]:
    """Steps with a committed checkpoint, verified or not, ascending."""
    if not folder.is_dir():
        return []
    matches = (_STEP.fullmatch(entry.name) for entry in folder.iterdir() if entry.is_dir())
    return sorted(int(match[1]) for match in matches if match)


def clean(folder: Path) -> None:
    """Remove what a killed save left behind."""
    if folder.is_dir():
        for entry in folder.glob("*.tmp"):
            _log.info("Removing %s, left by a save that was cut off.", entry)
            _remove(entry)


def _write(temporary: Path, snapshot: Snapshot) -> None:
    """Steps 1 and 2 of Note [The commit protocol]."""
    files: dict[str, Written] = {}
    for name, tensors in snapshot.weights.items():
        files[f"{name}.safetensors"] = save_tensors(temporary / f"{name}.safetensors", tensors)
    document: dict[str, Any] = {}
    for name, tree in snapshot.state.items():
        document[name], tensors = pack(tree, name)
        if tensors:
            files[f"{name}.safetensors"] = save_tensors(temporary / f"{name}.safetensors", tensors)
    texts = {"state": {"weights": list(snapshot.weights), "state": document}, "config": dict(snapshot.config)}
    for name, text in texts.items():
        files[f"{name}.json"] = write_file(temporary / f"{name}.json", [json.dumps(text).encode()])
    body = {
        "format": FORMAT,
        "step": snapshot.step,
        "plan": snapshot.plan,
        "versions": _versions(),
        "files": {name: {"bytes": f.bytes, "sha256": f.sha256} for name, f in files.items()},
    }
    write_file(temporary / _MANIFEST, [_sealed(body)])
    _sync_directory(temporary)


def _sealed(body: Mapping[str, Any]) -> bytes:
    """`body` as the one text that `_read_manifest` accepts: canonical JSON that carries its own sha256."""
    plain = {key: value for key, value in body.items() if key != "sha256"}
    seal = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
    return json.dumps({**plain, "sha256": seal}, indent=1, sort_keys=True).encode()


def _read_manifest(path: Path) -> Manifest:
    file = path / _MANIFEST
    if file.is_symlink() or not file.is_file():
        raise CheckpointError(f"Checkpoint {path} is refused: {_MANIFEST} is missing.")
    if file.stat().st_size > _MANIFEST_LIMIT:
        raise CheckpointError(f"Checkpoint {path} is refused: {_MANIFEST} is larger than any real one.")
    raw = file.read_bytes()
    try:
        body = json.loads(raw)
        intact = isinstance(body, dict) and _sealed(body) == raw
    except (ValueError, RecursionError):
        intact = False
    if not intact:
        raise CheckpointError(
            f"Checkpoint {path} is refused: {_MANIFEST} is damaged (it does not match its own checksum)."
        )
    if body["format"] != FORMAT:
        raise CheckpointError(
            f"Checkpoint {path} is refused: its format is {body['format']}; this Penstock reads {FORMAT}. "
            f"Use the version that wrote it: {body['versions'].get('penstock', 'unknown')}."
        )
    if path.name != f"step-{body['step']}":
        raise CheckpointError(f"Checkpoint {path} is refused: its manifest is of step {body['step']}.")
    for name in body["files"]:
        if not _FILE_NAME.fullmatch(name):
            raise CheckpointError(f"Checkpoint {path} is refused: '{name}' is no name of a checkpoint file.")
    files = {name: Written(f["bytes"], f["sha256"]) for name, f in body["files"].items()}
    return Manifest(body["step"], body["plan"], body["versions"], files)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        raise CheckpointError(f"{path} is refused: it is no JSON.") from None


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for package in ("penstock", "numpy", "safetensors"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found


def _require_space(folder: Path, snapshot: Snapshot) -> None:
    """The tensors are nearly all of a checkpoint; 5 % and a megabyte cover headers, JSON and blocks."""
    tensors = [t for group in snapshot.weights.values() for t in group.values()]
    tensors += pack(snapshot.state)[1].values()
    needed = int(1.05 * sum(t.numel() * t.element_size() for t in tensors)) + 1_000_000
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise EnvironmentProblem(
            f"{folder} has {free / 1e6:.0f} MB free; step-{snapshot.step} needs {needed / 1e6:.0f} MB. "
            f"Older checkpoints are untouched: free space, then run the same command again to resume."
        )


def _point_latest(folder: Path, name: str) -> None:
    temporary = folder / f"{_LATEST}.tmp"
    write_file(temporary, [f"{name}\n".encode()])
    temporary.replace(folder / _LATEST)
    _sync_directory(folder)


def _check_latest(folder: Path, name: str) -> None:
    """Mend `latest` where it does not name the checkpoint in use."""
    latest = folder / _LATEST
    if not latest.is_file() or latest.read_bytes() != f"{name}\n".encode():
        _log.warning(
            "%s did not name %s, the newest checkpoint that verifies; it is rewritten.", latest, name
        )
        _point_latest(folder, name)


def _prune(folder: Path, *, newest: int, keep: int) -> None:
    for step in [step for step in steps(folder) if step <= newest][:-keep]:
        _remove(folder / f"step-{step}")


def _set_aside(path: Path) -> None:
    target = path.with_name(f"{path.name}.refused")
    _remove(target)
    path.rename(target)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        # Renamed first, so that a kill half way leaves no directory that looks like a checkpoint.
        doomed = path
        if path.suffix != ".tmp":
            _remove(path.with_name(f"{path.name}.tmp"))
            doomed = path.rename(path.with_name(f"{path.name}.tmp"))
        shutil.rmtree(doomed)
    else:
        path.unlink(missing_ok=True)


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
