"""Tar archives from outside, streamed: plain, or compressed with gzip, bzip2 or xz, which their content tells.

Only a bounded part of an archive is ever held, counted in bytes expanded. Python's tarfile is not used: it holds names,
extended headers and maps of holes of any size, and up to Python 3.11.9 its search in extended headers takes quadratic
time. What archives of samples need is less: regular files with names, as POSIX (ustar, pax) and GNU tar write them.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import NoReturn

from penstock.boundary.compressed import BROKEN, expanded
from penstock.boundary.files import AnyPath, Unreadable, open_regular, quoted, shown
from penstock.errors import DataError

LABEL_BYTES = 1 << 16
"""A larger member is content, for which an archive is read; a smaller one is metadata."""

_BLOCK = 512
_NAME_BYTES = 4096
_HEADER_BYTES = 1 << 16
_RECORDS = 200
_ABOUT_BYTES = 8 << 20
"""Headers, folders and small members between two members with content."""

_OTHERS = {
    b"1": "a link", b"2": "a link", b"3": "a device", b"4": "a device", b"6": "a pipe", b"S": "a file with holes",
    b"M": "a part of a file", b"V": "a label of a volume", b"D": "a list of files",
}  # fmt: skip


def tar_members(path: AnyPath, limit: Callable[[str], int]) -> Iterator[tuple[str, bytes]]:
    """Name and content of each regular file in the tar archive `path`, in order.

    `limit` is asked how many bytes a member of that name may have, before these are read; it raises DataError for one
    that is not wanted. Raises DataError for members that are anything else, or lead out of the archive, and for an
    archive that is cut off, broken, or holds more data about its members than reasonable.
    """
    with open_regular(path, "The tar shard") as file:
        try:
            with expanded(file) as stream:
                yield from _Reader(stream, path, limit).members()
        except BROKEN as error:
            raise DataError(
                f"The tar shard {shown(path)} cannot be read to its end: {error}. Download it again."
            ) from error


class _Reader:
    """The members of one archive. Formats: POSIX.1-2017, pax, "ustar Interchange Format"; GNU tar manual, "Basic Tar
    Format".
    """

    def __init__(self, stream: io.BufferedReader, path: AnyPath, limit: Callable[[str], int]) -> None:
        self._stream = stream
        self._path = path
        self._limit = limit
        self._about = 0
        """Bytes since the last member with content."""

    def members(self) -> Iterator[tuple[str, bytes]]:
        name, size = "", -1  # where they come before the header that they belong to
        while (header := self._header()) is not None:
            kind, plain_name, plain_size = header
            if kind in (b"L", b"K"):
                word = self._take(plain_size, _NAME_BYTES, "a name").rstrip(b"\0")
                name = _text(word) if kind == b"L" else name
                continue
            if kind in (b"x", b"X", b"g"):
                records = _records(self._take(plain_size, _HEADER_BYTES, "an extended header"))
                if any(key.startswith(b"GNU.sparse") for key in records):
                    self._refuse(name or plain_name, "a file with holes")
                if kind == b"g":
                    if records.keys() & {b"path", b"size"}:
                        raise Unreadable("it gives all members one name or size")
                    continue
                name = _text(records[b"path"]) if b"path" in records else name
                size = _decimal(records[b"size"]) if b"size" in records else size
                continue
            name, size = name or plain_name, plain_size if size < 0 else size
            is_folder = kind == b"5" or (kind == b"\0" and name.endswith("/"))
            if not is_folder:
                if kind not in (b"0", b"\0", b"7"):
                    self._refuse(name, _OTHERS.get(kind, "of an unknown kind"))
                yield name, self._content(name, size)
            name, size = "", -1
        if name or size >= 0:
            raise Unreadable("it ends inside a header")

    def _header(self) -> tuple[bytes, str, int] | None:
        """Kind, name and size that the next header gives, or None at the end."""
        block = self._stream.read(_BLOCK)
        if not block or block.count(0) == _BLOCK:
            return None
        if len(block) < _BLOCK:
            raise Unreadable("it ends inside a header")
        self._count(_BLOCK)
        checksum = _number(block[148:156])
        sum_of_bytes = sum(block) - sum(block[148:156]) + 8 * 32
        if checksum != sum_of_bytes:  # some old writers took bytes to have signs
            signed = sum_of_bytes - 256 * sum(byte > 127 for byte in block[:148] + block[156:])
            if checksum != signed:
                raise Unreadable("it is no tar archive, or one of its headers is broken")
        name = block[:100].partition(b"\0")[0]
        if block[257:263] == b"ustar\0" and block[345] != 0:
            name = block[345:500].partition(b"\0")[0] + b"/" + name
        return block[156:157], _text(name), _number(block[124:136])

    def _content(self, name: str, size: int) -> bytes:
        parts = name.split("/")
        if name.startswith("/") or ".." in parts or "\\" in name or "\0" in name:
            raise DataError(
                f"{shown(self._path)} holds {quoted(name)}, a path that leads out of the shard. Do not trust it."
            )
        limit = self._limit(name)
        if size > limit:
            raise DataError(
                f"{shown(self._path)} holds {quoted(name)} of {size:,} bytes, and at most {limit:,} are read. "
                "Repack the shard without it."
            )
        if limit > LABEL_BYTES:
            self._about = 0
        else:
            self._count(size)
        return self._read(size)

    def _take(self, size: int, limit: int, part: str) -> bytes:
        if size > limit:
            raise Unreadable(f"it has {part} of {size:,} bytes, and at most {limit:,} are read")
        self._count(size)
        return self._read(size)

    def _read(self, size: int) -> bytes:
        data = self._stream.read(size)
        if len(data) < size or len(self._stream.read(-size % _BLOCK)) < -size % _BLOCK:
            raise Unreadable("it ends inside a member")
        return data

    def _count(self, size: int) -> None:
        self._about += size
        if self._about > _ABOUT_BYTES:
            raise Unreadable(
                f"it holds more than {_ABOUT_BYTES:,} bytes of headers and labels without an image"
            )

    def _refuse(self, name: str, kind: str) -> NoReturn:
        raise DataError(
            f"{shown(self._path)} holds {quoted(name)}, which is {kind}. Only plain files are read; repack the shard."
        )


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _number(field: bytes) -> int:
    """Octal digits, or in GNU's form for large numbers 0x80 and a binary number."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.partition(b"\0")[0].strip()
    if not digits:
        return 0
    if not digits.isdigit() or b"8" in digits or b"9" in digits:
        raise Unreadable("it is no tar archive, or one of its headers is broken")
    return int(digits, 8)


def _decimal(digits: bytes) -> int:
    if not digits.isdigit() or len(digits) > 18:
        raise Unreadable(f"an extended header gives the size {quoted(_text(digits))}")
    return int(digits)


def _records(data: bytes) -> dict[bytes, bytes]:
    """The records of an extended header: each is `LENGTH KEY=VALUE` and an end of line, of LENGTH bytes in all."""
    records: dict[bytes, bytes] = {}
    at, count = 0, 0
    while at < len(data) and data[at] != 0:
        space = data.find(b" ", at, at + 20)
        end = at + _decimal(data[at:space]) if space > at else 0
        key, equals, value = data[space + 1 : end - 1].partition(b"=")
        if not space < end <= len(data) or data[end - 1] != 0x0A or not equals:
            raise Unreadable("one of its extended headers is broken")
        records[key] = value
        at, count = end, count + 1
        if count > _RECORDS:
            raise Unreadable(f"an extended header has more than {_RECORDS} records")
    if len(records.get(b"path", b"")) > _NAME_BYTES:
        raise Unreadable(f"it has a name of more than {_NAME_BYTES:,} bytes")
    return records
