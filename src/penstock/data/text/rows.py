"""Samples of tables: single texts, pairs of them, or a text and its translation, each cut to a length and padded."""

from __future__ import annotations

import math
import re
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.config.run import DataConfig
from penstock.data.source import BadSample, Split
from penstock.data.text.mixture import Mixture, TextSource
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
    - `translation`: source (L,), source_length, target (T,), target_length: `A end` and `B end`, each behind what the
      tokenizer's `opening` says; and label int64, where all sets have labels by the same names
    - `two`: first (L,), first_length, second (L,), second_length: each `classify A separator`

    A tokenizer's own template overrides this. What it has no token for is left out. Texts that are too long are cut at
    their end, of a pair the longer.
    """

    def __init__(
        self,
        name: str,
        tables: list[tuple[RowTable, float]],
        tokenizer: Tokenizer,
        *,
        form: RowForm,
        length: int,
        target_length: int,
        classes: tuple[str, ...] | None,
    ) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.form = form
        self.classes = classes
        """Names of the classes; None where labels are numbers, or there are none."""
        self.length = length
        self._tables = [table for table, _ in tables]
        self._frame = _Frame(tokenizer, form, length, target_length)
        self._mixture = Mixture([len(table) for table in self._tables], [weight for _, weight in tables])
        self.lengths = self._mixture.by_sample(
            [self._frame.lengths(table.lengths()) for table in self._tables]
        )
        self.sample = self._frame.sample(label=None if not tables[0][0].labelled else classes is not None)

    @property
    def padding_share(self) -> float:
        """Share of padding in samples that are padded to the full length."""
        assert self.lengths is not None
        return 1 - float(self.lengths.mean()) / self._frame.total_length

    def renumber(self, classes: tuple[str, ...], numbers: NDArray[np.int64]) -> None:
        """Take the numbers of a model's classes, (own classes,), in place of the source's own."""
        self.classes = classes
        for table in self._tables:
            table.renumber(numbers, len(classes))

    def load(self, index: int, out: Any) -> None:
        number, row = self._mixture.place(index)
        table = self._tables[number]
        self._frame.write(out, table.texts(row))
        if table.labelled:
            out["label"] = table.label(row)


_SIDES = {"translation": ("source", "target"), "two": ("first", "second")}
"""Fields of the texts of a row that do not go into one sample of tokens."""


class _Frame:
    """Layout of a sample: how the tokens of a row's texts are put together."""

    def __init__(self, tokenizer: Tokenizer, form: RowForm, length: int, target_length: int) -> None:
        self._pad, self._form = tokenizer.pad, form
        self._names = _SIDES.get(form, ("tokens",))
        self._limits = [length, (target_length or length) if form == "translation" else length][
            : len(self._names)
        ]
        frames = [tokenizer.frame(2 if form == "pair" else 1)] * len(self._names)
        if form == "translation":
            frames = [
                Frame(opening, (), _end_of(tokenizer))
                for opening in (tokenizer.opening(), tokenizer.target_opening())
            ]
        self._frames = [[np.array(part, np.int32) for part in frame] for frame in frames]
        self._rooms = [limit - frame.tokens for limit, frame in zip(self._limits, frames, strict=True)]
        if min(self._rooms) <= 0:
            raise ConfigError(f"Rows of {min(self._limits)} tokens have no room for text; make them longer.")
        self.total_length = sum(self._limits)

    def sample(self, *, label: bool | None) -> np.dtype[Any]:
        """`label`: whether it is a class; None without."""
        fields: list[tuple[Any, ...]] = []
        for name, limit in zip(self._names, self._limits, strict=True):
            fields += [(name, np.int32, (limit,)), (_length_of(name), np.int32)]
        fields += [("segment", np.int32)] if self._form == "pair" else []
        fields += [("label", np.int64 if label else np.float32)] if label is not None else []
        return np.dtype(fields)

    def lengths(self, texts: NDArray[np.int64]) -> NDArray[np.int32]:
        """(N,) tokens of each sample, of the texts' lengths (N, texts)."""
        if len(self._names) == 1:
            texts = texts.sum(1, keepdims=True)
        limits, rooms = np.array(self._limits), np.array(self._rooms)
        return np.asarray((np.minimum(texts, rooms) + limits - rooms).sum(1), np.int32)

    def write(self, out: Any, texts: list[NDArray[Any]]) -> None:
        if self._form == "pair":
            (before, between, behind), room = self._frames[0], self._rooms[0]
            first, second = _cut_longer(len(texts[0]), len(texts[1]), room)
            self._put(out, "tokens", [before, texts[0][:first], between, texts[1][:second], behind])
            out["segment"] = len(before) + first + len(between)
            return
        for name, (before, _, behind), text, room in zip(
            self._names, self._frames, texts, self._rooms, strict=True
        ):
            self._put(out, name, [before, text[:room], behind])

    def _put(self, out: Any, name: str, pieces: list[NDArray[Any]]) -> None:
        row = out[name]
        at = 0
        for piece in pieces:
            row[at : at + len(piece)] = piece
            at += len(piece)
        row[at:] = self._pad
        out[_length_of(name)] = at


