"""Size and orientation of an image from its first bytes, before anything is decoded.

A few hundred bytes can claim an image of gigabytes, or keep a decoder busy for minutes. So no decoder gets an image
before `check_image` has found it reasonable. This takes microseconds per image, and imports no torch, numpy or image
library.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from typing import Literal, NamedTuple

from penstock.boundary.files import Unreadable

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
MAX_BYTES = 1 << 28
"""Most bytes of an image file."""
_PARTS = 10_000
"""Segments or chunks that may precede the pixels. Thousands of empty ones keep a reader busy; a long colour profile or
description has hundreds. Where chunks follow each other to the end of the file, one more per 1,024 bytes is fine.
"""
_TILE = 1 << 24
"""Pixels that a tile of a TIFF may have if the image has fewer: a decoder allocates whole tiles."""
_SCANNED = 1_200_000_000
"""Pixels times scans of a JPEG that may be decoded: 12 scans, as the best encoders make, of 100 million pixels. A scan
of a few bytes can make libjpeg pass over all of the image, at about 0.8 ns per pixel.
"""


class Header(NamedTuple):
    """The format and size that an image's header claims."""

    format: Literal["JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF"]
    width: int
    height: int
    components: int
    """Colour components of a JPEG (1, 3 or 4); 0 for other formats."""
    orientation: int
    """EXIF orientation 1..8; 1 is upright. Always 1 for a TIFF, which its decoder turns."""

    @property
    def pixels(self) -> int:
        return self.width * self.height


def check_image(data: bytes, max_pixels: int) -> Header:
    """Return the header of an image that is safe to decode. Raises Unreadable for any other."""
    header = read_header(data)
    check_size(header, len(data), max_pixels)
    if header.format == "JPEG":
        with _cut_off():
            _check_scans(data, header, max_pixels)
    elif header.format in ("PNG", "WEBP"):
        for _ in _chunks(data):  # Pillow goes through all of a PNG's chunks, and takes longer
            pass
    return header


def read_header(data: bytes) -> Header:
    """Raises Unreadable for other formats, and for headers that are broken or cut off."""
    with _cut_off():
        if data[:2] == b"\xff\xd8":
            header = _jpeg(data)
        elif data[:8] == b"\x89PNG\r\n\x1a\n":
            header = _png(data)
        elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            header = _webp(data)
        elif data[:2] == b"BM":
            header = _bmp(data)
        elif data[:6] in (b"GIF87a", b"GIF89a"):
            width, height = struct.unpack_from("<HH", data, 6)
            header = Header("GIF", width, height, 0, 1)
        elif data[:4] in (b"II*\0", b"MM\0*"):
            header = _tiff(data)
        else:
            raise Unreadable("it is no JPEG, PNG, WebP, BMP, GIF or TIFF" if data else "it is empty")
    if header.pixels == 0:
        raise Unreadable(f"its header claims {header.width} × {header.height} pixels")
    return header


@contextlib.contextmanager
def _cut_off() -> Iterator[None]:
    try:
        yield
    except (struct.error, IndexError) as error:
        raise Unreadable("its header is cut off") from error


def check_size(header: Header, file_bytes: int, max_pixels: int) -> None:
    """Raises Unreadable if decoding would take unreasonable memory.

    Besides the limit on pixels, a file above 16 million pixels may not claim more than a thousand for each of its
    bytes. A JPEG cannot hold more than 512 (an 8 × 8 block takes at least a bit), and a PNG of 8 bits not more than
    1,032 (deflate's greatest ratio). A file that claims more is cut off or a decompression bomb.
    """
    size = f"{header.width} × {header.height} = {header.pixels:,} pixels"
    if header.pixels > max_pixels:
        raise Unreadable(
            f"its header claims {size}, more than data.max_pixels = {max_pixels:,}, so it was not decoded"
        )
    if header.pixels > max(16_000_000, 1000 * file_bytes):
        raise Unreadable(f"its header claims {size} in only {file_bytes:,} bytes, so it was not decoded")


def _segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Marker, start and length of each segment of a JPEG, up to the first scan (ITU-T T.81, annex B)."""
    at = 2
    for _ in range(_PARTS):
        if data[at] != 0xFF:
            raise Unreadable("its JPEG header is broken")
        marker = data[at + 1]
        if marker == 0xFF:  # fill byte
            at += 1
            continue
        if marker == 0x01 or 0xD0 <= marker <= 0xD8:  # markers without a segment
            at += 2
            continue
        if marker == 0xD9:
            return
        (length,) = struct.unpack_from(">H", data, at + 2)
        if length < 2:
            raise Unreadable("its JPEG header is broken")
        yield marker, at, length
        if marker == 0xDA:
            return
        at += 2 + length
    raise Unreadable(f"its JPEG header has more than {_PARTS:,} parts")


def _jpeg(data: bytes) -> Header:
    orientation = 1
    for marker, at, length in _segments(data):
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            if marker not in (0xC0, 0xC1, 0xC2):
                raise Unreadable("it is an arithmetic, lossless or hierarchical JPEG, which is not supported")
            precision, height, width, components = struct.unpack_from(">BHHB", data, at + 4)
            if precision != 8:
                raise Unreadable(f"it is a JPEG of {precision} bits per sample; only 8 are supported")
            return Header("JPEG", width, height, components, orientation)
        if marker == 0xE1 and data[at + 4 : at + 10] == b"Exif\0\0":
            orientation = _orientation(data[at + 10 : at + 2 + length])
    raise Unreadable("its JPEG header has no frame")


def _check_scans(data: bytes, header: Header, max_pixels: int) -> None:
    """A decoder stops after the first scan if that holds all components of a frame that is not progressive."""
    progressive = False
    for marker, at, _ in _segments(data):
        progressive |= marker == 0xC2
        if marker == 0xDA and (progressive or data[at + 4] < header.components):
            scans = data.count(b"\xff\xda", at)  # compressed data never holds this pair
            if scans * header.pixels > max(_SCANNED, 12 * max_pixels):
                raise Unreadable(
                    f"it passes {scans:,} times over {header.pixels:,} pixels, so it was not decoded"
                )


def _orientation(tiff: bytes) -> int:
    """Tag 0x0112 of an EXIF block's first directory; 1 where there is none or it is broken."""
    if tiff[:4] in (b"II*\0", b"MM\0*"):
        with contextlib.suppress(struct.error):
            for tag, value in _numbers(tiff):
                if tag == 0x0112:
                    return value if 1 <= value <= 8 else 1
    return 1


