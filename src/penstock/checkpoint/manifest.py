"""`manifest.json`: the exact content of a checkpoint directory, protected by a checksum of its own."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from penstock.boundary import manifests
from penstock.boundary.files import quoted, shown
from penstock.boundary.manifests import sealed
from penstock.config.convert import Count, Natural, plain
from penstock.config.load import from_dict
from penstock.disk import Written, digest_file
from penstock.errors import CheckpointError, ConfigError

FORMAT = 2
"""The format that is written and read."""
MANIFEST = "manifest.json"
INDEX = "tensors.json"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,200}\.(safetensors|json)")
_PICKLES = {".metadata", ".distcp", ".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".npy", ".npz"}


@dataclass(frozen=True, slots=True)
class Manifest:
    """The step, the Plan's line, the versions that wrote it, and every file with its size and checksum."""

    step: Natural
    plan: str
    versions: dict[str, str]
    files: dict[str, Written] = field(default_factory=dict)
    world: Count = 1
    format: int = FORMAT

    @property
    def bytes(self) -> int:
        """Total size of all files."""
        return sum(written.bytes for written in self.files.values())


def manifest_text(manifest: Manifest) -> bytes:
    """Content of a manifest's file."""
    return sealed(plain(manifest))


def refusal(path: Path, reason: str) -> CheckpointError:
    """The error that refuses the checkpoint directory `path`; `reason` is a sentence."""
    return CheckpointError(f"Checkpoint {path} is refused: {reason}")


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint directory `path`. Raises CheckpointError if it is missing, damaged, for another
    step or of an unknown format."""
    refuse, file = partial(refusal, path), path / MANIFEST
    if file.is_symlink() or not file.is_file():
        raise refuse(f"{MANIFEST} is missing.{_foreign(path)}")
    body, has_seal = manifests.read_manifest(file, str(refuse(MANIFEST)), error=CheckpointError)
    if not has_seal:
        raise refuse(f"{MANIFEST} is damaged (it has no checksum of its own).")
    if body.get("format") != FORMAT:
        versions = body.get("versions")
        by = versions.get("penstock", "unknown") if isinstance(versions, dict) else "unknown"
        raise refuse(
            f"its format is {shown(str(body.get('format')))}; this Penstock reads {FORMAT}. "
            f"Use the version that wrote it: {shown(str(by))}."
        )
    try:
        manifest = from_dict(Manifest, body)
    except ConfigError as problem:
        raise refuse(f"{MANIFEST} has other entries than a manifest: {problem}") from None
    if path.name != f"step-{manifest.step}":
        raise refuse(f"its manifest is of step {manifest.step}.")
    for name in manifest.files:
        if not _NAME.fullmatch(name):
            raise refuse(f"{quoted(name)} is not the name of a checkpoint file.")
    for name in ("state.json", "config.json", INDEX):
        if name not in manifest.files:
            raise refuse(f"{MANIFEST} lacks {name}.")
    return manifest


def _foreign(path: Path) -> str:
    """A sentence about a file in `path` that looks like a pickle; empty if there is none."""
    entries = path.iterdir() if path.is_dir() else ()
    pickles = [entry.name for entry in entries if not _PICKLES.isdisjoint((entry.suffix, entry.name))]
    if not pickles:
        return ""
    return (
        f" It holds {min(pickles)}, which is read by unpickling, and that can run code. Penstock reads only "
        f"safetensors and JSON. Convert it with the program that wrote it."
    )


def check_sizes(path: Path) -> Manifest:
    """Check that the files of the checkpoint directory `path` exist and have the sizes that its manifest states. Raises
    CheckpointError naming the first file that is missing or has another size, or a pickle among them."""
    manifest = read_manifest(path)
    for name, written in manifest.files.items():
        file = path / name
        if file.is_symlink() or not file.is_file():
            raise refusal(path, f"{name} is missing.")
        if (size := file.stat().st_size) != written.bytes:
            raise refusal(path, f"{name} has {size} bytes instead of {written.bytes}.")
    if foreign := _foreign(path):
        raise CheckpointError(f"Checkpoint {path} is refused.{foreign}")
    return manifest


def verify(path: Path, *, part: tuple[int, int] = (0, 1), keep_cached: bool = True) -> Manifest:
    """Check the files of the checkpoint directory `path` against its manifest: sizes first, then checksums.

    With `part` (i, n) only every n-th file, from the i-th on, is read for its checksum, so that n ranks split the work.
    Each rank checks all sizes. With `keep_cached` false nothing large stays in the page cache. Raises CheckpointError
    naming the first file that is missing, or has another size or content.
    """
    manifest = check_sizes(path)
    # Largest first, so that the ranks' shares are about equal.
    ordered = sorted(manifest.files.items(), key=lambda item: (-item[1].bytes, item[0]))
    for name, written in ordered[part[0] :: part[1]]:
        if digest_file(path / name, keep_cached=keep_cached) != written.sha256:
            raise refusal(path, f"{name} has changed since it was written (sha256 differs).")
    return manifest
