"""Decoding of untrusted image bytes to a square of pixels.

The header is read first (`boundary/images.py`), and an image with unreasonable claims reaches no decoder. simplejpeg
and OpenCV decode JPEGs where both are installed (the `images` extra, about twice Pillow's speed); Pillow decodes the
rest. Both let libjpeg shrink an image while it decodes. This imports no torch, so that a reading process stays small.
"""

from __future__ import annotations

import functools
import io
import re
import struct
import zlib
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageFile,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from penstock.boundary.files import Unreadable
from penstock.boundary.images import Header, check_image, png_bits

Pixels = NDArray[np.uint8]

# The plugins are called by name: `Image.open` would try dozens of formats, and applies a process-wide limit.
_PLUGINS: dict[str, Any] = {
    "JPEG": JpegImagePlugin.JpegImageFile, "PNG": PngImagePlugin.PngImageFile, "WEBP": WebPImagePlugin.WebPImageFile,
    "BMP": BmpImagePlugin.BmpImageFile, "GIF": GifImagePlugin.GifImageFile, "TIFF": TiffImagePlugin.TiffImageFile,
}  # fmt: skip

_DECODER_FAILURES = (
    OSError, SyntaxError, ValueError, OverflowError, EOFError, IndexError, KeyError, TypeError, struct.error,
    zlib.error, Warning,
)  # fmt: skip
"""Exceptions that Pillow's plugins and simplejpeg raise on broken files, with Pillow's warnings where they are errors.
MemoryError is not among them."""


@functools.cache
def fast_path() -> tuple[ModuleType, ModuleType] | None:
    """simplejpeg and cv2 where both can be imported."""
    try:
        import cv2
        import simplejpeg
    except ImportError:
        return None
    cv2.setNumThreads(1)  # images are read in parallel already
    return simplejpeg, cv2


def backend() -> str:
    """The decoder of JPEGs: `simplejpeg+cv2` or `pillow`. Their pixels differ by a few grey levels."""
    return "simplejpeg+cv2" if fast_path() else "pillow"


def decode(data: bytes, out: Pixels, *, max_pixels: int, white: float | None = None) -> Header:
    """Decode into `out` (size, size, channels): upright, the shorter side resized to size, the centre kept. `white` is
    the largest value of samples of more than 8 bits, where the file does not say it. Raises Unreadable."""
    header = check_image(data, max_pixels)
    fast = fast_path() if header.format == "JPEG" and header.components in (1, 3) else None
    # simplejpeg refuses some harmless defects. Pillow decides about what it refuses, so that both installations
    # call the same images bad.
    if fast is None or not _decode_fast(*fast, data, header, out):
        _decode_pillow(data, header, out, white)
    if header.orientation != 1:
        # A centred square can be turned after the crop, which is cheaper.
        out[...] = upright(out.copy(), header.orientation)
    return header


def upright(image: Pixels, orientation: int) -> Pixels:
    """Undo an EXIF orientation (Exif 2.32, tag 274) of an image (H, W, C)."""
    if orientation in (5, 6, 7, 8):
        image = image.swapaxes(0, 1)
    if orientation in (2, 3, 6, 7):
        image = image[:, ::-1]
    if orientation in (3, 4, 7, 8):
        image = image[::-1]
    return image


def _center(width: int, height: int) -> tuple[int, int, int]:
    """left, top and side of the central square."""
    side = min(width, height)
    return (width - side) // 2, (height - side) // 2, side


