"""Samples of tables: single texts, pairs of them, or a text and its translation, each cut to a length and padded."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.config.run import DataConfig
from penstock.data.source import BadSample, Source, Split
from penstock.data.text.mixture import Mixture
from penstock.data.text.sources import open_packs
from penstock.data.text.tokenizers import Numbers, Tokenizer
from penstock.data.text.tokenpack import FEW, VAL_EVERY, PackedPart, TokenPack
from penstock.errors import ConfigError, DataError

RowForm = Literal["single", "pair", "translation", "two"]
_SMALL_EVERY = 5


class RowSource(Source):
    """Rows as a model takes them. Fields of a sample, by form:

    - `single`: tokens (L,) int32, length int32, label float32 or int64: `classify A separator`
    - `pair`: also segment int32, where the second text begins: `classify A separator B separator`
    - `translation`: source (L,), source_length, target (T,), target_length: `A end` and `B end`
    - `two`: first (L,), first_length, second (L,), second_length: each `classify A separator`

    What a tokenizer has no token for is left out. Texts that are too long are cut at their end, of a pair the longer.
    """

    policy = "data.bad_rows"

    def __init__(
        self,
        name: str,
        tables: list[tuple[_Table, float]],
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
        self.length, self.target_length = length, target_length
        self._tables = [table for table, _ in tables]
        self._frame = _Frame(tokenizer, form, length, target_length)
        self._mixture = Mixture([len(table) for table in self._tables], [weight for _, weight in tables])
        self.lengths = self._mixture.spread([self._frame.lengths(table.lengths()) for table in self._tables])
        self.sample = self._frame.sample(label=None if not tables[0][0].labelled else classes is not None)

    @property
    def padding_share(self) -> float:
        """How much of the samples is padding, where each is padded to the full length."""
        assert self.lengths is not None
        return 1 - float(self.lengths.mean()) / self._frame.most

    def __len__(self) -> int:
        return self._mixture.samples

    def load(self, index: int, out: Any) -> None:
        number, row = self._mixture.place(index)
        table = self._tables[number]
        self._frame.write(out, table.texts(row))
        if table.labelled:
            out["label"] = table.label(row)


class _Frame:
    """How the tokens of a row's texts become a sample."""

    def __init__(self, tokenizer: Tokenizer, form: RowForm, length: int, target_length: int) -> None:
        self._pad = tokenizer.pad
        self._form = form
        self._length, self._target = length, target_length or length
        separator = tokenizer.separator if tokenizer.separator is not None else tokenizer.end
        self._begin = _maybe(tokenizer.classify if tokenizer.classify is not None else tokenizer.begin)
        self._between = _maybe(separator)
        self._end = _maybe(tokenizer.end)
        if form == "translation" and tokenizer.end is None:
            raise ConfigError(
                f"The tokenizer {tokenizer.name} has no token that ends a translation. Name one as eos_token in its "
                "tokenizer_config.json, or choose another with data.tokenizer."
            )
        self._extra = len(self._begin) + len(self._between) * (2 if form == "pair" else 1)
        if min(self._length, self._target) <= self._extra:
            raise ConfigError(
                f"Rows of {min(self._length, self._target)} tokens have no room for text; make them longer."
            )
        self.most = self._length + (
            self._target if form == "translation" else self._length if form == "two" else 0
        )

    def sample(self, *, label: bool | None) -> np.dtype[Any]:
        """`label`: whether it is a class; None without."""
        one, other = (np.int32, (self._length,)), (np.int32, (self._target,))
        fields: list[tuple[str, Any]]
        if self._form == "translation":
            fields = [
                ("source", one),
                ("source_length", np.int32),
                ("target", other),
                ("target_length", np.int32),
            ]
        elif self._form == "two":
            fields = [
                ("first", one),
                ("first_length", np.int32),
                ("second", one),
                ("second_length", np.int32),
            ]
        else:
            fields = [("tokens", one), ("length", np.int32)]
            fields += [("segment", np.int32)] if self._form == "pair" else []
            fields += [("label", np.int64 if label else np.float32)] if label is not None else []
        return np.dtype(
            [(name, *((kind,) if not isinstance(kind, tuple) else kind)) for name, kind in fields]
        )

    def lengths(self, texts: NDArray[np.int64]) -> NDArray[np.int32]:
        """(N,) tokens of each sample, of the texts' lengths (N, texts)."""
        if self._form in ("single", "pair"):
            found = np.minimum(texts.sum(1) + self._extra, self._length)
        elif self._form == "two":
            found = np.minimum(texts + self._extra, self._length).sum(1)
        else:
            limits = np.array([self._length, self._target])
            found = np.minimum(texts + len(self._end), limits).sum(1)
        return np.asarray(found, np.int32)

    def write(self, out: Any, texts: list[NDArray[Any]]) -> None:
        if self._form == "translation":
            for name, text, room in zip(("source", "target"), texts, (self._length, self._target)):
                self._put(out, name, f"{name}_length", [text[: room - len(self._end)], self._end])
        elif self._form == "two":
            room = self._length - self._extra
            for name, text in zip(("first", "second"), texts):
                self._put(out, name, f"{name}_length", [self._begin, text[:room], self._between])
        elif self._form == "single":
            room = self._length - self._extra
            self._put(out, "tokens", "length", [self._begin, texts[0][:room], self._between])
        else:
            first, second = _cut_longer(len(texts[0]), len(texts[1]), self._length - self._extra)
            pieces = [self._begin, texts[0][:first], self._between, texts[1][:second], self._between]
            self._put(out, "tokens", "length", pieces)
            out["segment"] = len(self._begin) + first + len(self._between)

    def _put(self, out: Any, name: str, length: str, pieces: list[NDArray[Any]]) -> None:
        row = out[name]
        at = 0
        for piece in pieces:
            row[at : at + len(piece)] = piece
            at += len(piece)
        row[at:] = self._pad
        out[length] = at


