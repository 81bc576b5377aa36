"""Classes of many inputs: images below folders, texts in tables. Unreadable inputs are listed with their problem."""

from __future__ import annotations

import csv
import io
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.boundary.files import quoted, shown, visible_files
from penstock.boundary.images import EXTENSIONS
from penstock.data.text.build import Bad, Shape
from penstock.data.text.columns import TextColumns
from penstock.data.text.documents import COMPRESSED, TABLES, read_files
from penstock.errors import ConfigError, DataError
from penstock.infer.encode import Classified, Classifier

_log = logging.getLogger(__name__)

FORMATS = (".csv", ".jsonl", ".json")
"""Suffixes of files that predictions can be written to."""
_TABLES = tuple(table + packing for table in TABLES for packing in ("", *COMPRESSED))


@dataclass(frozen=True, slots=True)
class ClassPrediction:
    """One input and, once it is classified, its class."""

    value: Any
    """A text, a pair of texts, or the path of an image; None for a row that cannot be read."""
    source: str = ""
    """The table and line that a text comes from."""
    problem: str = ""
    """Why the input has no class."""
    answer: Classified | None = None

    @property
    def where(self) -> str:
        """The input as text."""
        if self.value is None:
            return self.source
        return " | ".join(self.value) if isinstance(self.value, tuple) else str(self.value)

    def record(self, classes: Sequence[str]) -> dict[str, Any]:
        """The prediction as a JSON object, with the probability of each class by its name."""
        fields = {"input": self.value, **({"source": self.source} if self.source else {})}
        if self.answer is None:
            return {**fields, "problem": self.problem}
        shares = self.answer.probabilities
        names = classes if len(classes) == len(shares) == len(set(classes)) else map(str, range(len(shares)))
        return {**fields, "label": self.answer.label, "probabilities": dict(zip(names, shares))}


def expand_inputs(
    words: Sequence[str], *, images: bool, columns: Sequence[str] = ()
) -> list[ClassPrediction]:
    """Inputs named on the command line, not yet classified. For images, a folder stands for all images below it. For
    texts, a table stands for its rows, with one text each, or a pair if `columns` names two. Raises ConfigError for a
    folder without images."""
    if images and columns:
        raise ConfigError("The model reads images, which have no columns; leave --columns out.")
    inputs: list[ClassPrediction] = []
    for word in words:
        if images:
            inputs += map(ClassPrediction, _images_of(word))
        elif os.path.isfile(word) and word.lower().endswith(_TABLES):
            inputs += _rows_of(word, columns)
        else:
            inputs.append(ClassPrediction(word))
    if columns and not any(entry.source for entry in inputs):
        raise ConfigError(
            f"--columns names columns of a table, but no input is a table, ending in {', '.join(TABLES)}."
        )
    return inputs


def _images_of(word: str) -> list[str]:
    if not os.path.isdir(word):
        return [word]
    files = sorted(visible_files(word))
    images = [file for file in files if file.lower().endswith(EXTENSIONS)]
    if not images:
        raise ConfigError(f"There are no images in {shown(word)}; name a folder that has some.")
    if others := len(files) - len(images):
        _log.warning(
            "%s: %d other %s left out, because only %s are read.",
            shown(word), others, "file was" if others == 1 else "files were", ", ".join(EXTENSIONS),
        )  # fmt: skip
    return images


def _rows_of(table: str, columns: Sequence[str]) -> Iterator[ClassPrediction]:
    if len(columns) > 2:
        raise ConfigError(f"--columns names {len(columns)} columns; a classifier reads one text, or two.")
    form, fields = ("pair", 2) if len(columns) == 2 else ("single", 1)
    rows = read_files([Path(table)], TextColumns(form, tuple(columns), Shape(form="rows", fields=fields)))
    for row in rows:
        if isinstance(row, Bad):
            yield ClassPrediction(None, row.where, row.why)
        else:
            text = row.texts[0] if fields == 1 else row.texts
            yield ClassPrediction(text, f"{row.path}, line {row.line:,}")


def predict(classifier: Classifier, inputs: Sequence[ClassPrediction]) -> Iterator[ClassPrediction]:
    """Predictions in the order of the inputs, a batch at a time, including inputs that cannot be read."""
    for begin in range(0, len(inputs), classifier.batch):
        batch = inputs[begin : begin + classifier.batch]
        answers = iter(_answers(classifier, [entry.value for entry in batch if not entry.problem]))
        for entry in batch:
            if entry.problem:
                yield entry
            elif isinstance(answer := next(answers), str):
                yield replace(entry, problem=answer)
            else:
                yield replace(entry, answer=answer)


def _answers(classifier: Classifier, values: list[Any]) -> list[Classified | str]:
    """An answer for each value, or why there is none. A batch with an unreadable input is classified one by one."""
    if not values:
        return []
    try:
        return [*classifier.classify(values)]
    except DataError as problem:
        if len(values) == 1:
            return [str(problem)]
    return [answer for value in values for answer in _answers(classifier, [value])]


def require_format(output: Path) -> None:
    """Raise ConfigError for a file that predictions cannot be written to."""
    if output.suffix.lower() not in FORMATS:
        raise ConfigError(f"--output is {quoted(str(output))}, but must end in {', '.join(FORMATS)}.")


def written(predictions: Sequence[dict[str, Any]], output: Path) -> str:
    """Records as the content of a file, by its suffix: a table of label and probability, or JSON with the probabilities
    of all classes."""
    kind = output.suffix.lower()
    if kind == ".json":
        return json.dumps(predictions, indent=1, ensure_ascii=False) + "\n"
    if kind == ".jsonl":
        return "".join(f"{json.dumps(each, ensure_ascii=False)}\n" for each in predictions)
    first = ["source"] if any("source" in each for each in predictions) else []
    pairs = any(isinstance(each["input"], list | tuple) for each in predictions)
    columns = [*first, *(("first", "second") if pairs else ("input",)), "label", "probability", "problem"]
    text = io.StringIO()
    table = csv.DictWriter(text, columns, lineterminator="\n", restval="", extrasaction="ignore")
    table.writeheader()
    for each in predictions:
        texts = dict(zip(("first", "second"), each["input"] or ())) if pairs else {}
        probability = f"{max(each['probabilities'].values()):.6f}" if "label" in each else ""
        table.writerow(each | texts | {"probability": probability})
    return text.getvalue()
