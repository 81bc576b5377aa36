"""The embedded set: 1,797 real handwritten digits of 8 × 8 pixels.

From the test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, UCI Machine
Learning Repository, doi:10.24432/C50P49, CC BY 4.0), in the order in which scikit-learn's `load_digits` has
them; the grey values 0..16 are spread over 0..255.
"""

from __future__ import annotations

from importlib import resources

import numpy as np

from penstock.data.source import ImageSource, Pixels, Split, is_val


class Digits(ImageSource):
    """The digits 0..9. The validation set is every fifth of each, 355 of 1,797."""

    def __init__(self, split: Split, channels: int) -> None:
        with (resources.files("penstock.data") / "digits.npz").open("rb") as file:
            stored = np.load(file, allow_pickle=False)
            images, labels = stored["images"], stored["labels"]
        chosen = is_val(labels) == (split == "val")
        self.name = f"digits ({split})"
        self.classes = tuple(str(digit) for digit in range(10))
        self.labels = labels[chosen].astype(np.int64)
        self.size = 8
        self.channels = channels
        self.crop_share = 1.0
        self.scalable = True
        self._images = np.repeat(images[chosen], channels, axis=-1)

    def load(self, index: int, out: Pixels) -> None:
        out[...] = self._images[index]
