"""Text files from outside, plain or compressed, read line by line or element by element; each has a limit."""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from penstock.boundary.archives import BROKEN, expanded
from penstock.boundary.files import AnyPath, open_regular

LINE_BYTES = 16 << 20
"""A longer line is not read."""
_CHUNK = 1 << 16
_MARKS, _IN_QUOTES = re.compile(rb'["\[\]{},]'), re.compile(rb'["\\]')
"""Bytes of JSON that say where an element ends, outside of quotation marks and between them."""


class Line(NamedTuple):
    """One line without its end; or, in `problem`, why it cannot be read."""

    number: int
    text: str
    problem: str = ""


def read_lines(
    path: AnyPath, what: str, *, longest: int = LINE_BYTES, encoding: str = "utf-8"
) -> Iterator[Line]:
    """The lines of the file `path`, with or without a byte order mark, numbered from 1.

    `encoding` is a text encoding that Python knows. A line that is too long or not UTF-8 has its `problem` set, and
    reading goes on. A fault of the file itself is the problem of the last line. At most `longest` bytes are in memory.
    Raises DataError if the path is not a file.
    """
    return _read(path, what, encoding, partial(_lines, longest=longest))


def read_json_texts(
    path: AnyPath, what: str, *, longest: int = LINE_BYTES, encoding: str = "utf-8"
) -> Iterator[Line]:
    """The JSON texts in the file `path`, numbered from 1: its lines, or the elements of a file that is one list. Limits
    and errors as for `read_lines`."""
    head = next(_read(path, what, encoding, _beginning)).text
    split = _elements if head.lstrip("\ufeff \t\r\n").startswith("[") else _lines
    return _read(path, what, encoding, partial(split, longest=longest))


def _read(
    path: AnyPath, what: str, encoding: str, split: Callable[[io.BufferedIOBase], Iterator[Line]]
) -> Iterator[Line]:
    """The parts of a file, decompressed and in UTF-8; the last has the problem that ended reading, if any."""
    number = 0
    with open_regular(path, what) as file:
        try:
            with expanded(file) as stream:
                if not _is_utf8(encoding):
                    stream = io.BufferedReader(_Utf8(stream, encoding))
                for line in split(stream):
                    number = line.number
                    yield line
        except UnicodeError as error:
            why = f"it is not text in {encoding}, as data.encoding says ({error})"
            yield Line(number + 1, "", f"the file cannot be read further: {why}")
        except BROKEN as error:
            why = str(error) or "its compressed data are broken"
            yield Line(number + 1, "", f"the file cannot be read further: {why}")


def _beginning(stream: io.BufferedIOBase) -> Iterator[Line]:
    yield Line(0, stream.read(1 << 12).decode("utf-8", "replace"))


def _lines(stream: io.BufferedIOBase, longest: int) -> Iterator[Line]:
    number = 0
    while raw := stream.readline(longest + 1):
        number, size = number + 1, len(raw)
        if size > longest:
            while raw and not raw.endswith(b"\n"):
                raw = stream.readline(1 << 16)
                size += len(raw)
            yield _too_long(number, size, longest)
        else:
            yield _decoded(number, raw)


def _elements(stream: io.BufferedIOBase, longest: int) -> Iterator[Line]:
    """The elements of a list in JSON, found by its brackets, commas and quotation marks alone."""
    held, number, size, depth = bytearray(), 0, 0, 0
    quotes = escaped = False
    while chunk := stream.read(_CHUNK):
        begin, at = 0, int(escaped)
        while match := (_IN_QUOTES if quotes else _MARKS).search(chunk, at):
            at, mark = match.end(), match[0]
            depth += (mark in (b"[", b"{")) - (mark in (b"]", b"}"))
            if mark == b"\\":
                at += 1
            elif mark == b'"':
                quotes = not quotes
            elif mark == b"[" and depth == 1:  # the list begins
                begin, size = at, 0
                held.clear()
            elif depth == 0 or (mark == b"," and depth == 1):
                part, number = chunk[begin : at - 1], number + 1
                size += len(part)
                whole = bytes(held) + part
                yield _too_long(number, size, longest) if size > longest else _decoded(number, whole.strip())
                begin, size = at, 0
                held.clear()
                if depth == 0:
                    if (chunk[at:] + stream.read(_CHUNK)).strip():
                        yield Line(number + 1, "", "text follows the list that the file begins with")
                    return
        escaped = at > len(chunk)
        size += len(chunk) - begin
        held += chunk[begin : begin + max(0, longest + 1 - len(held))]
    yield Line(
        number + 1, "", "the list that the file begins with does not end: the file is cut off, or no JSON"
    )


def _too_long(number: int, size: int, longest: int) -> Line:
    return Line(number, "", f"it has {size:,} bytes, and at most {longest:,} are read of a line")


def _decoded(number: int, raw: bytes) -> Line:
    raw = raw.removesuffix(b"\n").removesuffix(b"\r")
    if number == 1:
        raw = raw.removeprefix(b"\xef\xbb\xbf")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return Line(number, "", f"it is not text in UTF-8: {_other_encoding(number, raw, error.start)}")
    if "\0" in text:
        hint = (
            ", as UTF-16 does (data.encoding utf-16-le reads that)"
            if text.count("\0") > len(text) / 4
            else ""
        )
        return Line(number, "", f"it holds the character NUL{hint}, so it is no text")
    return Line(number, text)


def _other_encoding(number: int, raw: bytes, place: int) -> str:
    """Name the byte that is not UTF-8, and the encoding that the file probably has."""
    if number == 1 and raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "it begins as UTF-16 does; set data.encoding to utf-16"
    bad = f"byte {place + 1:,} is 0x{raw[place]:02x}"
    letter = raw[place : place + 1].decode("cp1252", "replace")
    if not letter.isprintable() or letter == "\ufffd":
        return bad
    return f"{bad}, which is {letter} in Latin-1; if that is right, set data.encoding to latin-1 or cp1252"


def _is_utf8(encoding: str) -> bool:
    return codecs.lookup(encoding).name in ("utf-8", "utf-8-sig")


class _Utf8(io.RawIOBase):
    """A stream of bytes in another encoding, as UTF-8."""

    def __init__(self, stream: io.BufferedIOBase, encoding: str) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder(encoding)()
        self._held = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Raises UnicodeDecodeError for bytes that the encoding does not have."""
        while not self._held:
            read = self._stream.read(_CHUNK)
            self._held = self._decoder.decode(read, not read).encode("utf-8")
            if not read:
                break
        piece, self._held = self._held[: len(buffer)], self._held[len(buffer) :]
        buffer[: len(piece)] = piece
        return len(piece)
