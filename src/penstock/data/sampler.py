"""The order of samples: one endless stream, a pure function of (seed, samples in the set).

The stream is the concatenation of the epochs' permutations. Batch i of global size G is `stream[i*G:(i+1)*G]`, and
rank r takes its slice of that. So a step sees the same samples with any number of workers or ranks, a batch may span
two epochs, and a resume needs only a position (samples consumed).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.data.hashing import ORDER, words

Ids = NDArray[np.int64]


def permutation(seed: int, epoch: int, samples: int) -> Ids:
    """The order of one epoch: sample numbers sorted by their hash. Stable under any version of numpy."""
    keys = words(seed, ORDER, epoch, counters=np.arange(samples, dtype=np.uint64))
    return np.argsort(keys, kind="stable").astype(np.int64)


class Stream:
    """The sample stream. It keeps the permutation of the epoch that was read last, because reading is sequential."""

    def __init__(self, samples: int, seed: int) -> None:
        if samples < 1:
            raise ValueError("A stream needs at least one sample.")
        self.samples = samples
        self.seed = seed
        self._epoch = -1
        self._order: Ids = np.empty(0, np.int64)

    def ids(self, start: int, stop: int) -> Ids:
        """Sample numbers at positions start..stop of the stream, across the ends of epochs."""
        parts = []
        while start < stop:
            epoch, offset = divmod(start, self.samples)
            if epoch != self._epoch:
                self._epoch, self._order = epoch, permutation(self.seed, epoch, self.samples)
            part = self._order[offset : offset + stop - start]
            parts.append(part)
            start += len(part)
        return np.concatenate(parts) if parts else np.empty(0, np.int64)
