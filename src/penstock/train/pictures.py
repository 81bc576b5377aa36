"""Pictures of a few validation samples, which a run keeps for its page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from penstock.boundary.files import read_bytes
from penstock.data.source import Pixels
from penstock.disk import write_file
from penstock.infer.pictures import png

PICTURES = "pictures"
"""Folder in the run's, with `0.png` and so on in the order of an evaluation's `answers`."""
_LARGEST = 96
"""Pixels of a picture's longer side."""
_MOST_BYTES = 1 << 20


def write_pictures(images: Sequence[Pixels], folder: Path) -> None:
    """Write images (H, W, C) of one or three channels, reduced where they are large."""
    folder.mkdir()
    for number, pixels in enumerate(images):
        colors = pixels[..., : 3 if pixels.shape[-1] >= 3 else 1]
        scale = min(1.0, _LARGEST / max(colors.shape[:2]))
        if scale < 1:
            size = round(colors.shape[1] * scale), round(colors.shape[0] * scale)
            small = Image.fromarray(colors.squeeze(-1) if colors.shape[-1] == 1 else colors).resize(size)
            colors = np.asarray(small).reshape(size[1], size[0], -1)
        write_file(folder / f"{number}.png", [png(colors)])


def read_pictures(folder: Path) -> list[bytes]:
    """The pictures in a run's folder, in their order; none where there are none."""
    files = sorted((folder / PICTURES).glob("*.png"), key=lambda file: (len(file.name), file.name))
    return [read_bytes(file, "The picture of a sample", limit=_MOST_BYTES) for file in files]
