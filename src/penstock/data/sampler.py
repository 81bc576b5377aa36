"""The order of samples: one endless stream, a pure function of (seed, number of samples). With batches of similar
lengths it also depends on the lengths and the global batch.

The stream is the concatenation of the epochs' permutations. Batch i of global size G is `stream[i*G:(i+1)*G]`, and
rank r takes its slice of that. So a step sees the same samples with any number of workers or ranks, a batch may span
two epochs, and a resume needs only a position (samples consumed).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.data.hashing import GROUP, ORDER, words

Ids = NDArray[np.int64]

POOL = 64
"""Batches among which samples are sorted by length: more would save little padding, and make batches less random."""


def permutation(seed: int, epoch: int, samples: int) -> Ids:
    """The order of one epoch: sample numbers sorted by their hash. Stable under any version of numpy."""
    keys = words(seed, ORDER, epoch, counters=np.arange(samples, dtype=np.uint64))
    return np.argsort(keys, kind="stable").astype(np.int64)


def grouped(order: Ids, lengths: NDArray[np.int32], batch: int, seed: int, epoch: int) -> Ids:
    """The order of one epoch with samples of similar length in the same global batch.

    Global batches span the ends of epochs, so the samples of a batch that began before the epoch, and of one that ends
    after it, stay as they were. Between these, every 64 batches are sorted by length and cut into batches, which are
    then shuffled. Inside of a batch the samples stay in their order, so that no rank always gets the longest.
    """
    first = min(-epoch * len(order) % batch, len(order))
    whole = (len(order) - first) // batch
    middle = order[first : first + whole * batch].copy()
    for start in range(0, len(middle), POOL * batch):
        pool = middle[start : start + POOL * batch]
        by_length = np.argsort(lengths[pool], kind="stable").reshape(-1, batch)
        by_length.sort(axis=1)
        pool[:] = pool[by_length.reshape(-1)]
    keys = words(seed, GROUP, epoch, counters=np.arange(whole, dtype=np.uint64))
    middle = middle.reshape(whole, batch)[np.argsort(keys, kind="stable")].reshape(-1)
    return np.concatenate([order[:first], middle, order[first + whole * batch :]])


def padding_share(lengths: NDArray[np.int32], batch: int) -> float:
    """Share of padding, in [0, 1), in batches of samples of these `lengths`, in order, padded to their longest."""
    starts = np.arange(0, len(lengths), batch)
    sizes = np.minimum(batch, len(lengths) - starts)
    padded = (np.maximum.reduceat(lengths, starts).astype(np.int64) * sizes).sum()
    return 1 - int(lengths.sum(dtype=np.int64)) / max(1, int(padded))


class Stream:
    """The sample stream. It keeps the permutation of the epoch that was read last, because reading is sequential."""

    def __init__(
        self, samples: int, seed: int, lengths: NDArray[np.int32] | None = None, group: int = 0
    ) -> None:
        """With `lengths` (samples,), samples of similar length share global batches of `group` samples."""
        assert samples > 0
        assert lengths is None or (len(lengths) == samples and group > 0)
        self.samples = samples
        self.seed = seed
        self._lengths = lengths
        self._group = group
        self._epoch = -1
        self._order: Ids = np.empty(0, np.int64)

    def ids(self, start: int, stop: int) -> Ids:
        """Sample numbers at positions start..stop of the stream, across the ends of epochs."""
        parts = []
        while start < stop:
            epoch, offset = divmod(start, self.samples)
            if epoch != self._epoch:
                self._epoch, self._order = epoch, self._order_of(epoch)
            part = self._order[offset : offset + stop - start]
            parts.append(part)
            start += len(part)
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _order_of(self, epoch: int) -> Ids:
        order = permutation(self.seed, epoch, self.samples)
        if self._lengths is None:
            return order
        return grouped(order, self._lengths, self._group, self.seed, epoch)
