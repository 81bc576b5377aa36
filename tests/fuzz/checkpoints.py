"""A folder of two checkpoints, whose newer one is changed: what the doors of checkpoints share."""

from __future__ import annotations

import functools
import hashlib
import logging
import shutil
from pathlib import Path

from penstock.boundary.manifests import sealed

STEP = Path("steps/step-2")


def _save_steps(folder: Path) -> None:
    from helpers.checkpoints import Trainee
    from penstock import checkpoint

    trainee = Trainee("fsdp")
    for _ in range(2):
        trainee.train(1)
        checkpoint.save(folder, trainee.snapshot())


@functools.cache
def steps() -> dict[str, bytes]:
    """All files of both steps by path; of two ranks, so that tensors are in parts."""
    from helpers.spawn import spawn

    logging.disable()  # what is refused is logged
    spawn(_save_steps, 2, STEP.parent.resolve())
    files = sorted(path for path in STEP.parent.rglob("*") if path.is_file())
    return {str(path.relative_to(STEP.parent)): path.read_bytes() for path in files}


@functools.cache
def newer() -> dict[str, bytes]:
    """The files of the newer step by name."""
    return {name.partition("/")[2]: data for name, data in steps().items() if name.startswith(STEP.name)}


def lay_out(changed: str, data: bytes) -> None:
    """Write both steps, with other content in one file of the newer."""
    shutil.rmtree(STEP.parent, ignore_errors=True)
    for name, content in steps().items():
        path = STEP.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if path == STEP / changed else content)


def reseal(name: str, manifest: dict) -> None:
    """Make the manifest of the newer step say what its file `name` is now."""
    data = (STEP / name).read_bytes()
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    body = {**manifest, "files": {**manifest["files"], name: entry}}
    (STEP / "manifest.json").write_bytes(sealed(body))
