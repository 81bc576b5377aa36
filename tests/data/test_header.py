from __future__ import annotations

import struct

import pytest
from PIL import Image

from helpers.hostile import seeds
from helpers.images import encoded, photo
from penstock.data.header import Header, Unreadable, check_size, read_header


@pytest.mark.parametrize("number", range(14))
def test_the_header_agrees_with_pillow(number: int) -> None:
    import io

    data = seeds()[number]
    header = read_header(data)
    with Image.open(io.BytesIO(data)) as opened:
        assert (header.width, header.height) == opened.size
        assert header.format == opened.format
        assert header.orientation == opened.getexif().get(0x112, 1)
        if header.format == "JPEG":
            assert header.components == len(opened.getbands())


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("orientation", [0, 1, 5, 8, 9])
def test_orientation_is_read_in_both_byte_orders(order: str, orientation: int) -> None:
    tiff = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}IH", 8, 1)
    tiff += struct.pack(f"{order}HHIHH", 0x0112, 3, 1, orientation, 0) + bytes(4)
    header = read_header(encoded(photo(20, 10), exif=b"Exif\0\0" + tiff))
    assert header.orientation == (orientation if 1 <= orientation <= 8 else 1)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_any_cut_through_the_header_is_told(kind: str) -> None:
    data = encoded(photo(20, 10), kind)
    needed = next(n for n in range(len(data)) if _readable(data[:n]))
    assert needed < 700
    for length in range(needed):
        with pytest.raises(Unreadable):
            read_header(data[:length])


def _readable(data: bytes) -> bool:
    try:
        read_header(data)
    except Unreadable:
        return False
    return True


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "empty"),
        (b"GIF89a", "neither a JPEG, a PNG nor a WebP"),
        (b"\xff\xd8\xff\xd9", "no frame"),
        (b"\xff\xd8\xff\xe0\x00\x01", "broken"),
        (b"\xff\xd8\xff\xc9\x00\x0b\x08\x00\x10\x00\x10\x01", "arithmetic"),
        (b"\xff\xd8\xff\xc1\x00\x0b\x0c\x00\x10\x00\x10\x01", "12 bits"),
        (b"\xff\xd8\xff\xc0\x00\x0b\x08\x00\x00\x00\x10\x01", "16 × 0 pixels"),
        (b"RIFF\0\0\0\0WEBPABCD" + bytes(20), "WebP header is broken"),
    ],
)
def test_what_is_wrong_is_said(data: bytes, why: str) -> None:
    with pytest.raises(Unreadable, match=why):
        read_header(data)


@pytest.mark.parametrize(
    ("width", "height", "file_bytes", "why"),
    [
        (10_000, 10_001, 10**8, r"100,010,000 pixels, more than data\.max_pixels = 100,000,000"),
        (5000, 5000, 20_000, r"25,000,000 pixels in only 20,000 bytes"),
    ],
)
def test_unreasonable_sizes_are_refused(width: int, height: int, file_bytes: int, why: str) -> None:
    with pytest.raises(Unreadable, match=why):
        check_size(Header("PNG", width, height, 0, 1), file_bytes, 100_000_000)


def test_reasonable_sizes_pass() -> None:
    check_size(Header("PNG", 4000, 4000, 0, 1), 100, 100_000_000)  # 16 million pixels of one colour
    check_size(Header("JPEG", 10_000, 10_000, 3, 1), 5_000_000, 100_000_000)
