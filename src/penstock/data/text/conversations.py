"""Samples of conversations whose answers are learned: one conversation in each sample, several that fit, or two to
compare."""

from __future__ import annotations

import bisect
import logging
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.boundary.files import read_text
from penstock.config.run import DataConfig
from penstock.data.source import Split
from penstock.data.text.chat import PLAIN, template_of
from penstock.data.text.mixture import TextSource
from penstock.data.text.rows import RowTable, tables_of
from penstock.data.text.sources import open_packs
from penstock.data.text.tokenizers import Tokenizer
from penstock.errors import DataError

_log = logging.getLogger(__name__)


class ChatSource(TextSource):
    """Conversations of at most `length` tokens. Fields of a sample: tokens (L,) int32; learned (L,) int8, 1 for a token
    of an answer; document (L,) int32, which conversation a token is of, from 0 on, and −1 for padding. If `packed`, a
    sample holds several whole conversations, packed by best fit with the longest first."""

    def __init__(
        self, data: DataConfig, split: Split, tables: list[tuple[RowTable, float]], tokenizer: Tokenizer, *,
        length: int,
    ) -> None:  # fmt: skip
        super().__init__(data, split, tables, tokenizer)
        self.length, self.packed = length, data.packed
        self._lengths = [np.minimum(table.lengths()[:, 0], length) for table in self.tables]
        learnable = [_learnable(self.name, table, length) for table in self.tables]
        self._samples = [
            fitted(lengths[rows], rows, length) if data.packed else [row[None] for row in rows]
            for lengths, rows in zip(self._lengths, learnable)
        ]
        self.mix([len(samples) for samples in self._samples])
        kinds = {"tokens": np.int32, "learned": np.int8, "document": np.int32}
        self.sample = np.dtype([(name, kind, (length,)) for name, kind in kinds.items()])
        if not data.packed:
            self.lengths = self.by_sample([lengths[rows] for lengths, rows in zip(self._lengths, learnable)])

    @cached_property
    def unpacked_padding(self) -> float | None:  # type: ignore[override]
        """The share that `Source` describes."""
        if not self.packed:
            return None
        return 1 - float(np.mean([lengths.mean() for lengths in self._lengths])) / self.length

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Special tokens that end the first conversations' answers; the tokenizer's own `end` may differ."""
        last: set[int] = set()
        for tokens, learned in (
            table.texts(row) for table in self.tables for row in range(min(len(table), 100))
        ):
            last.update(tokens[np.flatnonzero(np.diff(learned.astype(np.int8), append=0) < 0)].tolist())
        words, special = self.tokenizer.words(), {*self.tokenizer.special_words()}
        return tuple(sorted(number for number in last if words[number] in special))

    def load(self, index: int, out: Any) -> None:
        number, place = self.place(index)
        at = 0
        out["tokens"], out["learned"], out["document"] = self.tokenizer.pad, 0, -1
        for document, row in enumerate(self._samples[number][place].tolist()):
            tokens, learned = self.tables[number].texts(row)
            end = at + min(len(tokens), self.length)
            out["tokens"][at:end] = tokens[: end - at]
            out["learned"][at + 1 : end] = learned[1 : end - at]  # nothing comes before a first token
            out["document"][at:end] = document
            at = end


class PreferenceSource(TextSource):
    """Two conversations that share their beginning, of at most `length` tokens each. Fields of a sample, with the
    chosen one in row 0: tokens (2, L) int32; learned (2, L) int8, 1 for a token of the answers after the shared
    beginning; length (2,) int32."""

    def __init__(
        self, data: DataConfig, split: Split, tables: list[tuple[RowTable, float]], tokenizer: Tokenizer, *,
        length: int,
    ) -> None:  # fmt: skip
        super().__init__(data, split, tables, tokenizer)
        self.length = length
        self._rows = [_learnable(self.name, table, length) for table in self.tables]
        self.mix([len(rows) for rows in self._rows])
        longest = [table.lengths()[:, ::2].max(axis=1).clip(max=length) for table in self.tables]
        self.lengths = self.by_sample([lengths[rows] for lengths, rows in zip(longest, self._rows)])
        self.sample = np.dtype(
            [("tokens", np.int32, (2, length)), ("learned", np.int8, (2, length)), ("length", np.int32, (2,))]
        )

    def load(self, index: int, out: Any) -> None:
        number, place = self.place(index)
        texts = self.tables[number].texts(int(self._rows[number][place]))
        out["tokens"], out["learned"] = self.tokenizer.pad, 0
        for side in range(2):
            tokens, learned = (part[: self.length] for part in texts[2 * side : 2 * side + 2])
            out["tokens"][side, : len(tokens)] = tokens
            out["learned"][side, 1 : len(tokens)] = learned[1:]  # nothing comes before a first token
            out["length"][side] = len(tokens)


def _learnable(name: str, table: RowTable, length: int) -> NDArray[np.int64]:
    """Rows whose conversations all have tokens to learn within the length, and differ there. Raises DataError."""
    long = np.flatnonzero((table.lengths()[:, ::2] > length).any(axis=1))
    without, alike = [], []
    for row in long.tolist():
        texts = [part[:length] for part in table.texts(row)]
        if not all(part[1:].any() for part in texts[1::2]):
            without.append(row)
        elif len(texts) == 4 and np.array_equal(texts[0], texts[2]):
            alike.append(row)
    if len(long):
        _log.warning(
            "%s: %d of %d conversations have more than %d tokens; they are cut at their end, and %d that then have "
            "no answer are left out.", name, len(long), len(table), length, len(without),
        )  # fmt: skip
    if alike:
        _log.warning(
            "%s: %d of %d pairs are left out, because their first %d tokens are the same; make model.sequence larger.",
            name, len(alike), len(table), length,
        )  # fmt: skip
    if len(without) + len(alike) == len(table):
        raise DataError(
            f"{name} has no {'pair of different answers' if alike else 'conversation with an answer'} within its first "
            f"{length:,} tokens, of {len(table):,}; make model.sequence larger, or give it more."
        )
    return np.setdiff1d(np.arange(len(table)), [*without, *alike])


def fitted(lengths: NDArray[np.int64], rows: NDArray[np.int64], room: int) -> list[NDArray[np.int64]]:
    """Group rows of these lengths by best fit, the longest first, so that no group exceeds `room`. Groups are in the
    order of their longest row."""
    groups: list[list[int]] = []
    rooms: list[int] = []  # what groups have left, sorted
    having: dict[int, list[int]] = {}
    for place in np.argsort(-lengths, kind="stable"):
        length = int(lengths[place])
        at = bisect.bisect_left(rooms, length)
        if at == len(rooms):
            room_left, group = room, len(groups)
            groups.append([])
        else:
            room_left = rooms[at]
            group = having[room_left].pop()
            if not having[room_left]:
                del having[room_left], rooms[at]
        groups[group].append(int(rows[place]))
        if remaining := room_left - length:
            if remaining not in having:
                bisect.insort(rooms, remaining)
                having[remaining] = []
            having[remaining].append(group)
    return [np.array(group, np.int64) for group in groups]


def open_conversations(data: DataConfig, tokenizer: Tokenizer, split: Split, *, length: int) -> ChatSource:
    """Conversations of a split, cut after `length` tokens. Raises ConfigError and DataError."""
    tables = tables_of(open_packs(data, tokenizer, "chat"), data, split, unit="conversations")
    return ChatSource(data, split, tables, tokenizer, length=length)


def open_preferences(
    data: DataConfig, tokenizer: Tokenizer, split: Split, *, length: int
) -> PreferenceSource:
    """Pairs of conversations of a split, each cut after `length` tokens. Raises ConfigError and DataError."""
    tables = tables_of(open_packs(data, tokenizer, "preferences"), data, split, unit="conversations")
    return PreferenceSource(data, split, tables, tokenizer, length=length)


def give_template(tokenizer: Tokenizer, template: str) -> None:
    """Give a tokenizer the chat template that `data.template` names; with `auto`, a plain one if it has none.

    Raises ConfigError for an invalid template, and DataError for an unreadable file."""
    if template != "auto":
        tokenizer.chat_template = read_text(Path(template), "The chat template", limit=1 << 20)
    elif tokenizer.chat_template is None:
        _log.warning(
            "The tokenizer %s has no chat template; turns are written as <|user|>, a line, the text and %s. Name "
            "another with data.template.", tokenizer.name, tokenizer.spelled()["eos_token"] or "nothing",
        )  # fmt: skip
        tokenizer.chat_template = PLAIN
    template_of(tokenizer)
