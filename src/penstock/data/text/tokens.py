"""Samples of running text: windows of documents that follow each other."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.config.run import DataConfig
from penstock.data.source import Source, Split
from penstock.data.text.mixture import Mixture
from penstock.data.text.sources import open_packs
from penstock.data.text.tokenizers import Tokenizer
from penstock.data.text.tokenpack import FEW, VAL_EVERY, PackedPart, TokenPack
from penstock.errors import DataError


class TokenSource(Source):
    """Windows of `length` tokens, each begun `stride` after the one before. Documents follow each other, each with the
    tokenizer's `end` behind it, which is how a batch tells where one ends.
    """

    policy = "data.bad_rows"
    padding_share = 0.0
    """Windows hold nothing but text."""

    def __init__(
        self,
        name: str,
        texts: list[tuple[_Text, float]],
        tokenizer: Tokenizer,
        *,
        length: int,
        stride: int,
    ) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.length, self.stride = length, stride
        self._texts = [text for text, _ in texts]
        for text in self._texts:
            if text.size < length:
                raise DataError(
                    f"{text.name} has {text.size:,} tokens, fewer than one sample of {length:,}. Give it more text, or "
                    "make the model's length smaller."
                )
        counts = [(text.size - length) // stride + 1 for text in self._texts]
        self._mixture = Mixture(counts, [weight for _, weight in texts])
        self.sample = np.dtype((np.int32, (length,)))

    @cached_property
    def unpacked_padding(self) -> float:  # type: ignore[override]
        """As `Source` says it. Reads the index of every document, so it is worked out when asked for."""
        documents = np.concatenate([text.documents() for text in self._texts])
        padded = int(np.ceil(documents / self.stride).sum()) * self.stride
        return 1 - int(documents.sum()) / padded

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text in UTF-8 for each token, on average: what bits per byte are counted by."""
        tokens = sum(text.part.part.tokens for text in self._texts)
        return sum(text.part.part.text_bytes for text in self._texts) / max(1, tokens)

    @property
    def tokens(self) -> int:
        """Tokens of the split, over all sets."""
        return sum(text.size for text in self._texts)

    def __len__(self) -> int:
        return self._mixture.samples

    def load(self, index: int, out: Any) -> None:
        number, window = self._mixture.place(index)
        self._texts[number].read(window * self.stride, out)


class _Text:
    """The documents of a split in one row: segments of a pack's tokens."""

    def __init__(self, name: str, part: PackedPart, segments: NDArray[np.int64]) -> None:
        """`segments` is (S, 2): where each begins and ends in the pack."""
        self.name = name
        self.part = part
        self._segments = segments
        self._starts = np.concatenate([[0], np.cumsum(segments[:, 1] - segments[:, 0])])
        self.size = int(self._starts[-1])

    def documents(self) -> NDArray[np.int64]:
        """How many tokens each document has."""
        ends = self.part.index["end"][:, -1].astype(np.int64)
        bounds = np.unique(np.concatenate([[0], ends, self._segments.ravel()]))
        begins, segment = bounds[:-1], np.searchsorted(self._segments[:, 0], bounds[:-1], side="right") - 1
        here = (segment >= 0) & (begins < self._segments[segment, 1])
        return np.asarray(np.diff(bounds)[here], np.int64)

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
    data: DataConfig, tokenizer: Tokenizer, split: Split, *, length: int, stride: int | None = None
) -> TokenSource:
    """Windows of `length` tokens of a split, `stride` apart (none: side by side). `auto` is `stdlib`.

    A window is a pure function of its number, and so is the order of windows of seed and epoch. Tokenises what is no
    pack once, with all cores, and keeps the result in the cache. Raises ConfigError and DataError.
    """
    data = data.filled("stdlib")
    packs = open_packs(data, tokenizer, "document")
    texts = [
        (_of_split(pack, split, source), weight) for (pack, weight), (source, _) in zip(packs, data.parts())
    ]
    name = f"{data.source} ({split})"
    source = TokenSource(name, texts, tokenizer, length=length, stride=stride or length)
    source.bad_samples = data.bad_rows
    return source


def _of_split(pack: TokenPack, split: Split, name: str) -> _Text:
    """The documents of a split: the pack's own, else one document in twenty, or the end of the text, is for val."""
    name = f"{name} ({split})"
    if len(pack.manifest.parts) == 2:
        part = pack.split(int(split == "val"))
        return _Text(name, part, np.array([[0, part.part.tokens]], np.int64))
    part = pack.split(0)
    if part.part.rows < FEW:
        cut = part.part.tokens - part.part.tokens // VAL_EVERY
        ends = [[0, cut]] if split == "train" else [[cut, part.part.tokens]]
        return _Text(name, part, np.array(ends, np.int64))
    index = part.index
    edges = np.concatenate([[0], index["end"][:, -1].astype(np.int64)])
    mine = (index["key"] % VAL_EVERY == VAL_EVERY - 1) == (split == "val")
    # Documents that lie side by side make one segment.
    change = np.flatnonzero(np.diff(np.concatenate([[False], mine, [False]]).astype(np.int8)))
    return _Text(name, part, edges[change].reshape(-1, 2))
