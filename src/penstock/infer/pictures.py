"""Images as bytes, as PNG files, and in grids."""

from __future__ import annotations

import io

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from penstock.errors import ConfigError

_LARGEST_CELL = 64
"""Pixels per side up to which a grid enlarges small images."""


def pixels_of(images: Tensor) -> NDArray[np.uint8]:
    """Images (N, C, S, S) in [−1, 1] as (N, S, S, C) bytes. Raises ConfigError unless they are grey or RGB."""
    if images.shape[1] not in (1, 3):
        raise ConfigError(
            f"The model makes images of {images.shape[1]} channels, which cannot be shown; decode what "
            "penstock.ImageGenerator returns."
        )
    scaled = (images.float().clamp(-1, 1) + 1) * 127.5
    return scaled.round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()


def png(pixels: NDArray[np.uint8]) -> bytes:
    """An image (H, W, C) as a PNG file."""
    file = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(file, "png")
    return file.getvalue()


def grid_of(pixels: NDArray[np.uint8], columns: int) -> NDArray[np.uint8]:
    """Images (N, S, S, C) in a grid of `columns`, with lines between; small images are enlarged by a whole factor."""
    times = max(1, _LARGEST_CELL // pixels.shape[1])
    line, rows = max(1, times // 2), -(-len(pixels) // columns)
    cells = np.pad(
        pixels.repeat(times, axis=1).repeat(times, axis=2),
        ((0, rows * columns - len(pixels)), (0, line), (0, line), (0, 0)),
        constant_values=127,
    )  # fmt: skip
    side = cells.shape[1]
    sheet = cells.reshape(rows, columns, side, side, -1).swapaxes(1, 2)
    return sheet.reshape(rows * side, columns * side, -1)[:-line, :-line]
