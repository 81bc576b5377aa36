"""The packs of tokens behind the name of a source: opened where it is a pack, else made once and kept in the cache."""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich import progress as bars
from rich.console import Console

from penstock.boundary.files import naming, quoted
from penstock.boundary.owners import distrust
from penstock.config.machine import cache_folder
from penstock.config.run import DataConfig
from penstock.data.hub import identity_of, open_dataset
from penstock.data.splits import hub_splits, split_files
from penstock.data.text.build import Bad, Progress, RowOrBad, Shape, TextRow, write_pack
from penstock.data.text.columns import CHATS, SHAPES, Content, Form, TextColumns, row_of, value_in
from penstock.data.text.documents import digest, files_of, read_files
from penstock.data.text.messages import without_nulls
from penstock.data.text.tokenizers import Tokenizer
from penstock.data.text.tokenpack import VERSION, TokenPack
from penstock.errors import ConfigError, EnvironmentProblem
from penstock.leftovers import make_public, temporary

_log = logging.getLogger(__name__)
_READING = 2
"""Raised when the same files are read as other rows, so that packs in the cache are made again."""


def open_packs(data: DataConfig, tokenizer: Tokenizer, form: Form) -> list[tuple[TokenPack, float]]:
    """The pack of each source, and its weight.

    Raises ConfigError for sources that are no text, DataError for those that cannot be read.
    """
    packs = []
    for source, weight in data.parts():
        kind, _, path = source.partition(":")
        pack = TokenPack(Path(path)) if kind == "pack" else _cached(kind, path, data, tokenizer, form)
        pack.require(tokenizer)
        _require_form(pack, form, tokenizer)
        packs.append((pack, weight))
    return packs


def shape_of(data: DataConfig, form: Form, *, labelled: bool = False) -> Shape:
    """The shape of a pack of this form, which has labels if the form needs them, or if rows are `labelled` anyway."""
    fields, labels = SHAPES[form]
    return Shape(
        form="documents" if form == "document" else "chats" if form in CHATS else "rows",
        fields=fields,
        labels=labels or labelled,
        targets=form == "translation",
        bad_rows=data.bad_rows,
    )


def content_of(kind: str, path: str, data: DataConfig, form: Form) -> Content:
    """The rows of a source other than a pack. Their identity is computed at once, the rows are read later. A third
    column of a translation is its label."""
    labelled = form == "translation" and len(data.columns) == 3
    shape = shape_of(data, form, labelled=labelled)
    columns = TextColumns(form, data.columns, shape, data.separator, data.encoding, data.all_labels)
    if kind in ("text", "pairs"):
        files = files_of(path)
        parts = split_files(files, path)
        sums = [[digest(file) for file in part] for part in parts]
        size = sum(file.stat().st_size for part in parts for file in part)
        plain = (data.separator, data.encoding) == ("auto", "utf-8")
        identity: list[object] = [sums] if plain else [sums, data.separator, data.encoding]
        return Content([read_files(part, columns) for part in parts], identity, size, labelled)
    if kind == "hf":
        return replace(hub_rows(path, data, columns), labels=labelled)
    from penstock.data.toy import numbers as toy

    if form in CHATS and kind in ("numbers", "names"):
        raise ConfigError(
            f"data.source={kind} holds no conversations, which this task takes; choose text:PATH or hf:NAME."
        )
    if kind == "stdlib":
        if form != "document":
            raise ConfigError(
                f"data.source=stdlib is text without rows, and this task takes rows ({form}); choose numbers, "
                "pairs:PATH, hf:NAME or pack:PATH."
            )
        return toy.standard_library()
    if kind == "numbers":
        return toy.numbers(form, tuple(path.split(",")) if path else ())
    if kind == "names":
        from penstock.data.toy.names import names

        return names(form, tuple(path.split(",")) if path else ())
    raise ConfigError(
        f"data.source={quoted(kind)} holds images, but this task takes text; choose stdlib, numbers, text:PATH, "
        "pairs:PATH, hf:NAME or pack:PATH."
    )


def build(content: Content, data: DataConfig, form: Form, tokenizer: Tokenizer, target: Path) -> None:
    """Write the pack of a source into the new folder `target`, which has its name only when it is complete."""
    target.parent.mkdir(parents=True, exist_ok=True)
    parts = [_up_to(part, data.limit) for part in content.parts]
    with temporary(target.parent, f".{target.name[:40]}.part-") as part, _bar(content.bytes) as progress:
        with naming(part):
            manifest = write_pack(
                part, parts, shape_of(data, form, labelled=content.labels), tokenizer, progress
            )
        make_public(part)
        part.rename(target)
    for part_ in manifest.parts:
        _log.info("%s: %d rows, %d tokens, %d left out.", target, part_.rows, part_.tokens, part_.skipped)


