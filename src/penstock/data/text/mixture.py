"""Several sets of text by weight, as one set of samples."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.config.run import DataConfig
from penstock.data.source import Source, Split
from penstock.data.text.tokenizers import Tokenizer
from penstock.errors import ConfigError

_MOST = 1 << 31


class TextSource(Source):
    """Samples of one split of several sets of text, mixed by weight.

    One round of the mixture is one pass over the set that takes longest; other sets repeat meanwhile, each sample about
    equally often. So no sample is left out, and the order remains a pure function of seed and position. A subclass
    calls `mix` with the sizes of its sets.
    """

    policy = "data.bad_rows"

    def __init__(
        self, data: DataConfig, split: Split, tables: Sequence[tuple[Any, float]], tokenizer: Tokenizer
    ) -> None:
        """`tables` are the sets, each with its `part` of a pack, and their weights."""
        self.name, self.tokenizer = f"{data.source} ({split})", tokenizer
        self.bad_samples, self.group_by_length = data.bad_rows, data.group_by_length
        self.tables = [table for table, _ in tables]
        self._weights = [weight for _, weight in tables]

    def mix(self, sizes: Sequence[int]) -> None:
        """Number the samples of sets of these sizes by their weights. Raises ConfigError for too many samples."""
        rounds = max(size / weight for size, weight in zip(sizes, self._weights))
        if rounds > _MOST:
            raise ConfigError(
                f"By these weights one pass over the data has {rounds:,.0f} samples, and at most {_MOST:,} are read. "
                "Raise the smallest weights of data.source."
            )
        counts = [max(1, round(rounds * weight)) for weight in self._weights] if len(sizes) > 1 else sizes
        self._sizes, self._starts = sizes, np.cumsum([0, *counts], dtype=np.int64)

    def place(self, index: int) -> tuple[int, int]:
        """The number of the set that a sample is in, and the sample's number there."""
        part = int(np.searchsorted(self._starts, index, side="right")) - 1
        return part, (index - int(self._starts[part])) % self._sizes[part]

    def by_sample(self, values: Sequence[NDArray[np.int64]]) -> NDArray[np.int32]:
        """(samples,) values of all samples, from each set's values of its own samples."""
        counts = np.diff(self._starts)
        return np.concatenate(
            [np.resize(np.asarray(value, np.int32), count) for value, count in zip(values, counts)]
        )

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def digest(self) -> str:  # type: ignore[override]
        """The hash of all tokens and of their index."""
        files = [file for table in self.tables for file in table.part.part.files]
        return hashlib.sha256("".join(file.sha256 for file in files).encode()).hexdigest()
