from __future__ import annotations

import functools
import io
import struct
import time
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps, TiffImagePlugin

from helpers.images import encoded, photo, pixels, smooth
from penstock.boundary.files import Unreadable
from penstock.data import decode as decoding

LIMIT = 100_000_000
BACKENDS = [
    "pillow",
    pytest.param("fast", marks=pytest.mark.skipif(not decoding.fast_path(), reason="no extra")),
]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "pillow":
        monkeypatch.setattr(decoding, "fast_path", lambda: None)
    return request.param


def decoded(data: bytes, size: int = 64, channels: int = 3, limit: int = LIMIT, **how: float) -> np.ndarray:
    out = np.full((size, size, channels), 77, np.uint8)
    decoding.decode(data, out, max_pixels=limit, **how)
    return out


def reference(data: bytes, size: int, mode: str) -> np.ndarray:
    """The slow way: decode at full size, turn upright, crop the centre, shrink by area."""
    with Image.open(io.BytesIO(data)) as opened:
        image = ImageOps.exif_transpose(opened)
        if image.mode == "P" and "transparency" in image.info:
            image = image.convert("RGBA")
        image = image.convert(mode)
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    box = (left, top, left + side, top + side)
    return pixels(image.resize((size, size), Image.Resampling.BOX, box=box))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_images_come_upright_and_centred(backend: str, kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x112] = orientation
    data = encoded(smooth(180, 130, seed=1), kind, exif=exif.tobytes())
    error = np.abs(decoded(data).astype(int) - reference(data, 64, "RGB"))
    # Filters differ (libjpeg's shrinking, triangle or area): 2.8 levels on average at most. A wrong turn gives 30.
    assert error.mean() < 4


