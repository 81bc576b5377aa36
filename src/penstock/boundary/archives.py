"""Files and tar archives from outside, streamed: plain, or compressed with gzip, bzip2 or xz, recognised by their
content. A file that expands far more than training data does is refused.

Only a bounded part of an archive is ever in memory, counted in decompressed bytes. Python's tarfile is not used: it
holds names, extended headers and maps of holes of any size, and up to Python 3.11.9 its search in extended headers
takes quadratic time. Archives of samples need less: regular files with names, as POSIX (ustar, pax) and GNU tar write
them.
"""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NoReturn

from penstock.boundary.files import AnyPath, Unreadable, open_regular, quoted, shown
from penstock.errors import DataError

BROKEN = (Unreadable, OSError, EOFError, zlib.error, lzma.LZMAError)
"""Exceptions that reading broken compressed data raises."""

_FREE_BYTES, _RATIO = 64 << 20, 100
"""Images hardly compress, and text about tenfold. A file that expands 100-fold beyond its first 64 MB is refused."""
_XZ_BYTES = 128 << 20
"""Memory that unpacking xz may ask for; its greatest preset needs 65 MB."""
_PIECE = 1 << 16


def expanded(file: BinaryIO) -> io.BufferedReader:
    """The content of a file, decompressed if it is compressed. Reading may raise the exceptions in `BROKEN`."""
    head = file.read(6)
    file.seek(0)
    for magic, decoder in _DECODERS.items():
        if head.startswith(magic):
            return io.BufferedReader(_Expander(file, decoder), _PIECE)
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        raise Unreadable(
            "it is compressed with zstd, but only gzip, bzip2 and xz are read; unpack it with `unzstd`"
        )
    return io.BufferedReader(file, _PIECE)  # type: ignore[arg-type]  # it is raw


class _Gzip:
    """zlib's decompressor with the interface of bz2's and lzma's."""

    def __init__(self) -> None:
        self._decoder = zlib.decompressobj(zlib.MAX_WBITS | 16)
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._decoder.eof

    @property
    def unused_data(self) -> bytes:
        return self._decoder.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        out = self._decoder.decompress(self._decoder.unconsumed_tail + data, max_length)
        self.needs_input = len(out) < max_length and not self._decoder.unconsumed_tail
        return out


_DECODERS: dict[bytes, Callable[[], Any]] = {
    b"\x1f\x8b": _Gzip,
    b"BZh": bz2.BZ2Decompressor,
    b"\xfd7zXZ\0": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_BYTES),
}


class _Expander(io.RawIOBase):
    """The decompressed content of a file as a stream. Several compressed parts may follow each other, as from pigz."""

    def __init__(self, file: BinaryIO, make: Callable[[], Any]) -> None:
        self._file = file
        self._make = make
        self._decoder = make()
        self._taken = self._given = self._parts = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            if self._decoder.eof:
                rest = (self._decoder.unused_data or self._next()).lstrip(b"\0")
                if not rest:
                    return 0
                self._parts += 1
                if self._parts > 1000 + self._given // _BLOCK:
                    raise Unreadable("it consists of thousands of compressed parts that hold next to nothing")
                self._decoder = self._make()
            else:
                rest = self._next() if self._decoder.needs_input else b""
                if not rest and self._decoder.needs_input:
                    raise Unreadable("it ends inside its compressed data")
            data = self._decoder.decompress(rest, len(buffer))
            self._given += len(data)
            if self._given > _FREE_BYTES + _RATIO * self._taken:
                raise Unreadable(
                    f"its first {self._taken:,} bytes expand to more than {self._given:,}, as only a zip bomb does"
                )
            if data:
                buffer[: len(data)] = data
                return len(data)

    def _next(self) -> bytes:
        data = self._file.read(_PIECE)
        self._taken += len(data)
        return data


LABEL_BYTES = 1 << 16
"""Members that may be larger are content; all others are metadata, such as labels."""

_BLOCK = 512
_NAME_BYTES = 4096
_HEADER_BYTES = 1 << 16
_RECORDS = 200
_ABOUT_BYTES = 8 << 20
"""Most bytes of headers, folders and metadata between two members with content."""

_OTHERS = {
    b"1": "a link", b"2": "a link", b"3": "a device", b"4": "a device", b"6": "a pipe", b"S": "a file with holes",
    b"M": "a part of a file", b"V": "a label of a volume", b"D": "a list of files",
}  # fmt: skip


def tar_members(path: AnyPath, limit: Callable[[str], int]) -> Iterator[tuple[str, bytes]]:
    """Name and content of each regular file in the tar archive `path`, in order.

    `limit(name)` returns the most bytes that this member may have, before they are read, or raises DataError to refuse
    it. Raises DataError for members that are not regular files or lead out of the archive,
    and for an archive that is truncated, broken, or holds more metadata than is reasonable.
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
        name, size = "", -1  # from an extended header, for the member after it
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
        """The kind, name and size in the next header, or None at the end."""
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
