"""Images: a file's bytes, and a folder of whatever lies in it, as data sets and `penstock pack` decode them."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import logging
import os
import shutil
import struct
import zlib
from pathlib import Path
from unittest import mock

import numpy as np
from hypothesis import strategies as st
from PIL import Image

from fuzz.doors import Case, Door
from helpers.images import encoded, smooth
from penstock.boundary.files import Unreadable
from penstock.config.run import DataConfig
from penstock.data import decode as decoding
from penstock.data import open_source
from penstock.data.packing import Packing, pack_source
from penstock.errors import DataError, PenstockError


@functools.cache
def pictures() -> list[bytes]:
    """Small valid images of every kind that the decoder takes."""
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (9, 12, 3), dtype=np.uint8))
    photo = coarse.resize((120, 90), Image.Resampling.BICUBIC)
    alpha = photo.copy()
    alpha.putalpha(128)
    wide = Image.fromarray((np.arange(90 * 120, dtype=np.uint16) * 6).reshape(90, 120))
    exif = Image.Exif()
    exif[0x112] = 6

    def saved(image: Image.Image, kind: str, **options: object) -> bytes:
        buffer = io.BytesIO()
        image.save(buffer, kind, **options)
        return buffer.getvalue()

    return [
        saved(photo, "JPEG"),
        saved(photo, "JPEG", progressive=True, exif=exif.tobytes()),
        saved(photo, "JPEG", subsampling="4:4:4", restart_marker_rows=1),
        saved(photo.convert("L"), "JPEG"),
        saved(photo.convert("CMYK"), "JPEG"),
        saved(photo, "PNG", exif=exif.tobytes()),
        saved(alpha, "PNG"),
        saved(photo.quantize(16), "PNG", transparency=3),
        saved(photo.convert("1"), "PNG"),
        saved(wide, "PNG"),
        saved(photo, "WEBP"),
        saved(alpha, "WEBP", exif=exif.tobytes()),
        saved(photo, "WEBP", lossless=True),
        saved(photo, "WEBP", save_all=True, append_images=[photo.rotate(90)]),
    ]


def _seeds() -> dict[str, bytes]:
    return {f"picture {number}": data for number, data in enumerate(pictures())}


def _enter(name: str, data: bytes) -> None:
    """By the fast decoders and without them."""
    refused = None
    for decoder, channels in itertools.product((decoding.fast_path, lambda: None), (1, 3)):
        with mock.patch.object(decoding, "fast_path", decoder):
            try:
                out = np.empty((32, 32, channels), np.uint8)
                decoding.decode(data, out, max_pixels=100_000_000, white=65_535)
            except Unreadable as error:
                refused = error
    if refused is not None:
        raise DataError(f"The image cannot be read: {refused}.") from refused


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
        sizes, sizes, st.sampled_from((1, 2, 4, 8, 16, 3)), st.sampled_from((0, 2, 3, 4, 6, 1)), st.just(0), st.just(0),
        st.sampled_from((0, 1)),
    )  # fmt: skip
    kinds = st.sampled_from(
        (b"IDAT", b"IDAT", b"PLTE", b"tRNS", b"zTXt", b"iTXt", b"tEXt", b"iCCP", b"eXIf", b"acTL", b"fcTL", b"fdAT",
         b"pHYs", b"sBIT", b"IEND")
    )  # fmt: skip
    contents = st.one_of(
        st.binary(max_size=40),
        st.sampled_from(
            (zlib.compress(bytes(100_000)), b"k\0\0" + zlib.compress(bytes(3_000_000)),
             b"k\0\1\0\0\0" + zlib.compress(bytes(9000)), b"\x80" + bytes(7))
        ),
    )  # fmt: skip
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


_KINDS = "ifdplczsetoX"
"""An image, a folder with one, a dangling link …: see `_make`."""
_IMAGE = encoded(smooth(20, 20))
_NAMES = (
    "a.jpg", "b.JPG", "c.png", "\udcff.jpg", "\x1b[2J.jpg", "n" * 250 + ".jpg", "d.txt", "e.tar", ".hidden.jpg",
)  # fmt: skip


def _folders() -> dict[str, bytes]:
    """The policy, then an entry a line: class, name and kind by number."""
    return {"fail": b"000i\n001i\n100i\n101i\n", "skip": b"000i\n011i\n100i\n101d\n111i\n"}


def _enter_folder(policy: str, data: bytes) -> None:
    logging.disable(logging.CRITICAL)
    for folder in ("set", "pack"):
        shutil.rmtree(folder, ignore_errors=True)
    os.mkdir("set")
    for line in data[:2000].split(b"\n"):
        with contextlib.suppress(OSError, ValueError):
            _add(line.ljust(4, b"0"))
    policy = "skip" if policy == "skip" else "fail"
    problem = None
    try:
        source = open_source(
            DataConfig(source="imagefolder:set", bad_images=policy), split="train", image_size=28
        )
        source.read(np.arange(min(len(source), 8)))
    except PenstockError as error:
        problem = error  # packing is tried too
    pack_source("set", "pack", Packing(size=16, bad_images=policy, threads=1))
    if problem is not None:
        raise problem


def _add(line: bytes) -> None:
    group, name = Path(f"set/{line[0] % 4}"), _NAMES[line[1] % len(_NAMES)]
    kind = chr(line[3]) if chr(line[3]) in _KINDS else _KINDS[line[3] % len(_KINDS)]
    if line[2] % 5 == 1:
        group = Path("set") / ("train", "val")[line[2] % 2] / group.name
    elif line[2] % 5 == 2:
        group = Path("set")
    group.mkdir(parents=True, exist_ok=True)
    path = group / name
    if os.path.lexists(path):
        return  # writing to a pipe would wait
    if kind == "d":
        path = path.with_suffix("") / "in.jpg"
        path.parent.mkdir()
        kind = "i"
    match kind:
        case "i":
            path.write_bytes(_IMAGE)
        case "f":
            os.mkfifo(path)
        case "p":
            path.mkdir()
        case "l":
            path.symlink_to("nowhere")
        case "c":
            path.symlink_to(path.name)
        case "z":
            path.symlink_to("/dev/zero")
        case "s":
            with path.open("wb") as file:
                file.truncate(3 << 30)
        case "e":
            path.write_bytes(b"")
        case "t":
            path.write_bytes(_IMAGE[: len(_IMAGE) // 2])
        case "o":
            path.symlink_to("..")
        case "X":
            path.write_bytes(_IMAGE)
            path.chmod(0)


def _made_folders() -> st.SearchStrategy[Case]:
    line = st.lists(st.integers(0, 11), min_size=4, max_size=4).map(bytes)
    return st.tuples(st.sampled_from(("fail", "skip")), st.lists(line, max_size=12).map(b"\n".join))


DOORS = {
    "images": Door(
        seeds=_seeds, enter=_enter, made=_made,
        tokens=(b"\xff\xda", b"\xff\xd9", b"\xff\xc2", b"IDAT", b"VP8X", b"Exif\0\0"),
    ),
    "image_folder": Door(seeds=_folders, enter=_enter_folder, made=_made_folders),
}  # fmt: skip
