"""Samples of continuous text: windows over documents that follow each other, or pieces of one document each."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.config.run import DataConfig
from penstock.data.source import PADDING, Split
from penstock.data.text.mixture import TextSource
from penstock.data.text.sources import open_packs
from penstock.data.text.tokenizers import Tokenizer
from penstock.data.text.tokenpack import FEW, VAL_EVERY, PackedPart, TokenPack
from penstock.errors import DataError


class TokenSource(TextSource):
    """Windows of `length` tokens, each begun `stride` tokens after the previous one. Documents follow each other, each
    ended by the tokenizer's `end`, which separates them in a batch.

    Unless the data is packed, windows restart with each document, whose last window is padded with −1. `around` are the
    special tokens that a task puts around a window.
    """

    def __init__(
        self, data: DataConfig, split: Split, texts: list[tuple[_SplitText, float]], tokenizer: Tokenizer, *,
        length: int, stride: int, around: int,
    ) -> None:  # fmt: skip
        super().__init__(data, split, texts, tokenizer)
        self.length, self.stride, self.packed = length, stride, data.packed
        self.sample = np.dtype((np.int32, (length,)))
        if self.packed:
            for text in self.tables:
                if text.size < length:
                    raise DataError(
                        f"{text.name} has {text.size:,} tokens, fewer than one sample of {length:,}. Give it more "
                        "text, or make the model's length smaller."
                    )
            self.mix([(text.size - length) // stride + 1 for text in self.tables])
            return
        self._pieces = [text.pieces(length, stride) for text in self.tables]
        for text, pieces in zip(self.tables, self._pieces):
            if not len(pieces):
                raise DataError(
                    f"{text.name} has no document of more than {length - stride} tokens, so that there is nothing to "
                    "learn from it. Give it more text, or leave data.packed=false out."
                )
        self.mix([len(pieces) for pieces in self._pieces])
        self.lengths = self.by_sample([pieces[:, 1] - (length - stride) + around for pieces in self._pieces])

    @cached_property
    def unpacked_padding(self) -> float | None:  # type: ignore[override]
        """The share that `Source` describes. It reads the index of every document, and so is computed on first use."""
        if not self.packed:
            return None
        pieces = [text.pieces(self.length, self.stride)[:, 1] for text in self.tables]
        real = np.concatenate(pieces) - (self.length - self.stride)
        return 1 - int(real.sum()) / max(1, self.stride * len(real))

    @property
    def bytes_per_token(self) -> float:
        """Average bytes of UTF-8 text per token, for metrics in bits per byte."""
        tokens = sum(text.part.part.tokens for text in self.tables)
        return float(sum(text.part.part.text_bytes for text in self.tables) / max(1, tokens))

    @property
    def tokens(self) -> int:
        """Tokens of the split, over all sets."""
        return sum(text.size for text in self.tables)

    def load(self, index: int, out: Any) -> None:
        number, window = self.place(index)
        if self.packed:
            self.tables[number].read(window * self.stride, out)
            return
        begin, tokens = self._pieces[number][window].tolist()
        self.tables[number].read(begin, out[:tokens])
        out[tokens:] = PADDING


class _SplitText:
    """The documents of a split, concatenated: segments of a pack's tokens."""

    def __init__(self, name: str, part: PackedPart, segments: NDArray[np.int64]) -> None:
        """`segments` is (S, 2): where each begins and ends in the pack."""
        self.name = name
        self.part = part
        self._segments = segments
        self._starts = np.concatenate([[0], np.cumsum(segments[:, 1] - segments[:, 0])])
        self.size = int(self._starts[-1])

    def pieces(self, length: int, stride: int) -> NDArray[np.int64]:
        """The start and the number of tokens, (P, 2), of windows that restart with each document. A window without any
        token that the previous one lacks is left out."""
        ends = self.part.index["end"][:, -1].astype(np.int64)
        bounds = np.unique(np.concatenate([[0], ends, self._segments.ravel()]))
        lefts, segment = bounds[:-1], np.searchsorted(self._segments[:, 0], bounds[:-1], side="right") - 1
        inside = (segment >= 0) & (lefts < self._segments[segment, 1])
        documents = np.diff(bounds)[inside]  # their tokens
        begins = np.cumsum(documents) - documents
        counts = np.maximum(0, -(-(documents - (length - stride)) // stride))
        which = np.repeat(np.arange(len(documents)), counts)
        within = (np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)) * stride
        return np.stack([begins[which] + within, np.minimum(length, documents[which] - within)], axis=1)

    def read(self, start: int, out: NDArray[np.int32]) -> None:
        """Fill `out` from token `start` of the split on. Raises BadSample."""
        segment = int(np.searchsorted(self._starts, start, side="right")) - 1
        done = 0
        while done < len(out):
            begin, end = self._segments[segment].tolist()
            begin += start + done - int(self._starts[segment])
            count = min(len(out) - done, end - begin)
            out[done : done + count] = self.part.read(begin, begin + count)
            done += count
            segment += 1


def open_tokens(
    data: DataConfig, tokenizer: Tokenizer, split: Split, *, length: int, stride: int | None = None, around: int = 0
) -> TokenSource:  # fmt: skip
    """Open the windows of `length` tokens of a split, `stride` apart (none: `length`), as `TokenSource` describes.
    `auto` is `stdlib`. A window is a pure function of its number, and the order of windows is one of seed and epoch.
    Sources other than packs are tokenised once, with all cores, into the cache. Raises ConfigError and DataError."""
    data = data.filled("stdlib")
    packs = open_packs(data, tokenizer, "document")
    texts = [
        (_of_split(pack, split, source), weight) for (pack, weight), (source, _) in zip(packs, data.parts())
    ]
    return TokenSource(data, split, texts, tokenizer, length=length, stride=stride or length, around=around)


def _of_split(pack: TokenPack, split: Split, name: str) -> _SplitText:
    """The documents of a split: the pack's own, else one document in twenty, or the end of the text, is for val."""
    name = f"{name} ({split})"
    if len(pack.manifest.parts) == 2:
        part = pack.split(int(split == "val"))
        return _SplitText(name, part, np.array([[0, part.part.tokens]], np.int64))
    part = pack.split(0)
    if part.part.rows < FEW:
        cut = part.part.tokens - part.part.tokens // VAL_EVERY
        ends = [[0, cut]] if split == "train" else [[cut, part.part.tokens]]
        return _SplitText(name, part, np.array(ends, np.int64))
    index = part.index
    edges = np.concatenate([[0], index["end"][:, -1].astype(np.int64)])
    in_split = (index["key"] % VAL_EVERY == VAL_EVERY - 1) == (split == "val")
    # Adjacent documents make one segment.
    change = np.flatnonzero(np.diff(np.concatenate([[False], in_split, [False]]).astype(np.int8)))
    return _SplitText(name, part, edges[change].reshape(-1, 2))
