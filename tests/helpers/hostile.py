"""Thousands of broken images against the decoder: `python -m helpers.hostile 10000`.

Runs in a process of its own, without torch, so that a crash of a C library shows as a signal, and the peak of
memory is that of decoding alone. Prints one line of JSON.
"""

from __future__ import annotations

import io
import json
import random
import resource
import struct
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from penstock.boundary.files import Unreadable
from penstock.data import decode as decoding

MAX_PIXELS = 100_000_000


def seeds() -> list[bytes]:
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


def _flip_bits(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _flip_header(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 2, 4))):
        data[rng.randrange(min(len(data), 700))] = rng.choice(
            (0, 1, 0x7F, 0x80, 0xFE, 0xFF, rng.randrange(256))
        )


def _truncate(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def _cut_out(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data))
    del data[start : start + rng.randrange(1, 200)]


def _repeat(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data))
    piece = data[start : start + rng.randrange(1, 400)]
    data[start:start] = piece * rng.choice((1, 2, 20))


def _noise(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data))
    data[start : start + 50] = rng.randbytes(50)


def _claim(data: bytearray, rng: random.Random) -> None:
    """Claim another size in the header, with a right checksum where the format has one."""
    width, height = (rng.choice((0, 1, 7, 3000, 10_000, 16_383, 65_535, rng.randrange(65_536))) for _ in "wh")
    if data[:2] == b"\xff\xd8":
        for marker in (b"\xff\xc0", b"\xff\xc2"):
            at = data.find(marker)
            if at >= 0:
                data[at + 5 : at + 9] = struct.pack(">HH", height, width)
    elif data[:4] == b"\x89PNG":
        data[16:24] = struct.pack(">II", width, height)
        data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    elif data[12:16] == b"VP8 ":
        data[26:30] = struct.pack("<HH", width & 0x3FFF, height & 0x3FFF)
    elif data[12:16] == b"VP8X":
        data[24:30] = width.to_bytes(3, "little") + height.to_bytes(3, "little")
    else:
        data[21:25] = struct.pack("<I", (width & 0x3FFF) | (height & 0x3FFF) << 14)


MUTATIONS: tuple[Callable[[bytearray, random.Random], None], ...] = (
    _flip_bits,
    _flip_header,
    _truncate,
    _cut_out,
    _repeat,
    _noise,
    _claim,
)


def mutants(count: int, seed: int = 0) -> list[bytes]:
    """`count` broken images, the same for the same seed."""
    rng, originals = random.Random(seed), seeds()
    broken = []
    for number in range(count):
        data = bytearray(originals[number % len(originals)])
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            if data:
                rng.choice(MUTATIONS)(data, rng)
        broken.append(bytes(data))
    return broken


def peak_bytes() -> int:
    """The most memory this process has held. Not ru_maxrss where avoidable: that counts the parent's before
    exec.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main(count: int) -> dict[str, object]:
    """Decode every mutant with both backends; anything but success or Unreadable is counted by its type."""
    backends = [decoding.fast_path, lambda: None] if decoding.fast_path() else [lambda: None]
    outcomes: Counter[str] = Counter()
    out = np.empty((64, 64, 3), np.uint8)
    slowest = 0.0
    for data in mutants(count):
        for backend in backends:
            decoding.fast_path = backend  # type: ignore[assignment]
            start = time.perf_counter()
            try:
                decoding.decode(data, out, max_pixels=MAX_PIXELS, white=65535)
                outcomes["decoded"] += 1
            except Unreadable:
                outcomes["refused"] += 1
            except Exception as error:
                outcomes[f"{type(error).__name__}: {error}"] += 1
            slowest = max(slowest, time.perf_counter() - start)
    return {
        "images": count,
        "backends": len(backends),
        "outcomes": dict(outcomes),
        "peak_bytes": peak_bytes(),
        "slowest_seconds": slowest,
        "torch": "torch" in sys.modules,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(int(sys.argv[1]))) + "\n")
