"""The columns of a table that hold texts and labels, and checks of their rows."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.boundary.files import quoted
from penstock.data.text.build import Bad, RowOrBad, Shape, TextRow
from penstock.data.text.messages import BESIDE, conversation_of
from penstock.errors import DataError

_log = logging.getLogger(__name__)

Form = Literal["document", "single", "pair", "translation", "two", "chat", "preferences"]
CHATS: tuple[Form, ...] = ("chat", "preferences")
SHAPES: dict[Form, tuple[int, bool]] = {
    "document": (1, False), "single": (1, True), "pair": (2, True), "translation": (2, False), "two": (2, False),
    "chat": (2, False), "preferences": (4, False),
}  # fmt: skip
"""Texts in a row, and whether it has a label. A chat has tokens and marks of the tokens to learn, preferences have both
for two conversations."""


@dataclass(frozen=True)
class Content:
    """The rows of one source."""

    parts: list[Iterator[RowOrBad]]
    """Train and val, or everything."""
    identity: list[object]
    """Values that change when the rows do, and that JSON can hold."""
    bytes: int | None = None
    """Approximate bytes of text, for a progress bar."""
    labels: bool = False
    """Whether its rows have labels, even where their form needs none."""


_ABSENT = ("-", "nan", "none")
"""Words in CSV and TSV files that mean a missing label."""
USUAL_COLUMNS: dict[str, tuple[tuple[str, ...], ...]] = {
    "document": (("text",), ("content",), ("document",), ("code",), ("body",)),
    "single": (("text", "label"), ("sentence", "label"), ("review", "label"), ("text", "score"), ("sentence", "score")),
    "pair": (
        ("sentence1", "sentence2", "gold_label"), ("sentence1", "sentence2", "label"),
        ("premise", "hypothesis", "label"), ("premise", "hypo", "label"), ("question1", "question2", "label"),
        ("question1", "question2", "is_duplicate"), ("question", "sentence", "label"),
        ("sentence1", "sentence2", "score"), ("first", "second", "label"),
    ),
    "translation": (("source", "target"), ("src", "tgt"), ("input", "output")),
    "two": (
        ("anchor", "positive"), ("query", "positive"), ("question", "answer"), ("sentence1", "sentence2"),
        ("first", "second"), ("source", "target"),
    ),
    "chat": (
        ("messages",), ("conversations",), ("conversation",), ("instruction", "input", "output"),
        ("instruction", "output"), ("prompt", "completion"), ("prompt", "response"), ("instruction", "response"),
        ("question", "answer"), ("input", "output"),
    ),
    "preferences": (
        ("prompt", "chosen", "rejected"), ("question", "chosen", "rejected"),
        ("instruction", "input", "chosen", "rejected"), ("instruction", "chosen", "rejected"),
        ("conversations", "chosen", "rejected"), ("messages", "chosen", "rejected"), ("chosen", "rejected"),
    ),
}  # fmt: skip
"""Usual names of columns, by the form of rows. The first set that a table has is used."""


@dataclass(frozen=True)
class TextColumns:
    """The columns to read: names, or numbers from 1 for a table without names."""

    form: str
    wanted: tuple[str, ...]
    shape: Shape
    separator: str = "auto"
    encoding: str = "utf-8"
    all_labels: bool = False
    """Whether words in CSV and TSV files that usually mean a missing label are classes."""
    _reported: set[str] = field(default_factory=set, compare=False)
    """Columns that the log has named as not read."""

    @property
    def count(self) -> int:
        return self.shape.fields + self.shape.labels

    @property
    def by_number(self) -> bool:
        return bool(self.wanted) and all(re.fullmatch("[1-9][0-9]{0,8}", name) for name in self.wanted)

    def among(self, names: Sequence[str], path: str, *, nested: bool = True) -> list[str]:
        """All columns to read of a table with these names. Raises DataError where it lacks them."""
        main = self.main(names, path, nested=nested)
        return [*main, *self.beside(names, main, path)]

    def beside(self, names: Iterable[str], main: Sequence[str], path: str) -> list[str]:
        """Columns of conversations that are read in addition to `main`. Columns that are not read are logged once."""
        if self.form not in CHATS:
            return []
        roots = {name.partition(".")[0] for name in main}
        others = [name for name in names if name not in roots and name not in main]
        # A label is required where nobody named the columns; pairs have none.
        labelled = self.form == "chat" and not self.wanted
        read = [name for name in others if name in BESIDE and (labelled or BESIDE[name] != "label")]
        if unread := [name for name in others if name not in {*read, *self._reported}]:
            self._reported.update(unread)
            _log.warning("%s: columns that are not read: %s.", path, quoted(", ".join(unread), 300))
        return read

    def main(self, names: Sequence[str], path: str, *, nested: bool = True) -> list[str]:
        """The columns of texts and label, of a table with these names; if `nested`, columns may hold tables. Raises
        DataError where it lacks them."""
        usual = USUAL_COLUMNS[self.form]
        if self.form in ("single", "pair") and not self.shape.labels:
            usual = tuple(columns[: self.count] for columns in usual)
        is_chat = self.form in CHATS
        for columns in [self.wanted] if self.wanted else usual:
            there = {outer(name, names) if nested else name for name in columns} <= set(names)
            if there and (is_chat or len(columns) >= self.count):
                return list(columns if is_chat else columns[: self.count])
        needed = " and ".join(("text", "second text")[: self.shape.fields]) + " and label" * self.shape.labels
        if self.form == "chat":
            needed = "messages, or of a question and its answer"
        elif self.form == "preferences":
            needed = "chosen and rejected, with a prompt or without"
        wanted = ", ".join(map(quoted, self.wanted))
        problem = f"lacks {wanted}" if wanted else f"has no known columns of {needed}"
        message = f"{path} {problem}; its columns are {quoted(', '.join(names), 300)}."
        if len(names) == 1 and (parts := {c: names[0].count(c) for c in ";\t|," if c in names[0]}):
            likely = max(parts, key=lambda c: parts[c])
            word = "tab" if likely == "\t" else likely
            raise DataError(
                f"{message} If its cells are separated by {quoted(likely)}, set data.separator to {quoted(word)}."
            )
        if is_chat:
            raise DataError(f"{message} Name them with data.columns.")
        numbers = ",".join(map(str, range(1, self.count + 1)))
        raise DataError(
            f"{message} Name {self.count} with data.columns; where the first line holds no names, by number: "
            f"data.columns={numbers}."
        )


def outer(name: str, names: Collection[str]) -> str:
    """The column with this name, or for a name such as `translation.en` the column that holds it."""
    return name if name in names else name.partition(".")[0]


def value_in(table: Mapping[str, Any], name: str) -> Any:
    """A column's value, or for a name such as `translation.en` the value inside it; None where it is missing."""
    if name in table:
        return table[name]
    value: Any = table
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def row_of(
    values: Sequence[Any], names: Sequence[str], columns: TextColumns, where: str, line: int, *, cells: bool = False
) -> RowOrBad:  # fmt: skip
    """A row of a table as texts and label, or the reason why it cannot be used. In `cells` all values are text."""
    shape = columns.shape
    if shape.form == "chats":
        try:
            return TextRow(_conversation(values, names, columns), None, where, line)
        except (TypeError, ValueError) as problem:
            return Bad(where, line, str(problem))
    texts = []
    for name, value in zip(names[: shape.fields], values):
        if not isinstance(value, str) or (shape.form == "rows" and not value.strip()):
            empty = value is None or isinstance(value, str)
            fault = "is empty" if empty else f"is {type(value).__name__}, not text"
            return Bad(where, line, f"the column {quoted(name)} {fault}")
        texts.append(value)
    label = None
    if shape.labels:
        value = values[shape.fields]
        label = str(int(value)) if isinstance(value, bool) else str(value).strip()
        absent = value is None or not label or (isinstance(value, float) and math.isnan(value))
        doubtful = cells and label.lower() in _ABSENT and not columns.all_labels
        if absent or doubtful or len(label) > 200 or not label.isprintable():
            fault = f"the column {quoted(names[shape.fields])} holds no label: {quoted(label)}"
            remedy = "; if that is a class, set data.all_labels to true" if doubtful else ""
            return Bad(where, line, fault + remedy)
    return TextRow(tuple(texts), label, where, line)


def _conversation(values: Sequence[Any], names: Sequence[str], columns: TextColumns) -> tuple[str, ...]:
    """The parts of a conversation and its tools, in JSON. Raises ValueError with what is wrong, and TypeError."""
    main: dict[str, Any] = {}
    beside: dict[str, Any] = {}
    for name, value in zip(names, values):
        kind = BESIDE.get(name)
        if kind is None or (kind == "label" and columns.wanted):
            main[name] = value
        elif value is not None and beside.setdefault(kind, value) != value:
            raise ValueError(f"two of its columns hold a {kind}")
    conversation = conversation_of(
        list(main.values()), list(main), beside, compared=columns.form == "preferences"
    )
    return tuple(json.dumps(part, ensure_ascii=False) for part in (*conversation.parts, conversation.tools))