@pytest.mark.parametrize(("kind", "mode"), [
    ("TIFF", "RGB"), ("TIFF", "CMYK"), ("TIFF", "L"), ("TIFF", "RGBA"), ("TIFF", "P"), ("TIFF", "1"),
    ("BMP", "RGB"), ("BMP", "L"), ("BMP", "P"), ("GIF", "P"), ("GIF", "L"),
])  # fmt: skip
def test_old_formats_are_read(backend: str, kind: str, mode: str) -> None:
    picture = smooth(90, 70, seed=2)
    picture = picture.convert("L").point(lambda level: 255 * (level > 128)) if mode == "1" else picture
    picture = picture.quantize(64) if mode == "P" else picture.convert(mode)
    data = encoded(picture, kind, **({"compression": "tiff_lzw"} if kind == "TIFF" else {}))
    with Image.open(io.BytesIO(data)) as opened:
        plain = opened.convert("RGB")
    error = np.abs(decoded(data).astype(int) - reference(encoded(plain, "PNG"), 64, "RGB"))
    assert error.mean() < 4
    with pytest.raises(Unreadable):
        decoded(data[: len(data) // 2])


def test_a_turned_tiff_comes_upright(backend: str) -> None:
    picture = smooth(180, 130, seed=1)
    tags = TiffImagePlugin.ImageFileDirectory_v2()
    tags[274] = 6
    upright = picture.transpose(Image.Transpose.ROTATE_270)
    error = np.abs(
        decoded(encoded(picture, "TIFF", tiffinfo=tags)).astype(int)
        - reference(encoded(upright, "PNG"), 64, "RGB")
    )
    assert error.mean() < 4


def test_a_tiff_of_floating_point_is_refused(backend: str) -> None:
    with pytest.raises(Unreadable, match="floating-point"):
        decoded(encoded(Image.fromarray(np.ones((9, 9), np.float32)), "TIFF"))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK", "P", "RGBA", "LA", "1", "I;16"])
def test_every_mode_becomes_grey_or_colour(backend: str, mode: str, channels: int) -> None:
    kind = "JPEG" if mode == "CMYK" else "PNG"
    picture = smooth(90, 70, seed=2)
    if mode == "1":  # in large areas: a dither is noise to every filter
        picture = picture.convert("L").point(lambda level: 255 * (level > 128))
    if mode == "I;16":
        wide = np.asarray(picture.convert("L")).astype(np.uint16) * 256 + 99
        data, expected = encoded(Image.fromarray(wide), kind), picture.convert("L")
    else:
        data = encoded(picture.quantize(64) if mode == "P" else picture.convert(mode), kind)
        expected = Image.open(io.BytesIO(data))
    error = np.abs(
        decoded(data, channels=channels, white=65535).astype(int)
        - reference(encoded(expected.convert("RGB"), "PNG"), 64, "RGB" if channels == 3 else "L")
    )
    assert error.mean() < 4


def test_small_images_are_enlarged(backend: str) -> None:
    flat = encoded(Image.new("RGB", (5, 9), (200, 100, 50)), "PNG")
    assert np.unique(decoded(flat).reshape(-1, 3), axis=0).tolist() == [[200, 100, 50]]


@pytest.mark.skipif(not decoding.fast_path(), reason="needs the images extra")
def test_both_backends_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(smooth(500, 375, seed=3), quality=92)
    fast = decoded(data, 256).astype(int)
    assert decoding.backend() == "simplejpeg+cv2"
    monkeypatch.setattr(decoding, "fast_path", lambda: None)
    assert decoding.backend() == "pillow"
    error = np.abs(fast - decoded(data, 256))
    assert 0 < error.mean() < 2  # measured 1.0


@pytest.mark.parametrize("share", [0.3, 0.7, 0.97])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_truncated_images_are_refused(backend: str, kind: str, share: float) -> None:
    data = encoded(smooth(180, 130), kind)
    with pytest.raises(Unreadable):
        decoded(data[: int(len(data) * share)])


@pytest.mark.skipif(not decoding.fast_path(), reason="needs the images extra")
def test_harmless_blemishes_are_judged_alike(backend: str) -> None:
    """Bytes before a marker make simplejpeg give up and libjpeg only warn."""
    data = encoded(smooth(180, 130))
    blemished = data[:-2] + b"\0\0\0" + data[-2:]
    np.testing.assert_allclose(decoded(blemished).astype(int), decoded(data).astype(int), atol=40)


def chunk(kind: bytes, content: bytes) -> bytes:
    """A part of a PNG file."""
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def written_png(side: int, bits: int, colours: int, packed: bytes) -> bytes:
    head = struct.pack(">IIBBBBB", side, side, bits, colours, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


@functools.cache
def bomb(side: int) -> bytes:
    packer = zlib.compressobj(9)
    body = b"".join([packer.compress(bytes(side + 1)) for _ in range(side)]) + packer.flush()
    return written_png(side, 8, 0, body)


@pytest.mark.alone
def test_a_bomb_is_refused_at_once(backend: str) -> None:
    data = bomb(20_000)
    assert len(data) < 400_000
    fastest = 1.0
    for _ in range(3):
        start = time.perf_counter()
        with pytest.raises(Unreadable, match=r"20000 × 20000 = 400,000,000 pixels, more than"):
            decoded(data)
        fastest = min(fastest, time.perf_counter() - start)
    assert fastest < 0.01


def test_the_limit_is_the_users(backend: str) -> None:
    data = encoded(photo(100, 50), "PNG")
    decoded(data, limit=5000)
    with pytest.raises(Unreadable, match=r"data\.max_pixels = 4,999"):
        decoded(data, limit=4999)


def test_pillows_own_limit_is_not_in_the_way(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    decoded(encoded(photo(100, 50), "PNG"))


def _tiff(values: np.ndarray, **tags: int | str) -> bytes:
    info = TiffImagePlugin.ImageFileDirectory_v2()
    for tag, value in tags.items():
        info[int(tag[1:])] = value
    return encoded(Image.fromarray(values), "TIFF", tiffinfo=info)


def _png(values: np.ndarray, significant: int) -> bytes:
    """A PNG of 16 bits that says how many of them are significant."""
    data = encoded(Image.fromarray(values), "PNG")
    return data[:33] + chunk(b"sBIT", bytes([significant])) + data[33:]


RAMP = np.linspace(0, 1, 64 * 64).reshape(64, 64)


@pytest.mark.parametrize(
    ("data", "white"),
    [
        (encoded(Image.fromarray((RAMP * 4095).astype(np.uint16)), "PNG"), 4095),
        (encoded(Image.fromarray((RAMP * 65535).astype(np.uint16)), "PNG"), 65535),
        (_tiff((RAMP * 1023).astype(np.uint16)), 1023),
        (_tiff((RAMP * 255).astype(np.int32)), 255),
        (_tiff((RAMP * 65535).astype(np.int32)), 65535),
        (_tiff(RAMP.astype(np.float32)), 1.0),
        (_tiff((RAMP * 4095).astype(np.uint16), t281=4095), None),
        (_tiff((RAMP * 1023).astype(np.uint16), t270='<OME><Pixels SignificantBits="10"/></OME>'), None),
        (_png((RAMP * 4095).astype(np.uint16), 12), None),
        (_png((RAMP * 4095).astype(np.uint16) << 4, 12), None),
        (_png((RAMP * 65535).astype(np.uint16), 16), None),
    ],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_samples_of_more_than_8_bits_have_a_range_or_are_asked_for_one(
    data: bytes, white: float | None, channels: int
) -> None:
    out = np.zeros((64, 64, channels), np.uint8)
    if white is not None:
        with pytest.raises(Unreadable, match=r"does not say which value is white; set data\.range"):
            decoding.decode(data, out, max_pixels=LIMIT)
        with pytest.raises(
            Unreadable, match=r"its samples go from 0 to .*, and not from 0 to .*; check data\.range"
        ):
            decoding.decode(data, out, max_pixels=LIMIT, white=white / 2)
    decoding.decode(data, out, max_pixels=LIMIT, white=white)
    assert np.abs(out - 255 * RAMP[..., None]).max() <= 1.5


def test_colours_of_16_bits_are_read_where_white_is_65535() -> None:
    rows = (b"\0" + struct.pack(">HHH", 65535, 32896, 0) * 8) * 8  # Pillow does not write such files
    data = written_png(8, 16, 2, zlib.compress(rows))
    out = np.zeros((8, 8, 3), np.uint8)
    decoding.decode(data, out, max_pixels=LIMIT, white=65535)
    assert out[0, 0].tolist() == [255, 128, 0]
    for white, problem in (
        (None, "does not say which value is white"),
        (4095, "colours of 16 bits, whose upper 8"),
    ):
        with pytest.raises(Unreadable, match=problem):
            decoding.decode(data, out, max_pixels=LIMIT, white=white)


@pytest.mark.parametrize(
    "tags", [{"t281": 0}, {"t270": 'SignificantBits="0"'}, {"t270": 'SignificantBits="99"'}]
)
def test_a_range_that_cannot_be_is_none(tags: dict[str, int | str]) -> None:
    with pytest.raises(Unreadable, match="does not say which value is white"):
        decoded(_tiff(np.zeros((9, 9), np.uint16), **tags))
