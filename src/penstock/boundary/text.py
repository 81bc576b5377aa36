"""Text files from outside: line by line, of which none may be endless, plain or compressed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from penstock.boundary.compressed import BROKEN, expanded
from penstock.boundary.files import AnyPath, open_regular

LINE_BYTES = 16 << 20
"""A longer line is not read."""


class Line(NamedTuple):
    """One line without its end; or, in `problem`, why it cannot be read."""

    number: int
    text: str
    problem: str = ""


def read_lines(path: AnyPath, what: str, *, longest: int = LINE_BYTES) -> Iterator[Line]:
    """The lines of the file `path`, in UTF-8 with or without a byte order mark, numbered from 1.

    A line that is too long or no UTF-8 comes with its problem, and the next follows. What breaks the file itself is the
    problem of the last line. At most `longest` bytes are held. Raises DataError for what is no file.
    """
    number = 0
    with open_regular(path, what) as file:
        try:
            with expanded(file) as stream:
                while raw := stream.readline(longest + 1):
                    number += 1
                    if len(raw) > longest:
                        size = len(raw)
                        while raw and not raw.endswith(b"\n"):
                            raw = stream.readline(1 << 16)
                            size += len(raw)
                        yield Line(
                            number, "", f"it has {size:,} bytes, and at most {longest:,} are read of a line"
                        )
                        continue
                    yield _decoded(number, raw)
        except BROKEN as error:
            why = str(error) or "its compressed data are broken"
            yield Line(number + 1, "", f"the file cannot be read further: {why}")


def _decoded(number: int, raw: bytes) -> Line:
    raw = raw.removesuffix(b"\n").removesuffix(b"\r")
    if number == 1:
        raw = raw.removeprefix(b"\xef\xbb\xbf")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        bad = f"byte {error.start + 1:,} is 0x{raw[error.start]:02x}"
        return Line(number, "", f"it is not text in UTF-8: {bad}")
    if "\0" in text:
        return Line(number, "", "it holds the character NUL, so it is no text")
    return Line(number, text)
