"""Samples of tables: single texts, pairs of them, or a text and its translation, each cut to a length and padded."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.config.run import DataConfig
from penstock.data.source import BadSample, Split
from penstock.data.text.mixture import TextSource
from penstock.data.text.sources import open_packs
from penstock.data.text.tokenizers import Frame, Tokenizer
from penstock.data.text.tokenpack import FEW, VAL_EVERY, PackedPart, TokenPack
from penstock.errors import ConfigError, DataError, NoValidation

RowForm = Literal["single", "pair", "translation", "two"]
_SMALL_EVERY = 5
_LABELLED_PROMPTS = re.compile(r"(names|numbers:digits)(?![^:,])")
"""Sources whose texts begin with their label."""


class RowSource(TextSource):
    """Rows as a model takes them. Fields of a sample, by form:

    - `single`: tokens (L,) int32, length int32, label float32 or int64: `classify A separator`
    - `pair`: also segment int32, where the second text begins: `classify A separator B separator`
    - `translation`: source (L,), source_length, target (T,), target_length: `A end` and `B end`, each after the
      tokenizer's `opening`; and label int64, if all sets have labels of the same names
    - `two`: first (L,), first_length, second (L,), second_length: each `classify A separator`

    A tokenizer's own template overrides this. Special tokens that it lacks are left out. Long texts are cut at their
    end, in a pair the longer first.
    """

    def __init__(
        self, data: DataConfig, split: Split, tables: list[tuple[RowTable, float]], tokenizer: Tokenizer, *,
        form: RowForm, length: int, target_length: int, labelled: bool, classes: tuple[str, ...] | None,
    ) -> None:  # fmt: skip
        super().__init__(data, split, tables, tokenizer)
        self.form, self.length, self.labelled = form, length, labelled
        self.classes = classes
        """Names of the classes; None where labels are numbers, or there are none."""
        self._fields = _fields_of(tokenizer, form, length, target_length)
        self.mix([len(table) for table in self.tables])
        self.lengths = self.by_sample([self._lengths(table.lengths()) for table in self.tables])
        columns: list[tuple[Any, ...]] = []
        for field in self._fields:
            columns += [(field.name, np.int32, (field.limit,)), (field.length, np.int32)]
        columns += [("segment", np.int32)] if form == "pair" else []
        columns += [("label", np.float32 if classes is None else np.int64)] if labelled else []
        self.sample = np.dtype(columns)

    def renumber(self, classes: tuple[str, ...], numbers: NDArray[np.int64]) -> None:
        """Take the numbers of a model's classes, (own classes,), in place of the source's own."""
        self.classes = classes
        for table in self.tables:
            table.renumber(numbers)

    def _lengths(self, texts: NDArray[np.int64]) -> NDArray[np.int64]:
        """(N,) tokens of each sample, from the lengths of its texts (N, texts)."""
        if len(self._fields) == 1:
            texts = texts.sum(1, keepdims=True)
        frames = sum(field.frame.tokens for field in self._fields)
        return np.asarray(np.minimum(texts, [field.room for field in self._fields]).sum(1) + frames, np.int64)

    def load(self, index: int, out: Any) -> None:
        number, row = self.place(index)
        table: RowTable = self.tables[number]
        texts = table.texts(row)
        if self.form == "pair":
            (field,) = self._fields
            before, between, behind = field.frame
            first, second = _cut_longer(len(texts[0]), len(texts[1]), field.room)
            field.write(out, [before, texts[0][:first], between, texts[1][:second], behind])
            out["segment"] = len(before) + first + len(between)
        else:
            for field, text in zip(self._fields, texts, strict=True):
                field.write(out, [field.frame.before, text[: field.room], field.frame.behind])
        if self.labelled:
            out["label"] = table.label(row, None if self.classes is None else len(self.classes))


class _Field(NamedTuple):
    """A field of at most `limit` token numbers, including the special tokens of `frame`."""

    name: str
    limit: int
    frame: Frame
    pad: int

    @property
    def room(self) -> int:
        """The most tokens of text."""
        return self.limit - self.frame.tokens

    @property
    def length(self) -> str:
        """The name of the field with the number of tokens."""
        return "length" if self.name == "tokens" else f"{self.name}_length"

    def write(self, out: Any, pieces: Sequence[Sequence[int] | NDArray[Any]]) -> None:
        """Write pieces one after the other, and their number of tokens."""
        row, at = out[self.name], 0
        for piece in pieces:
            row[at : at + len(piece)] = piece
            at += len(piece)
        row[at:] = self.pad
        out[self.length] = at


def _fields_of(tokenizer: Tokenizer, form: RowForm, length: int, target_length: int) -> list[_Field]:
    """The fields of token numbers of a sample. Raises ConfigError where there is no room for text."""
    pad, frame = tokenizer.pad, tokenizer.frame(2 if form == "pair" else 1)
    fields = [_Field("tokens", length, frame, pad)]
    if form == "two":
        fields = [_Field(name, length, frame, pad) for name in ("first", "second")]
    elif form == "translation":
        source, target = (
            Frame(opening, (), _end_of(tokenizer))
            for opening in (tokenizer.opening(), tokenizer.target_opening())
        )
        fields = [
            _Field("source", length, source, pad),
            _Field("target", target_length or length, target, pad),
        ]
    if min(field.room for field in fields) <= 0:
        shortest = min(field.limit for field in fields)
        raise ConfigError(f"Rows of {shortest} tokens have no room for text; make them longer.")
    return fields


def _end_of(tokenizer: Tokenizer) -> tuple[int]:
    """The token that ends a translation. Raises ConfigError without it."""
    if tokenizer.end is None:
        raise ConfigError(
            f"The tokenizer {tokenizer.name} has no token that ends a translation. Name one as eos_token in its "
            "tokenizer_config.json, or choose another with data.tokenizer."
        )
    return (tokenizer.end,)


def _cut_longer(first: int, second: int, room: int) -> tuple[int, int]:
    """Lengths of a pair that fits: the longer text is cut, until both are equally long, then both."""
    over = first + second - room
    if over <= 0:
        return first, second
    shorter = min(first, second, room // 2)
    if first <= second:
        return shorter, room - shorter
    return room - shorter, shorter


class RowTable:
    """The rows of a split in one pack."""

    def __init__(self, part: PackedPart, rows: NDArray[np.int64]) -> None:
        self.part, self._rows = part, rows
        ends = part.index["end"].astype(np.int64)
        starts = np.concatenate([[0], ends.reshape(-1)[:-1]]).reshape(ends.shape)
        self._spans = np.stack([starts, ends], axis=-1)[rows]  # (N, texts, 2)
        self._labels = part.index["label"][rows]

    def __len__(self) -> int:
        return len(self._rows)

    def lengths(self) -> NDArray[np.int64]:
        spans: NDArray[np.int64] = self._spans
        return spans[..., 1] - spans[..., 0]

    def texts(self, row: int) -> list[NDArray[Any]]:
        return [self.part.read(int(start), int(end)) for start, end in self._spans[row]]

    def renumber(self, numbers: NDArray[np.int64]) -> None:
        """Replace class numbers; values that are no class stay as they are."""
        known = np.isin(self._labels, np.arange(len(numbers)))
        self._labels[known] = numbers[self._labels[known].astype(np.int64)]

    def label(self, row: int, classes: int | None) -> float:
        """A label: the number of one of the classes, or without classes any number. Raises BadSample."""
        value = float(self._labels[row])
        due = "a finite number" if classes is None else f"one of {classes} classes"
        if not (math.isfinite(value) if classes is None else value in range(classes)):
            raise BadSample(self.part.row(int(self._rows[row])), f"its label is {value:g}, and not {due}")
        return value


def open_rows(
    data: DataConfig, tokenizer: Tokenizer, split: Split, *, form: RowForm, length: int, target_length: int = 0
) -> RowSource:  # fmt: skip
    """Rows of a split, of at most `length` tokens (translations: `target_length` for the target). `auto` is `numbers`.
    Raises ConfigError and DataError."""
    data = data.filled("numbers")
    packs = open_packs(data, tokenizer, form)
    kinds = {(pack.manifest.labels, pack.manifest.classes) for pack, _ in packs}
    named = form == "translation" and len(kinds) == 1 and packs[0][0].manifest.labels == "classes"
    labelled = form in ("single", "pair") or named
    if labelled and len(kinds) > 1:
        raise DataError(f"The sets of {data.source} have different classes. Give all the same labels.")
    first = packs[0][0].manifest
    classes = first.classes if labelled and first.labels == "classes" else None
    rows = RowSource(
        data, split, tables_of(packs, data, split), tokenizer, form=form, length=length, target_length=target_length,
        labelled=labelled, classes=classes,
    )  # fmt: skip
    rows.label_names = (classes or ()) if named else ()
    rows.labels_in_prompts = all(_LABELLED_PROMPTS.match(source) for source, _ in data.parts())
    return rows


def tables_of(
    packs: list[tuple[TokenPack, float]], data: DataConfig, split: Split, *, unit: str = "rows"
) -> list[tuple[RowTable, float]]:
    """The rows of a split in each pack, and its weight. Raises DataError for a pack without any `unit`."""
    tables = [(_table_of(pack, split), weight) for pack, weight in packs]
    for (table, _), (pack, _), (source, _) in zip(tables, packs, data.parts()):
        if not len(table):
            if split == "val" and len(pack.manifest.parts) == 1:
                raise NoValidation(
                    f"{source} has too few different {'prompts' if unit == 'conversations' else 'first texts'} for a "
                    f"validation set: {unit} that share one stay together, and so all are for training. Name files "
                    "train and val to choose."
                )
            raise DataError(
                f"{source} has no {unit} for {split}. Give it more, or files named train and val."
            )
    return tables


def _table_of(pack: TokenPack, split: Split) -> RowTable:
    """The rows of a split: the pack's own, else one row in twenty is for val, chosen by its first text (of few rows
    every fifth text), so that rows that share it stay together. None is for val where that would be most of the rows.
    """
    if len(pack.manifest.parts) == 2:
        part = pack.split(int(split == "val"))
        return RowTable(part, np.arange(part.part.rows))
    part = pack.split(0)
    is_val = part.index["key"] % VAL_EVERY == VAL_EVERY - 1
    if part.part.rows < FEW:
        _, first, same = np.unique(part.index["key"], return_index=True, return_inverse=True)
        is_val = np.argsort(np.argsort(first))[same] % _SMALL_EVERY == _SMALL_EVERY - 1
    if is_val.mean() > 0.5:
        is_val[:] = False
    return RowTable(part, np.flatnonzero(is_val == (split == "val")))
