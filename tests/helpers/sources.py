"""Sources that misbehave or tell, for tests of reading processes. In a module, so that those find them."""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

from penstock.data.source import ImageSource, Pixels, Source


class Sleeps(ImageSource):
    """Takes a second for each image."""

    def __init__(self) -> None:
        self.name, self.classes, self.size, self.channels = "sleeps", ("a",), 8, 1
        self.labels = np.zeros(100, np.int64)

    def load(self, index: int, out: Pixels) -> None:
        time.sleep(1)
        out[...] = 0


class Imports(ImageSource):
    """White where the reading process has torch imported, black where it has not."""

    def __init__(self) -> None:
        self.name, self.classes, self.size, self.channels = "imports", ("a",), 8, 1
        self.labels = np.zeros(100, np.int64)

    def load(self, index: int, out: Pixels) -> None:
        out[...] = 255 if "torch" in sys.modules else 0


class Raises(ImageSource):
    """Has a bug."""

    def __init__(self) -> None:
        self.name, self.classes, self.size, self.channels = "raises", ("a",), 8, 1
        self.labels = np.zeros(100, np.int64)

    def load(self, index: int, out: Pixels) -> None:
        raise ZeroDivisionError("by zero")


class Counting(Source):
    """Sequences that are no images: sample i counts from i on. With `fields` a sample has a mask too."""

    def __init__(self, samples: int, length: int, *, fields: bool) -> None:
        self.name = "counting"
        tokens = np.dtype((np.int32, (length,)))
        self.sample = (
            np.dtype([("tokens", tokens), ("mask", bool, (length,))], align=True) if fields else tokens
        )
        self._samples = samples
        self._length = length

    def __len__(self) -> int:
        return self._samples

    def load(self, index: int, out: Any) -> None:
        counted = np.arange(index, index + self._length)
        if self.sample.names:
            out["tokens"], out["mask"] = counted, counted % 2 == 0
        else:
            out[...] = counted
