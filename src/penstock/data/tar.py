"""Tar shards in the WebDataset layout, streamed: `name.jpg` and `name.cls` side by side are one sample.

Nothing is extracted to the disk or unpickled. Members are read into memory one after the other, within the bounds of
`boundary/archives.py`, and only those with a listed extension.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from penstock.boundary.archives import LABEL_BYTES, tar_members
from penstock.boundary.files import quoted, shown
from penstock.boundary.images import EXTENSIONS, MAX_BYTES
from penstock.boundary.trees import parse_json
from penstock.errors import DataError

ALLOWED = (*EXTENSIONS, ".cls", ".txt", ".json")
LABEL_KEYS = ("label", "cls", "class")
"""Where a sample has no `.cls`, its class number is looked for under these keys of its `.json`."""
_LONGEST_CLASS = 200
"""Characters of a class name."""


class Sample(NamedTuple):
    """One image in encoded form, its class, and its origin."""

    data: bytes
    label: int | str
    path: str


def read_tar(path: str | os.PathLike[str]) -> Iterator[Sample]:
    """The samples of one shard, in order. Its content decides whether it is plain, gzip, bzip2 or xz.

    Raises DataError for a member that is a link or device, climbs out of the shard, has another extension, is
    too large, or for a sample without image or class; and for a shard that is cut off.
    """
    where = shown(path)
    key: str | None = None
    parts: dict[str, bytes] = {}
    for name, content in tar_members(path, lambda name: _limit(where, name)):
        if _is_hidden(name):
            continue
        now, extension = _split(name)
        if key is not None and now != key:
            yield _sample(where, key, parts)
            parts = {}
        key = now
        if extension in parts:
            raise DataError(f"{where} holds {quoted(name)} twice.")
        parts[extension] = content
        if len(_images(parts)) > 1:  # before more of them fill the memory
            yield _sample(where, key, parts)
    if key is not None:
        yield _sample(where, key, parts)


def _split(name: str) -> tuple[str, str]:
    """Key and extension: as in WebDataset, the key ends at the first dot of the file name."""
    path = PurePosixPath(name)
    stem, _, extension = path.name.partition(".")
    return str(path.parent / stem), f".{extension.lower()}"


def _is_hidden(name: str) -> bool:
    """Whether a member belongs to no sample: macOS puts `._0001.jpg` beside each `0001.jpg`."""
    return any(part[0] == "." for part in PurePosixPath(name).parts)


def _limit(where: str, name: str) -> int:
    """Bytes that a member may have."""
    if _is_hidden(name):
        return MAX_BYTES
    extension = _split(name)[1]
    if extension not in ALLOWED:
        raise DataError(
            f"{where} holds {quoted(name)}, but only {', '.join(ALLOWED)} members are read. Repack the "
            "shard without the others."
        )
    return MAX_BYTES if extension in EXTENSIONS else LABEL_BYTES


def _images(parts: dict[str, bytes]) -> list[str]:
    return [extension for extension in parts if extension in EXTENSIONS]


def _sample(where: str, key: str, parts: dict[str, bytes]) -> Sample:
    """Make a sample of consecutive members with the same key."""
    images = _images(parts)
    if len(images) != 1:
        raise DataError(
            f"The sample {quoted(key)} of {where} has {len(images)} images instead of one; a sample is NAME.jpg "
            "(or .png, .webp, …) beside NAME.cls."
        )
    return Sample(parts[images[0]], _label(where, key, parts), f"{where}:{shown(key + images[0])}")


def _label(where: str, key: str, parts: dict[str, bytes]) -> int | str:
    """A class number, or a class name that the caller turns into a number."""
    value: object = None
    subject = f"The class of sample {quoted(key)} of {where}"
    if ".cls" in parts:
        try:
            value = parts[".cls"].decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise DataError(f"{subject} cannot be read: {error}. Write it as UTF-8.") from error
    elif ".json" in parts:
        table = parse_json(parts[".json"], subject, error=DataError)
        value = next((table[name] for name in LABEL_KEYS if isinstance(table.get(name), str | int)), None)
    if isinstance(value, str) and value:
        if len(value) > _LONGEST_CLASS or not value.isprintable():
            raise DataError(
                f"{subject} is {quoted(value)}; a class has a name of up to {_LONGEST_CLASS} printable characters."
            )
        return int(value) if value.isascii() and value.isdigit() else value
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise DataError(
        f"The sample {quoted(key)} of {where} names no class: put its number into NAME.cls, or into NAME.json "
        "under 'label'."
    )


def shards_of(path: str | os.PathLike[str]) -> list[Path]:
    """The tar files of a folder (or the file itself), sorted by name."""
    root = Path(path)
    if not root.is_dir():
        return [root]
    names = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
    return sorted(entry for entry in root.iterdir() if entry.name.endswith(names) and entry.name[0] != ".")
