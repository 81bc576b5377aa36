from __future__ import annotations

import io
import struct
import time

import pytest
from PIL import Image, TiffImagePlugin

from fuzz.door_images import pictures
from helpers.images import encoded, photo
from penstock.boundary.files import Unreadable
from penstock.boundary.images import Header, check_image, check_size, read_header


@pytest.mark.parametrize("number", range(14))
def test_the_header_agrees_with_pillow(number: int) -> None:
    data = pictures()[number]
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


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "GIF"])
def test_any_cut_through_the_header_is_told(kind: str) -> None:
    data = encoded(photo(20, 10), kind)
    needed = next(n for n in range(len(data)) if _readable(data[:n]))
    assert needed < 700
    for length in range(needed):
        with pytest.raises(Unreadable):
            read_header(data[:length])


@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_the_header_of_a_tiff_agrees_with_pillow(orientation: int) -> None:
    tags = TiffImagePlugin.ImageFileDirectory_v2()
    tags[274] = orientation
    data = encoded(photo(20, 10), "TIFF", tiffinfo=tags)
    with Image.open(io.BytesIO(data)) as opened:
        opened.load()
        assert read_header(data) == Header("TIFF", *opened.size, 0, 1)
    for length in range(8, 100):
        assert not _readable(data[:length])


@pytest.mark.parametrize("order", ["<", ">"])
def test_a_tiff_is_read_in_both_byte_orders(order: str) -> None:
    entries = [
        (256, 3, 30 if order == "<" else 30 << 16),
        (257, 4, 20),
        (274, 3, 6 if order == "<" else 6 << 16),
    ]
    data = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}IH", 8, len(entries))
    data += b"".join(struct.pack(f"{order}HHII", tag, kind, 1, value) for tag, kind, value in entries)
    assert read_header(data) == Header("TIFF", 20, 30, 0, 1)


def test_a_tile_larger_than_its_image_is_refused() -> None:
    """A decoder would make room for it."""
    entries = [(256, 4), (257, 4), (322, 1 << 20), (323, 1 << 20)]
    data = b"II*\0" + struct.pack("<IH", 8, len(entries))
    data += b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries)
    with pytest.raises(Unreadable, match="tiles are far larger"):
        check_image(data, 100_000_000)


@pytest.mark.parametrize("kind", ["BMP", "GIF"])
def test_the_headers_of_old_formats_agree_with_pillow(kind: str) -> None:
    data = encoded(photo(21, 10), kind)
    assert check_image(data, 1000) == Header(kind, 21, 10, 0, 1)  # type: ignore[arg-type]
    with pytest.raises(Unreadable, match=r"more than data\.max_pixels"):
        check_image(data, 200)


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
        (b"GIF89a", "cut off"),
        (b"P6 1 1 255", "no JPEG, PNG, WebP, BMP, GIF or TIFF"),
        (b"BM" + bytes(12) + struct.pack("<Iii", 40, -3, 3) + bytes(28), "broken"),
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


def _empty_scans(width: int, height: int, count: int) -> bytes:
    """A progressive JPEG that says that it is so large, with so many scans that hold next to nothing."""
    data = encoded(Image.new("RGB", (16, 16)), progressive=True)
    frame = data.index(b"\xff\xc2") + 5
    data = data[:frame] + struct.pack(">HH", height, width) + data[frame + 4 :]
    tables = data.rfind(b"\xff\xc4", 0, data.rfind(b"\xff\xda"))
    return data[:-2] + data[tables:-2] * count + data[-2:]


def test_hundreds_of_empty_scans_are_refused_by_scans_times_pixels() -> None:
    check_image(_empty_scans(1000, 1000, 300), 100_000_000)
    start = time.process_time()
    for side, count in ((4000, 400), (10_000, 20)):
        with pytest.raises(Unreadable, match=rf"it passes {count + 10} times over {side**2:,} pixels"):
            check_image(_empty_scans(side, side, count) + bytes(side**2 // 1000), 100_000_000)
    assert time.process_time() - start < 0.5


def test_scans_of_single_components_count_too() -> None:
    """A sequential JPEG is decoded scan by scan if its first scan lacks a component."""
    data = encoded(Image.new("RGB", (16, 16)), subsampling="4:4:4")
    data = data.replace(b"\x00\x10\x00\x10\x03", b"\x0f\xa0\x0f\xa0\x03")
    scan = data.index(b"\xff\xda")
    single = b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00"
    check_image(data[:scan] + single * 3 + data[scan:], 100_000_000)
    with pytest.raises(Unreadable, match="it passes 101 times"):
        check_image(data[:scan] + single * 100 + data[scan:], 100_000_000)
    # After a first scan of all components the decoder stops.
    check_image(data[:-2] + single * 100 + data[-2:], 100_000_000)


@pytest.mark.parametrize(
    "filler", [b"\xff" * 20_000_000, b"\xff\xe0\x00\x02" * 5_000_000, b"\xff\xd0" * 10_000_000]
)
@pytest.mark.parametrize("where", [b"", b"\xff\xda"])
def test_20_megabytes_of_nothing_take_no_time(filler: bytes, where: bytes) -> None:
    data = encoded(photo(20, 10))
    at = data.index(where) if where else 2
    start = time.process_time()
    with pytest.raises(Unreadable, match="more than 10,000 parts"):
        check_image(data[:at] + filler + data[at:], 100_000_000)
    assert time.process_time() - start < 0.2


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_a_million_empty_chunks_are_refused(kind: str) -> None:
    data = encoded(photo(20, 10), kind, **({"exif": Image.Exif()} if kind == "WEBP" else {}))
    empty = {"PNG": bytes(4) + b"tEXt" + bytes(4), "WEBP": b"XMP " + bytes(4)}[kind]
    start = time.process_time()
    with pytest.raises(Unreadable, match="parts"):
        check_image(data + empty * 1_000_000, 100_000_000)
    assert time.process_time() - start < 0.5
    check_image(data + empty * 5000, 100_000_000)
