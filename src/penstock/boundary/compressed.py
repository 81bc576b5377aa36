"""Compressed files from outside, read as what they expand to: gzip, bzip2 or xz, which their content tells.

Only a bounded part is ever held, and what expands far more than data for training does is refused.
"""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO

from penstock.boundary.files import Unreadable

BROKEN = (Unreadable, OSError, EOFError, zlib.error, lzma.LZMAError)
"""Exceptions that reading broken compressed data raises."""

_FREE_BYTES, _RATIO = 64 << 20, 100
"""Samples hardly shrink, and text some ten times. A file that expands 100 times beyond its first 64 MB is a bomb."""
_XZ_BYTES = 128 << 20
"""Memory that unpacking xz may ask for; its greatest preset needs 65 MB."""
_PIECE = 1 << 16
_BLOCK = 512


def expanded(file: BinaryIO) -> io.BufferedReader:
    """The content of a file, decompressed if it is compressed. Reading may raise Unreadable, OSError, EOFError,
    zlib.error or lzma.LZMAError, all of which `BROKEN` names.
    """
    head = file.read(6)
    file.seek(0)
    for magic, decoder in _DECODERS.items():
        if head.startswith(magic):
            return io.BufferedReader(_Expander(file, decoder), _PIECE)
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        raise Unreadable(
            "it is compressed with zstd; unpack it with `unzstd`, as gzip, bzip2 and xz are read"
        )
    return io.BufferedReader(file, _PIECE)  # type: ignore[arg-type]  # it is raw


class _Gzip:
    """zlib's decompressor with the interface of those of bz2 and lzma."""

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
    """A compressed file, read as what it expands to. Several compressed parts may follow each other, as from pigz."""

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
                    f"its first {self._taken:,} bytes expand to more than {self._given:,}, as nothing but a bomb does"
                )
            if data:
                buffer[: len(data)] = data
                return len(data)

    def _next(self) -> bytes:
        data = self._file.read(_PIECE)
        self._taken += len(data)
        return data
