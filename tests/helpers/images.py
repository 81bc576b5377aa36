"""Images for tests and benchmarks: made, not stored."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image


def photo(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture with the spectrum of a photograph: detail at every scale, amplitude falling as 1 / frequency, plus
    a little sensor noise. A JPEG of it is about as large as one of a real photograph.
    """
    rng = np.random.default_rng(seed)
    canvas = np.zeros((height, width, 3), np.float32)
    cells, strength = 4, 64.0
    while cells < max(width, height):
        grid = rng.normal(0, strength, (cells, cells, 3)).astype(np.float32)
        for channel in range(3):
            layer = Image.fromarray(grid[..., channel])
            canvas[..., channel] += np.asarray(layer.resize((width, height), Image.Resampling.BICUBIC))
        cells, strength = cells * 2, strength * 0.72
    luma = canvas.mean(-1, keepdims=True)  # colour varies less than brightness
    canvas = luma + 0.4 * (canvas - luma) + 128 + rng.normal(0, 2, canvas.shape)
    return Image.fromarray(canvas.clip(0, 255).astype(np.uint8))


def smooth(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture without fine detail, which every way of shrinking it leaves nearly alike."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    """The image as a file of that kind."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def write_folder(root: Path, per_class: int, classes: Iterable[str] = ("cat", "dog"), size: int = 40) -> Path:
    """An image folder of small JPEGs, all different."""
    for number, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for index in range(per_class):
            picture = photo(size + 8, size, seed=number * 1000 + index)
            (root / name / f"{index:04d}.jpg").write_bytes(encoded(picture, quality=90))
    return root


def write_tar(path: Path, members: Iterable[tuple[str, bytes]]) -> Path:
    """A tar shard with these members, in order."""
    with tarfile.open(path, "w") as shard:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            shard.addfile(member, io.BytesIO(content))
    return path


def pixels(image: Image.Image) -> NDArray[np.uint8]:
    """(H, W, C) of an image."""
    array = np.asarray(image, np.uint8)
    return array if array.ndim == 3 else array[..., None]