def _length_of(name: str) -> str:
    """The name of the field with the number of tokens of another field."""
    return "length" if name == "tokens" else f"{name}_length"


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

    def __init__(
        self, part: PackedPart, rows: NDArray[np.int64], labelled: bool, classes: int | None
    ) -> None:
        self.part = part
        self._rows = rows
        self.labelled, self._classes = labelled, classes
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

    def renumber(self, numbers: NDArray[np.int64], classes: int) -> None:
        """Replace class numbers; values that are no class stay as they are."""
        known = np.isin(self._labels, np.arange(len(numbers)))
        self._labels[known] = numbers[self._labels[known].astype(np.int64)]
        self._classes = classes

    def label(self, row: int) -> float:
        """The value of a label: a number, or the number of a class. Raises BadSample for anything else."""
        value = float(self._labels[row])
        due = "a finite number" if self._classes is None else f"one of {self._classes} classes"
        if not (math.isfinite(value) if self._classes is None else value in range(self._classes)):
            raise BadSample(self.part.row(int(self._rows[row])), f"its label is {value:g}, and not {due}")
        return value


def open_rows(
    data: DataConfig,
    tokenizer: Tokenizer,
    split: Split,
    *,
    form: RowForm,
    length: int,
    target_length: int = 0,
) -> RowSource:
    """Rows of a split, of at most `length` tokens (translations: `target_length` for the target). `auto` is `numbers`.

    Raises ConfigError and DataError.
    """
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
        f"{data.source} ({split})", tables_of(packs, data, split, labelled=labelled), tokenizer,
        form=form, length=length, target_length=target_length, classes=classes,
    )  # fmt: skip
    rows.label_names = (classes or ()) if named else ()
    rows.labels_in_prompts = all(_LABELLED_PROMPTS.match(source) for source, _ in data.parts())
    return rows.under(data)


def tables_of(
    packs: list[tuple[TokenPack, float]],
    data: DataConfig,
    split: Split,
    *,
    labelled: bool = False,
    unit: str = "rows",
) -> list[tuple[RowTable, float]]:
    """The rows of a split in each pack, and the pack's weight. Raises DataError where a pack has none; `unit` names
    them."""
    tables = [(table_of(pack, split, labelled=labelled), weight) for pack, weight in packs]
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


def table_of(pack: TokenPack, split: Split, *, labelled: bool = False) -> RowTable:
    """The rows of a split: the pack's own, else one row in twenty is for val, chosen by its first text (of few rows
    every fifth text), so that rows that share it stay together. None is for val where that would be most of the rows.
    """
    classes = len(pack.manifest.classes) if pack.manifest.labels == "classes" else None
    if len(pack.manifest.parts) == 2:
        part = pack.split(int(split == "val"))
        return RowTable(part, np.arange(part.part.rows), labelled, classes)
    part = pack.split(0)
    is_val = part.index["key"] % VAL_EVERY == VAL_EVERY - 1
    if part.part.rows < FEW:
        _, first, same = np.unique(part.index["key"], return_index=True, return_inverse=True)
        is_val = np.argsort(np.argsort(first))[same] % _SMALL_EVERY == _SMALL_EVERY - 1
    if is_val.mean() > 0.5:
        is_val[:] = False
    return RowTable(part, np.flatnonzero(is_val == (split == "val")), labelled, classes)
