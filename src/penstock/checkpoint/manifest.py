"""`manifest.json`: what a checkpoint directory must hold, bit for bit, sealed by its own checksum."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.config.convert import Count, plain
from penstock.config.load import from_dict
from penstock.disk import Written, digest_file
from penstock.errors import CheckpointError, ConfigError

FORMAT = 2
"""1: one process, no index of tensors. 2: any number of ranks. Both are read; 2 is written."""
MANIFEST = "manifest.json"
_LIMIT = 64_000_000
_SUFFIXES = (".safetensors", ".json")
_PICKLES = {".metadata", ".distcp", ".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".npy", ".npz"}


@dataclass(frozen=True, slots=True)
class Manifest:
    """The step, the Plan's line, the versions that wrote it, and every file with its size and checksum."""

    step: int
    plan: str
    versions: dict[str, str]
    files: dict[str, Written] = field(default_factory=dict)
    world: Count = 1
    format: int = FORMAT

    @property
    def bytes(self) -> int:
        """Size of all files together."""
        return sum(written.bytes for written in self.files.values())


def manifest_text(manifest: Manifest) -> bytes:
    """What is written."""
    return sealed(plain(manifest))


def sealed(body: Mapping[str, Any]) -> bytes:
    """`body` as the only text that `read_manifest` accepts: canonical JSON with its own sha256."""
    unsealed = {key: value for key, value in body.items() if key != "sha256"}
    seal = hashlib.sha256(json.dumps(unsealed, sort_keys=True).encode()).hexdigest()
    return json.dumps({**unsealed, "sha256": seal}, indent=1, sort_keys=True).encode()


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint directory `path`.

    Raises:
        CheckpointError: it is missing, damaged, of another step or of an unknown format.
    """

    def refuse(reason: str) -> CheckpointError:
        return CheckpointError(f"Checkpoint {path} is refused: {reason}")

    file = path / MANIFEST
    if file.is_symlink() or not file.is_file():
        raise refuse(f"{MANIFEST} is missing.{_foreign(path)}")
    if file.stat().st_size > _LIMIT:
        raise refuse(f"{MANIFEST} is too large to be a manifest.")
    raw = file.read_bytes()
    try:
        body = json.loads(raw)
        intact = isinstance(body, dict) and sealed(body) == raw
    except (ValueError, RecursionError):
        intact = False
    if not intact:
        raise refuse(f"{MANIFEST} is damaged (it does not match its own checksum).")
    if body.get("format") not in (1, FORMAT):
        versions = body.get("versions")
        by = versions.get("penstock", "unknown") if isinstance(versions, dict) else "unknown"
        raise refuse(
            f"its format is {body.get('format')}; this Penstock reads 1 to {FORMAT}. "
            f"Use the version that wrote it: {by}."
        )
    try:
        manifest = from_dict(Manifest, {name: value for name, value in body.items() if name != "sha256"})
    except ConfigError as problem:
        raise refuse(f"{MANIFEST} has other entries than a manifest: {problem}") from None
    if path.name != f"step-{manifest.step}":
        raise refuse(f"its manifest is of step {manifest.step}.")
    for name in manifest.files:
        stem = name.removesuffix(".safetensors").removesuffix(".json")
        if not name.endswith(_SUFFIXES) or not stem.replace("_", "").replace("-", "").isalnum():
            raise refuse(f"'{name}' is not the name of a checkpoint file.")
    return manifest


def _foreign(path: Path) -> str:
    """A sentence about a file in `path` that looks like a pickle; empty where there is none."""
    entries = path.iterdir() if path.is_dir() else ()
    found = [entry.name for entry in entries if not _PICKLES.isdisjoint((entry.suffix, entry.name))]
    if not found:
        return ""
    return (
        f" It holds {min(found)}, which is read by unpickling, and that can run code. Penstock reads only safetensors "
        f"and JSON. Convert it with the program that wrote it."
    )


def check_sizes(path: Path) -> Manifest:
    """Check that the files of the checkpoint directory `path` exist and have the sizes that its manifest says.

    Raises:
        CheckpointError: naming the first file that is missing or of another size, or a pickle beside them.
    """
    manifest = read_manifest(path)
    for name, written in manifest.files.items():
        file = path / name
        if file.is_symlink() or not file.is_file():
            raise CheckpointError(f"Checkpoint {path} is refused: {name} is missing.")
        if (size := file.stat().st_size) != written.bytes:
            raise CheckpointError(
                f"Checkpoint {path} is refused: {name} has {size} bytes instead of {written.bytes}."
            )
    if foreign := _foreign(path):
        raise CheckpointError(f"Checkpoint {path} is refused.{foreign}")
    return manifest


def verify(path: Path, *, part: tuple[int, int] = (0, 1), keep_cached: bool = True) -> Manifest:
    """Check the files of the checkpoint directory `path` against its manifest: sizes first, then checksums.

    With `part` (i, n) only every n-th file's checksum is taken, from the i-th on, so that n ranks share the work. Each
    rank checks all sizes. With `keep_cached` false nothing large stays in the page cache.

    Raises:
        CheckpointError: naming the first file that is missing, of another size, or of other content.
    """
    manifest = check_sizes(path)
    # The largest first, so that the ranks' shares are about equal.
    ordered = sorted(manifest.files.items(), key=lambda item: (-item[1].bytes, item[0]))
    for name, written in ordered[part[0] :: part[1]]:
        if digest_file(path / name, keep_cached=keep_cached) != written.sha256:
            raise CheckpointError(
                f"Checkpoint {path} is refused: {name} has changed since it was written (sha256 differs)."
            )
    return manifest