def _maybe(number: int | None) -> Numbers:
    return np.array([] if number is None else [number], np.int32)


def _cut_longer(first: int, second: int, room: int) -> tuple[int, int]:
    """Lengths of a pair that fits: what is too much is taken from the longer, until both are as long."""
    over = first + second - room
    if over <= 0:
        return first, second
    shorter = min(first, second, room // 2)
    if first <= second:
        return shorter, room - shorter
    return room - shorter, shorter


class _Table:
    """The rows of a split in one pack."""

    def __init__(
        self, part: PackedPart, rows: NDArray[np.int64], labelled: bool, classes: int | None
    ) -> None:
        self._part = part
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
        return [self._part.read(int(start), int(end)) for start, end in self._spans[row]]

    def label(self, row: int) -> float:
        """A number, or that of a class. Raises BadSample for one that is neither."""
        value = float(self._labels[row])
        due = "a finite number" if self._classes is None else f"one of {self._classes} classes"
        if not (math.isfinite(value) if self._classes is None else value in range(self._classes)):
            raise BadSample(self._part.row(int(self._rows[row])), f"its label is {value:g}, and not {due}")
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
    labelled = form in ("single", "pair")
    kinds = {(pack.manifest.labels, pack.manifest.classes) for pack, _ in packs}
    if labelled and len(kinds) > 1:
        raise DataError(f"The sets of {data.source} have different classes. Give all the same labels.")
    first = packs[0][0].manifest
    classes = first.classes if labelled and first.labels == "classes" else None
    tables = [(_of_split(pack, split, labelled), weight) for pack, weight in packs]
    for (table, _), (source, _) in zip(tables, data.parts()):
        if not len(table):
            raise DataError(f"{source} has no rows for {split}. Give it more, or files named train and val.")
    rows = RowSource(
        f"{data.source} ({split})", tables, tokenizer,
        form=form, length=length, target_length=target_length, classes=classes,
    )  # fmt: skip
    rows.bad_samples = data.bad_rows
    rows.group_by_length = data.group_by_length
    return rows


def _of_split(pack: TokenPack, split: Split, labelled: bool) -> _Table:
    """The rows of a split: the pack's own, else one row in twenty is for val, chosen by its first text, so that rows
    that share it stay together.
    """
    classes = len(pack.manifest.classes) if pack.manifest.labels == "classes" else None
    if len(pack.manifest.parts) == 2:
        part = pack.split(int(split == "val"))
        return _Table(part, np.arange(part.part.rows), labelled, classes)
    part = pack.split(0)
    if part.part.rows < FEW:
        is_val = np.arange(part.part.rows) % _SMALL_EVERY == _SMALL_EVERY - 1
    else:
        is_val = part.index["key"] % VAL_EVERY == VAL_EVERY - 1
    return _Table(part, np.flatnonzero(is_val == (split == "val")), labelled, classes)
