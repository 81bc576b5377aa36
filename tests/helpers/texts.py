"""A tokenizer of single letters and sources of text in memory, for tests of tasks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.data.source import Source
from penstock.data.text.tokenizers import Tokenizer

LETTERS = " abcdefghijklmnopqrstuvwxyz0123456789.-:=+"
SPECIALS = 20


class Letters(Tokenizer):
    """Numbers 0 … 19 are special, then one for each letter; a word begins after a space."""

    size = SPECIALS + len(LETTERS)
    name = fingerprint = "letters"
    pad, unknown, begin, end, separator, classify, mask = 0, 1, 2, 3, 4, 5, 6
    sentinels = tuple(range(7, SPECIALS))

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        return [np.array([SPECIALS + LETTERS.index(c) for c in text], np.int32) for text in texts]

    def decode(self, numbers: Sequence[int]) -> str:
        return "".join(LETTERS[n - SPECIALS] for n in numbers if SPECIALS <= n < SPECIALS + len(LETTERS))

    def word_starts(self) -> NDArray[np.bool_]:
        starts = np.zeros(self.size, bool)
        starts[SPECIALS] = True
        return starts

    def save(self, folder: Path, rows: int = 0) -> None:
        raise NotImplementedError("nothing in these tests writes a tokenizer")


class Windows(Source):
    """Windows of `length` tokens of one text, `stride` apart."""

    bytes_per_token = 1.0

    def __init__(self, text: str, length: int, *, stride: int | None = None, ends: int = 0) -> None:
        self.name = "windows"
        self.tokenizer = Letters()
        self.tokens = self.tokenizer.encode([text])[0]
        if ends:
            self.tokens[ends::ends] = Letters.end
        self.length, self.stride = length, stride or length
        self.sample = np.dtype((np.int32, (length,)))

    def __len__(self) -> int:
        return (len(self.tokens) - self.length) // self.stride + 1

    def load(self, index: int, out: Any) -> None:
        start = index * self.stride
        out[...] = self.tokens[start : start + self.length]


class Rows(Source):
    """Rows of several texts each, cut to `lengths` and padded; labels are classes, or numbers without `classes`."""

    def __init__(
        self, texts: dict[str, tuple[Sequence[str], int]], labels: Sequence[float] | None = None,
        classes: tuple[str, ...] | None = None, *, ended: tuple[str, ...] = (),
        extra: dict[str, Sequence[int]] | None = None,
    ) -> None:  # fmt: skip
        self.name, self.classes, self.tokenizer = "rows", classes, Letters()
        self._columns: dict[str, NDArray[Any]] = {}
        fields: list[Any] = []
        for name, (rows, length) in texts.items():
            table = np.zeros((len(rows), length), np.int32)
            lengths = np.zeros(len(rows), np.int32)
            for row, numbers in enumerate(self.tokenizer.encode(rows)):
                numbers = np.append(numbers, Letters.end)[:length] if name in ended else numbers[:length]
                table[row, : len(numbers)], lengths[row] = numbers, len(numbers)
            said = "length" if name == "tokens" else f"{name}_length"
            self._columns |= {name: table, said: lengths}
            fields += [(name, np.int32, (length,)), (said, np.int32)]
        for name, values in (extra or {}).items():
            self._columns[name] = np.array(values, np.int32)
            fields.append((name, np.int32))
        if labels is not None:
            kind = np.float32 if classes is None else np.int64
            self._columns["label"] = np.array(labels, kind)
            fields.append(("label", kind))
        self.sample = np.dtype(fields, align=True)
        self.lengths = next(iter(self._columns.values()))

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def load(self, index: int, out: Any) -> None:
        for name, column in self._columns.items():
            out[name] = column[index]


TEXT = " ".join(f"{i} + {i + 1} = {2 * i + 1}. the quick brown fox no {i} runs." for i in range(60))