def _cached(kind: str, path: str, data: DataConfig, tokenizer: Tokenizer, form: Form) -> TokenPack:
    content = content_of(kind, path, data, form)
    key = [
        (VERSION, _READING),
        kind,
        form,
        data.columns,
        data.all_labels,
        data.limit,
        data.bad_rows,
        tokenizer.fingerprint,
        content.identity,
    ]
    key += [tokenizer.chat_template] if form in CHATS else []
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
    target = cache_folder("text") / name
    if not target.is_dir():
        with _locked(target):  # other ranks wait, and then find it
            if not target.is_dir():
                words = "Tokenising %s:%s with %s, once; the result is kept in %s."
                _log.info(words, kind, path, tokenizer.name, target)
                build(content, data, form, tokenizer, target)
    for file in (target, *target.iterdir()):
        if reason := distrust(file):
            raise EnvironmentProblem(
                f"{target} is not used, because {reason}. Remove it, and it is made again."
            )
    return TokenPack(target)


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """One process at a time."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(target.with_name(target.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _up_to(rows: Iterator[RowOrBad], limit: int | None) -> Iterator[RowOrBad]:
    if limit is None:
        return rows
    return _first(rows, limit)


def _first(rows: Iterator[RowOrBad], limit: int) -> Iterator[RowOrBad]:
    done = 0
    for row in rows:
        yield row
        done += isinstance(row, TextRow) and not row.more
        if done == limit:
            return


@contextmanager
def _bar(size: int | None) -> Iterator[Progress]:
    """A progress bar on a terminal; nothing elsewhere."""
    console = Console(stderr=True)
    columns = (
        bars.TextColumn("{task.description}"), bars.BarColumn(), bars.DownloadColumn(), bars.TransferSpeedColumn(),
        bars.TimeElapsedColumn(),
    )  # fmt: skip
    with bars.Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("tokenising", total=size)
        yield lambda count: bar.advance(task, count)


def _require_form(pack: TokenPack, form: Form, tokenizer: Tokenizer) -> None:
    fields, labels = SHAPES[form]
    has = pack.manifest
    problem = ""
    if (has.form == "documents") != (form == "document"):
        problem = f"holds {has.form}, and this task takes {'documents' if form == 'document' else 'rows'}"
    elif has.chats != (form in CHATS):
        wanted = form if form == "preferences" else f"{form}s"
        problem = f"{'holds' if has.chats else 'does not hold'} conversations, and this task takes {wanted}"
    elif has.fields != fields:
        problem = f"has {has.fields} texts in a row, and this task takes {fields}"
    elif labels and has.labels == "none":
        problem = "has no labels, and this task needs them"
    elif tokenizer.two_sided and has.targets != (form == "translation"):
        kinds = "targets", "texts of one side"
        problem = f"has {kinds[not has.targets]} as second texts, and this task takes {kinds[has.targets]}"
    if problem:
        raise ConfigError(f"The pack {pack.root} {problem}. Pack the text again, for this task.")


def hub_rows(name: str, data: DataConfig, columns: TextColumns) -> Content:
    """The rows of `NAME`, or of its configuration `NAME:CONFIGURATION`. Splits are its own.

    Raises ConfigError, DataError and EnvironmentProblem where it cannot be had.
    """
    dataset, _, configuration = name.partition(":")
    splits = open_dataset(dataset, configuration or None, streaming=data.streaming)
    first, val = hub_splits(list(splits), dataset)
    identity = [[split, identity_of(splits[split])] for split in (first, *val)]
    parts: list[Iterator[RowOrBad]] = [
        itertools.chain.from_iterable(_rows(splits[split], f"hf:{name}, {split}", columns) for split in part)
        for part in ([first], val) if part
    ]  # fmt: skip
    return Content(parts, [name, data.streaming, identity])


def _rows(rows: Any, where: str, columns: TextColumns) -> Iterator[RowOrBad]:
    features = rows.features
    if features is None:  # a stream tells its columns with its first row
        features = next(iter(rows.take(1)), {})
    if columns.by_number:
        raise ConfigError(f"{where} has named columns; give data.columns their names.")
    names = columns.among([str(name) for name in features], where)
    classes = getattr(features.get(names[-1]), "names", None) if columns.shape.labels else None
    outer = list(dict.fromkeys(name if name in features else name.partition(".")[0] for name in names))
    for number, row in enumerate(rows.select_columns(outer), start=1):
        values = [without_nulls(value_in(row, name)) for name in names]
        if columns.shape.labels and isinstance(values[-1], int) and classes:
            if not 0 <= values[-1] < len(classes):
                yield Bad(where, number, f"its class is {values[-1]}, which means none")
                continue
            values[-1] = classes[values[-1]]
        yield row_of(values, names, columns, where, number)
