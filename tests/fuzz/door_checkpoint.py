"""Checkpoints whose bytes were changed: every change is refused by name, and the step before is used.

Under a right seal, documents and headers are changed and every checksum is made right. What is called whole must load.
What is refused must be refused by all alike.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from fuzz.doors import Door
from fuzz.mutate import altered_files
from penstock.boundary.manifests import sealed
from penstock.errors import CheckpointError

STEP = Path("steps/step-2")


def _save_steps(folder: Path) -> None:
    from helpers.checkpoints import Trainee
    from penstock import checkpoint

    trainee = Trainee("fsdp")
    for _ in range(2):
        trainee.train(1)
        checkpoint.save(folder, trainee.snapshot())


@functools.cache
def _steps() -> dict[str, bytes]:
    """All files of two steps by path; of two ranks, so that tensors are in parts."""
    from helpers.spawn import spawn

    logging.disable()  # what is refused is logged
    spawn(_save_steps, 2, STEP.parent.resolve())
    files = sorted(path for path in STEP.parent.rglob("*") if path.is_file())
    return {str(path.relative_to(STEP.parent)): path.read_bytes() for path in files}


@functools.cache
def _newer() -> dict[str, bytes]:
    """The files of the newer step by name."""
    return {name.partition("/")[2]: data for name, data in _steps().items() if name.startswith(STEP.name)}


def _lay_out(changed: str, data: bytes) -> None:
    """Write both steps, with other content in one file of the newer."""
    shutil.rmtree(STEP.parent, ignore_errors=True)
    for name, content in _steps().items():
        path = STEP.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if path == STEP / changed else content)


def _enter(name: str, data: bytes) -> None:
    from penstock import checkpoint

    _lay_out(name, data)
    stored = checkpoint.find(STEP.parent)
    assert stored is not None
    assert stored.step == (2 if data == _newer()[name] else 1), "a change went unnoticed"
    if stored.step == 1:
        _lay_out(name, data)
    checkpoint.load(STEP)


def _enter_sealed(name: str, data: bytes) -> None:
    from penstock import checkpoint

    _lay_out(name, data)
    with contextlib.suppress(ValueError, RecursionError):  # then no seal could be right
        body = json.loads(data if name == "manifest.json" else _newer()["manifest.json"])
        if name != "manifest.json":
            body["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        (STEP / "manifest.json").write_bytes(sealed(body) if isinstance(body, dict) else data)
    refusal = _refusal(lambda: checkpoint.open_verified(STEP).load())
    quick = _refusal(lambda: checkpoint.open_verified(STEP, checksums=False))
    assert quick == refusal or (quick is None and "sha256 differs" in str(refusal)), (quick, refusal)
    stored = checkpoint.find(STEP.parent)
    assert stored is not None
    assert stored.step == (2 if refusal is None else 1)
    stored.load()
    if refusal is not None:
        raise CheckpointError(refusal)


def _refusal(read: Callable[[], object]) -> str | None:
    try:
        read()
    except CheckpointError as problem:
        return str(problem)
    return None


DOORS = {
    "checkpoint": Door(seeds=_newer, enter=_enter),
    "sealed": Door(
        seeds=_newer, enter=_enter_sealed, made=lambda: altered_files(_newer()),
        tokens=(b"Infinity", b'{"$tensor": "a"}', b'{"$items": [[[], 1]]}', b'{"$array": "a", "dtype": "object"}',
                b"[1,"),
    ),
}  # fmt: skip
