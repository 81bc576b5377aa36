"""Several sets of text by weight, as one set of samples."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from penstock.config.run import DataConfig
from penstock.data.source import Source
from penstock.data.text.tokenizers import Tokenizer
from penstock.errors import ConfigError

_MOST = 1 << 31


class Mixture:
    """Numbering of the samples of several sets, so that each set has its share.

    One round of the mixture is one pass over the set that takes longest; the others repeat meanwhile, each sample about
    equally often. So no sample is left out, and the order remains a pure function of seed and position.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float]) -> None:
        rounds = max(size / weight for size, weight in zip(sizes, weights))
        if rounds > _MOST:
            raise ConfigError(
                f"By these weights one pass over the data has {rounds:,.0f} samples, and at most {_MOST:,} are read. "
                "Raise the smallest weights of data.source."
            )
        self._sizes = np.array(sizes, np.int64)
        counts = np.array([max(1, round(rounds * weight)) for weight in weights], np.int64)
        if len(sizes) == 1:
            counts = self._sizes
        self._starts = np.concatenate([[0], np.cumsum(counts)])
        self.samples = int(self._starts[-1])

    def place(self, index: int) -> tuple[int, int]:
        """The set that a sample is in, and its number there."""
        part = int(np.searchsorted(self._starts, index, side="right")) - 1
        return part, (index - int(self._starts[part])) % int(self._sizes[part])

    def by_sample(self, values: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
        """(samples,) values of the mixture's samples, from each set's values of its own samples."""
        counts = np.diff(self._starts)
        return np.concatenate([np.resize(value, count) for value, count in zip(values, counts)])


class TextSource(Source):
    """Samples of text, of several sets by weight: a subclass sets `_mixture` and `_tables`."""

    policy = "data.bad_rows"
    tokenizer: Tokenizer
    _mixture: Mixture
    _tables: Sequence[Any]
    """The sets, each with its `part` of a pack."""

    @property
    def digest(self) -> str:  # type: ignore[override]
        """The hash of all tokens and of where they are."""
        files = [file for table in self._tables for file in table.part.part.files]
        return hashlib.sha256("".join(file.sha256 for file in files).encode()).hexdigest()

    def __len__(self) -> int:
        return self._mixture.samples

    def under(self, data: DataConfig) -> Self:
        """This source with the settings for bad rows and for grouping by length."""
        self.bad_samples, self.group_by_length = data.bad_rows, data.group_by_length
        return self
