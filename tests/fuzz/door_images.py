"""Images: from a file's bytes to pixels, as data sets and `penstock pack` decode them."""

from __future__ import annotations

import struct
import zlib

import numpy as np
from hypothesis import strategies as st

from fuzz.door import Case, Door
from helpers.hostile import seeds as pictures
from penstock.boundary.files import Unreadable
from penstock.data.decode import decode
from penstock.errors import DataError


def _seeds() -> dict[str, bytes]:
    return {f"picture {number}": data for number, data in enumerate(pictures())}


def _enter(name: str, data: bytes) -> None:
    for channels in (1, 3):
        try:
            decode(data, np.empty((32, 32, channels), np.uint8), max_pixels=100_000_000, white=65_535)
        except Unreadable as error:
            raise DataError(f"The image cannot be read: {error}.") from error


def _segment(marker: int, content: bytes) -> bytes:
    return bytes((0xFF, marker)) + struct.pack(">H", len(content) + 2) + content


def _jpegs() -> st.SearchStrategy[bytes]:
    """Segments of a real image in any order, any number of times."""
    base = pictures()[1]
    starts = [
        at
        for at in range(2, len(base) - 1)
        if base[at] == 0xFF and base[at + 1] not in (0, *range(0xD0, 0xD8))
    ]
    pieces = [base[start:end] for start, end in zip(starts, [*starts[1:], len(base)])]
    sizes = st.sampled_from((0, 1, 90, 4000, 16_383, 65_535))
    frame = st.builds(
        lambda marker, height, width, parts: _segment(
            marker, struct.pack(">BHHB", 8, height, width, len(parts)) + b"".join(parts)
        ),
        st.sampled_from((0xC0, 0xC1, 0xC2, 0xC9)),
        sizes,
        sizes,
        st.lists(st.sampled_from((b"\1\x11\0", b"\2\x22\0", b"\3\x44\1", b"\1\0\0")), max_size=4),
    )
    filler = st.sampled_from(
        (b"\xff" * 5000, b"\xff\xe0\0\2" * 11_000, b"\xff\xd0" * 20_000, b"\xff\xda\0\x08\1\1\0\0\0\0" * 500)
    )
    piece = st.one_of(st.sampled_from(pieces), st.sampled_from(pieces), frame, filler, st.binary(max_size=9))
    return st.one_of(
        st.lists(piece, max_size=30).map(lambda found: base[:2] + b"".join(found)),
        st.builds(
            lambda at, more: base[: starts[at]] + more + base[starts[at] :],
            st.integers(0, len(starts) - 1),
            piece,
        ),
        st.integers(1, 3000).map(lambda times: base[:-2] + pieces[-2] * times + base[-2:]),
    )


def _pngs() -> st.SearchStrategy[bytes]:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    sizes = st.sampled_from((0, 1, 7, 120, 4000, 40_000, 1 << 31))
    head = st.builds(
        lambda *fields: chunk(b"IHDR", struct.pack(">IIBBBBB", *fields)),
        sizes,
        sizes,
        st.sampled_from((1, 2, 4, 8, 16, 3)),
        st.sampled_from((0, 2, 3, 4, 6, 1)),
        st.just(0),
        st.just(0),
        st.sampled_from((0, 1)),
    )
    kinds = st.sampled_from(
        (
            b"IDAT",
            b"IDAT",
            b"PLTE",
            b"tRNS",
            b"zTXt",
            b"iTXt",
            b"tEXt",
            b"iCCP",
            b"eXIf",
            b"acTL",
            b"fcTL",
            b"fdAT",
            b"pHYs",
            b"sBIT",
            b"IEND",
        )
    )
    contents = st.one_of(
        st.binary(max_size=40),
        st.sampled_from(
            (
                zlib.compress(bytes(100_000)),
                b"k\0\0" + zlib.compress(bytes(3_000_000)),
                b"k\0\1\0\0\0" + zlib.compress(bytes(9000)),
                b"\x80" + bytes(7),
            )
        ),
    )
    body = st.lists(st.builds(chunk, kinds, contents), max_size=12).map(b"".join)
    many = st.sampled_from((b"", chunk(b"IDAT", b"") * 9000, chunk(b"tEXt", b"a\0b") * 12_000))
    return st.builds(lambda *parts: b"\x89PNG\r\n\x1a\n" + b"".join(parts), head, body, many, body)


def _webps() -> st.SearchStrategy[bytes]:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return kind + struct.pack("<I", len(content)) + content + bytes(len(content) & 1)

    pieces = [data[12:] for data in pictures() if data[:4] == b"RIFF"]
    canvas = st.builds(
        lambda flags, width, height: chunk(
            b"VP8X", struct.pack("<I", flags) + struct.pack("<I", width)[:3] + struct.pack("<I", height)[:3]
        ),
        st.integers(0, 255),
        st.sampled_from((0, 119, 4000, 16_383, (1 << 24) - 1)),
        st.sampled_from((0, 89, 4000, 16_383)),
    )
    part = st.one_of(
        st.sampled_from(pieces),
        canvas,
        st.builds(
            chunk,
            st.sampled_from((b"EXIF", b"ANIM", b"ANMF", b"ALPH", b"ICCP", b"VP8 ", b"VP8L", b"XMP ")),
            st.binary(max_size=60),
        ),
        st.just(chunk(b"XMP ", b"") * 12_000),
    )
    body = st.lists(part, min_size=1, max_size=6).map(b"".join)
    return body.map(lambda raw: b"RIFF" + struct.pack("<I", len(raw) + 4) + b"WEBP" + raw)


def _made() -> st.SearchStrategy[Case]:
    return st.one_of(
        _jpegs().map(lambda data: ("jpeg", data)),
        _pngs().map(lambda data: ("png", data)),
        _webps().map(lambda data: ("webp", data)),
    )


DOOR = Door(
    seeds=_seeds,
    enter=_enter,
    made=_made,
    tokens=(b"\xff\xda", b"\xff\xd9", b"\xff\xc2", b"IDAT", b"VP8X", b"Exif\0\0"),
)