def _numbers(tiff: bytes) -> Iterator[tuple[int, int]]:
    """Tags and values of the numbers in the first directory (TIFF 6.0, sections 2 and 15)."""
    order = "<" if tiff[:2] == b"II" else ">"
    (start,) = struct.unpack_from(f"{order}I", tiff, 4)
    (entries,) = struct.unpack_from(f"{order}H", tiff, start)
    for at in range(start + 2, start + 2 + 12 * entries, 12):
        tag, kind, count = struct.unpack_from(f"{order}HHI", tiff, at)
        if kind in (3, 4) and count == 1:
            yield tag, struct.unpack_from(f"{order}{'H' if kind == 3 else 'I'}", tiff, at + 8)[0]


def _chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Kind, start of the content and length of each chunk of a PNG or WebP."""
    png = data[:1] == b"\x89"
    at, form, more = (8, ">I4s", 12) if png else (12, "<4sI", 8)
    most = _PARTS + len(data) // 1024
    for _ in range(most):
        if at + 8 > len(data):
            return
        first, second = struct.unpack_from(form, data, at)
        kind, length = (second, first) if png else (first, second)
        yield kind, at + 8, length
        at += more + length + (0 if png else length & 1)
    raise Unreadable(f"it has more than {most:,} parts")


def _png(data: bytes) -> Header:
    """IHDR is first by definition. An eXIf chunk may come before the pixels (PNG 3rd edition, 11.3.4.5)."""
    if data[12:16] != b"IHDR":
        raise Unreadable("its PNG header is broken")
    width, height = struct.unpack_from(">II", data, 16)
    return Header("PNG", width, height, 0, _chunk_orientation(data, b"eXIf", until=b"IDAT"))


def png_bits(data: bytes) -> tuple[int, int]:
    """Bits of a PNG's sample, and how many of them are significant by its chunk sBIT; 0 without that chunk."""
    with _cut_off():
        for kind, start, length in _chunks(data):
            if kind in (b"sBIT", b"IDAT"):
                return data[24], max(data[start : start + length], default=0) if kind == b"sBIT" else 0
    return data[24], 0


def _webp(data: bytes) -> Header:
    """The first chunk gives the canvas (RFC 9649, section 2). EXIF comes after the pixels."""
    kind = data[12:16]
    if kind == b"VP8 ":
        if data[23:26] != b"\x9d\x01\x2a":
            raise Unreadable("its WebP header is broken")
        width, height = struct.unpack_from("<HH", data, 26)
        return Header("WEBP", width & 0x3FFF, height & 0x3FFF, 0, 1)
    if kind == b"VP8L":
        if data[20] != 0x2F:
            raise Unreadable("its WebP header is broken")
        (bits,) = struct.unpack_from("<I", data, 21)
        return Header("WEBP", (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1, 0, 1)
    if kind == b"VP8X":
        width = int.from_bytes(data[24:27], "little") + 1
        height = int.from_bytes(data[27:30], "little") + 1
        if len(data) < 30:
            raise Unreadable("its header is cut off")
        return Header("WEBP", width, height, 0, _chunk_orientation(data, b"EXIF") if data[20] & 0x08 else 1)
    raise Unreadable("its WebP header is broken")


def _bmp(data: bytes) -> Header:
    """The first header is of OS/2 or of Windows; a negative height has the rows from top to bottom."""
    (length,) = struct.unpack_from("<I", data, 14)
    width, height = struct.unpack_from("<HH" if length == 12 else "<ii", data, 18)
    if width < 0:
        raise Unreadable("its BMP header is broken")
    return Header("BMP", width, abs(height), 0, 1)


def _tiff(data: bytes) -> Header:
    tags = dict(_numbers(data))
    width, height = tags.get(256, 0), tags.get(257, 0)
    if tags.get(322, 0) * tags.get(323, 0) > max(_TILE, 4 * width * height):
        raise Unreadable("its tiles are far larger than its image")
    if tags.get(274, 1) in (5, 6, 7, 8):
        width, height = height, width
    return Header("TIFF", width, height, 0, 1)


def _chunk_orientation(data: bytes, exif: bytes, until: bytes = b"") -> int:
    for kind, start, length in _chunks(data):
        if kind == until:
            break
        if kind == exif:
            return _orientation(data[start : start + length].removeprefix(b"Exif\0\0"))
    return 1