def _decode_fast(simplejpeg: ModuleType, cv2: ModuleType, data: bytes, header: Header, out: Pixels) -> bool:
    """Decode with simplejpeg; returns whether it could."""
    size, channels = out.shape[0], out.shape[2]
    # libjpeg-turbo halves an image for free while it decodes. Its other fractions, which simplejpeg would choose for
    # the wanted size, take longer than decoding in full.
    halvings = 8
    while halvings > 1 and min(header.width, header.height) < size * halvings:
        halvings //= 2
    try:
        image = simplejpeg.decode_jpeg(
            data, colorspace="RGB" if channels == 3 else "GRAY", min_height=-(-header.height // halvings),
            min_width=-(-header.width // halvings),
        )  # fmt: skip
    except _DECODER_FAILURES:
        return False
    height, width = image.shape[:2]
    left, top, side = _center(width, height)
    image = image[top : top + side, left : left + side]
    if side != size:
        image = _resize(cv2, np.ascontiguousarray(image), size)
    out[...] = image.reshape(out.shape)
    return True


def _resize(cv2: ModuleType, image: Pixels, size: int) -> Pixels:
    """Resize a square image to size × size, antialiased.

    To shrink by less than two, four bilinear samples are averaged for each pixel. That is closer to Pillow's filter
    than OpenCV's area average (a deviation of 0.55 grey levels, not 0.76), and takes less than half the time.
    """
    side = image.shape[0]
    if size < side <= 2 * size:
        image = cv2.resize(image, (2 * size, 2 * size), interpolation=cv2.INTER_LINEAR)
    shrinking = image.shape[0] > size
    resized: Pixels = cv2.resize(
        image, (size, size), interpolation=cv2.INTER_AREA if shrinking else cv2.INTER_LINEAR
    )
    return resized


def _decode_pillow(data: bytes, header: Header, out: Pixels, white: float | None) -> None:
    size, channels = out.shape[0], out.shape[2]
    mode = "RGB" if channels == 3 else "L"
    try:
        with _PLUGINS[header.format](io.BytesIO(data)) as opened:
            # Older releases of Pillow turn the sides of a TIFF only with its pixels.
            turned = opened.size[::-1] if header.format == "TIFF" else opened.size
            if (header.width, header.height) not in (opened.size, turned):
                raise Unreadable("its parts contradict each other about its size")
            image = _convert(opened, data, mode, size, white)
            left, top, side = _center(*image.size)
            box = (left, top, left + side, top + side)
            small = image.resize((size, size), Image.Resampling.BILINEAR, box=box, reducing_gap=2.0)
    except _DECODER_FAILURES as error:
        raise Unreadable(f"it cannot be decoded ({error})") from error
    out[...] = np.asarray(small).reshape(out.shape)


def _convert(
    opened: ImageFile.ImageFile, data: bytes, mode: str, size: int, white: float | None
) -> Image.Image:
    """Decode and convert. libjpeg shrinks the image on the way, while the shorter side stays above `size`."""
    if opened.format == "JPEG":
        opened.draft(mode, (size, size))
    opened.load()
    image: Image.Image = opened
    bits, claimed = _bits_and_white(opened, data)
    if bits > 8:
        white = white or claimed
        if white is None or not 0 < white < 1 << 64:
            kind, such = f"numbers of {bits} bits", "4095 for 12 bits or 65535 for 16"
            if image.mode == "F":
                kind, such = "floating-point numbers", "1"
            raise Unreadable(
                f"its samples are {kind}, and it does not say which value is white; set data.range "
                f"(penstock pack: --range) to that value, such as {such}"
            )
        if image.mode[0] in "IF":
            image = Image.fromarray(_in_8_bits(np.asarray(image), white))
        elif white != 65535:
            raise Unreadable(
                f"it has colours of {bits} bits, whose upper 8 are read; for white at {white:g} convert it to 8 bits"
            )
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image if image.mode == mode else image.convert(mode)


def _in_8_bits(samples: NDArray[Any], white: float) -> Pixels:
    lowest, highest = samples.min(), samples.max()
    if not (lowest >= 0 and highest <= white):
        raise Unreadable(
            f"its samples go from {lowest:g} to {highest:g}, and not from 0 to {white:g}; check data.range"
        )
    return (samples * (255 / white) + 0.5).astype(np.uint8)


def _bits_and_white(opened: ImageFile.ImageFile, data: bytes) -> tuple[int, float | None]:
    """Bits of a sample, and the value of white that the file states: in a TIFF by MaxSampleValue, SMaxSampleValue, an
    odd BitsPerSample or OME's SignificantBits, in a PNG by the chunk sBIT."""
    if opened.format == "PNG":
        bits, significant = png_bits(data)
        if bits < 16 or not significant:
            return bits, None
        if opened.mode[0] != "I":
            return bits, 65535
        samples = np.asarray(opened).astype(np.int64)
        lower = samples & ((1 << bits - significant) - 1)
        # By the standard a smaller depth is scaled to all 16 bits, with its upper bits or zeros as the lower ones.
        is_scaled = bool(((lower == 0) | (lower == samples >> significant)).all())
        return bits, 65535 if is_scaled else (1 << significant) - 1
    if opened.format != "TIFF":
        return 8, None
    tags: Any = opened.tag_v2  # type: ignore[attr-defined]
    bits = max(tags.get(258, (1,)))
    claimed = re.search(r'SignificantBits="(\d{1,2})"', str(tags.get(270, "")))
    significant = int(claimed[1]) if claimed else bits
    if largest := tags.get(341, tags.get(281)):
        return bits, float(max(largest) if isinstance(largest, tuple) else largest)
    return bits, float((1 << significant) - 1) if significant not in (16, 32, 64) else None
