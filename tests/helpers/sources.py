"""Sources that misbehave or tell, for tests of reading processes. In a module, so that those find them."""

from __future__ import annotations

import sys
import time

import numpy as np

from penstock.data.source import Pixels, Source


class Sleeps(Source):
    """Takes a second for each image."""

    def __init__(self) -> None:
        self.name, self.classes, self.size, self.channels = "sleeps", ("a",), 8, 1
        self.labels = np.zeros(100, np.int64)

    def load(self, index: int, out: Pixels) -> None:
        time.sleep(1)
        out[...] = 0


class Imports(Source):
    """White where the reading process has torch imported, black where it has not."""

    def __init__(self) -> None:
        self.name, self.classes, self.size, self.channels = "imports", ("a",), 8, 1
        self.labels = np.zeros(100, np.int64)

    def load(self, index: int, out: Pixels) -> None:
        out[...] = 255 if "torch" in sys.modules else 0


class Raises(Source):
    """Has a bug."""

    def __init__(self) -> None:
        self.name, self.classes, self.size, self.channels = "raises", ("a",), 8, 1
        self.labels = np.zeros(100, np.int64)

    def load(self, index: int, out: Pixels) -> None:
        raise ZeroDivisionError("by zero")
