"""Tar shards in the WebDataset layout, streamed: `name.jpg` and `name.cls` side by side are one sample.

Nothing is extracted to the disk or unpickled. Members are read into memory one after the other. Only regular files are
read, with a listed extension and a plain relative path.
"""

from __future__ import annotations

import json
import lzma
import os
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from penstock.data.header import EXTENSIONS
from penstock.errors import DataError

ALLOWED = (*EXTENSIONS, ".cls", ".txt", ".json")
LABEL_KEYS = ("label", "cls", "class")
"""Where a sample has no `.cls`, its class number is looked for under these keys of its `.json`."""
MAX_MEMBER_BYTES = 1 << 28
"""A member above 256 MB is refused before it is read."""


class Sample(NamedTuple):
    """One image as stored, its class, and where it came from."""

    data: bytes
    label: int | str
    path: str


def read_tar(path: str | os.PathLike[str]) -> Iterator[Sample]:
    """The samples of one shard, in order. Whether it is plain, gzip, bzip2 or xz is told by its content.

    Raises DataError for a member that is a link or device, climbs out of the shard, has another extension, is
    too large, or for a sample without image or class; and for a shard that is cut off.
    """
    try:
        with tarfile.open(path, "r|*") as shard:
            yield from _group(path, _members(path, shard))
    except (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        raise DataError(
            f"The tar shard {path} cannot be read to its end: {error}. Download it again."
        ) from error


def _members(path: str | os.PathLike[str], shard: tarfile.TarFile) -> Iterator[tuple[str, str, bytes]]:
    """(key, extension, content) of each member."""
    for member in shard:
        if member.isdir():
            continue
        name = PurePosixPath(member.name)
        if not member.isreg():
            raise DataError(
                f"{path} holds {member.name!r}, which is a link or device. Only plain files are read."
            )
        if name.is_absolute() or ".." in name.parts or "\\" in member.name or "\0" in member.name:
            raise DataError(
                f"{path} holds {member.name!r}, a path that leads out of the shard. Do not trust it."
            )
        # WebDataset: the key ends at the first dot of the file name, and what follows is the extension.
        stem, _, extension = name.name.partition(".")
        extension = f".{extension.lower()}"
        if extension not in ALLOWED:
            raise DataError(
                f"{path} holds {member.name!r}, but only {', '.join(ALLOWED)} members are read. Repack the "
                "shard without the others."
            )
        if member.size > MAX_MEMBER_BYTES:
            raise DataError(f"{path} holds {member.name!r} of {member.size:,} bytes, more than 256 MB.")
        content = shard.extractfile(member)
        assert content is not None  # for regular files
        yield str(name.parent / stem), extension, content.read()


def _group(path: str | os.PathLike[str], members: Iterator[tuple[str, str, bytes]]) -> Iterator[Sample]:
    """Adjacent members with the same key form a sample."""
    key: str | None = None
    parts: dict[str, bytes] = {}
    for now, extension, content in members:
        if key is not None and now != key:
            yield _sample(path, key, parts)
            parts = {}
        key = now
        if extension in parts:
            raise DataError(f"{path} holds {key}{extension} twice.")
        parts[extension] = content
    if key is not None:
        yield _sample(path, key, parts)


def _sample(path: str | os.PathLike[str], key: str, parts: dict[str, bytes]) -> Sample:
    images = [extension for extension in parts if extension in EXTENSIONS]
    if len(images) != 1:
        raise DataError(
            f"The sample {key!r} of {path} has {len(images)} images instead of one; a sample is {key}.jpg "
            f"(or .jpeg, .png, .webp) beside {key}.cls."
        )
    return Sample(parts[images[0]], _label(path, key, parts), f"{path}:{key}{images[0]}")


def _label(path: str | os.PathLike[str], key: str, parts: dict[str, bytes]) -> int | str:
    """A class number, or a class name to which the caller gives a number."""
    try:
        if ".cls" in parts:
            text = parts[".cls"].decode("utf-8").strip()
            if text:
                return int(text) if text.isascii() and text.isdigit() else text
        elif ".json" in parts:
            table = json.loads(parts[".json"])
            for name in LABEL_KEYS:
                value = table.get(name) if isinstance(table, dict) else None
                if isinstance(value, str) or (
                    isinstance(value, int) and not isinstance(value, bool) and value >= 0
                ):
                    return value
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"The class of sample {key!r} of {path} cannot be read: {error}.") from error
    raise DataError(
        f"The sample {key!r} of {path} names no class: put its number into {key}.cls, or into {key}.json under "
        "'label'."
    )


def shards_of(path: str | os.PathLike[str]) -> list[Path]:
    """The tar files of a folder (or the file itself), sorted by name."""
    root = Path(path)
    if root.is_file():
        return [root]
    names = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
    return sorted(entry for entry in root.iterdir() if entry.is_file() and entry.name.endswith(names))
