"""Packs of tokens for the name of a source: opened where it is a pack, else made once and stored in the cache."""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich import progress as bars
from rich.console import Console

from penstock.boundary.files import quoted
from penstock.boundary.owners import distrust
from penstock.config.convert import Checked, Count, FilledText
from penstock.config.machine import cache_folder
from penstock.config.run import DataConfig
from penstock.data.hub import identity_of, open_dataset
from penstock.data.pack import new_pack
from penstock.data.splits import hub_splits, split_files
from penstock.data.text.build import Bad, Progress, RowOrBad, Shape, TextRow, write_pack
from penstock.data.text.columns import CHATS, SHAPES, Content, Form, TextColumns, outer, row_of, value_in
from penstock.data.text.documents import digest, files_of, read_files
from penstock.data.text.messages import without_nulls
from penstock.data.text.open import open_tokenizer
from penstock.data.text.tokenizers import (
    MOST_TOKENS,
    Bytes,
    LibraryTokenizer,
    Tokenizer,
    named_words,
    refusing,
    tokenizers_library,
)
from penstock.data.text.tokenpack import VERSION, TokenManifest, TokenPack
from penstock.data.toy import words
from penstock.errors import ConfigError, EnvironmentProblem

_log = logging.getLogger(__name__)
_READING = 3
"""Version that rises when the same files are read as other rows, so that packs in the cache are made again."""


_BUILT_IN: dict[str, tuple[tuple[Form, ...], str]] = {
    "stdlib": (("document",), "is text without rows"),
    "numbers": (("single", "pair", "translation", "two"), "are rows"),
    "names": (("translation",), "are translations, for the task translation"),
}
"""Built-in texts: the forms of their rows, and a description for messages."""


def open_packs(data: DataConfig, tokenizer: Tokenizer, form: Form) -> list[tuple[TokenPack, float]]:
    """The pack and the weight of each source. Raises ConfigError for sources that are not text, DataError for
    sources that cannot be read."""
    packs = []
    for source, weight in data.parts():
        kind, _, path = source.partition(":")
        pack = TokenPack(Path(path)) if kind == "pack" else _cached(kind, path, data, tokenizer, form)
        pack.require(tokenizer)
        _require_form(pack, form, tokenizer)
        packs.append((pack, weight))
    return packs


def shape_of(data: DataConfig, form: Form, *, labelled: bool = False) -> Shape:
    """The shape of a pack of this form. It has labels if the form needs them, or if rows are `labelled` anyway."""
    fields, labels = SHAPES[form]
    kind: Literal["documents", "rows", "chats"] = "chats" if form in CHATS else "rows"
    return Shape(
        form="documents" if form == "document" else kind, fields=fields, labels=labels or labelled,
        targets=form == "translation", bad_rows=data.bad_rows,
    )  # fmt: skip


def content_of(kind: str, path: str, data: DataConfig, form: Form) -> Content:
    """The rows of a source that is not a pack: their fingerprint at once, the rows when they are read. The third column
    of a translation is its label."""
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
    if kind not in _BUILT_IN:
        raise ConfigError(
            f"data.source={quoted(kind)} holds images, but this task takes text; choose stdlib, numbers, text:PATH, "
            "pairs:PATH, hf:NAME or pack:PATH."
        )
    forms, what = _BUILT_IN[kind]
    if form not in forms:
        wanted, others = f"rows ({form})", "numbers, pairs:PATH, hf:NAME or pack:PATH"
        if form == "document":
            wanted, others = "continuous text", "stdlib or text:PATH"
        elif form in CHATS:
            wanted, others = "conversations", "text:PATH or hf:NAME"
        raise ConfigError(f"data.source={kind} {what}, and this task takes {wanted}; choose {others}.")
    if kind == "stdlib":
        return words.standard_library()
    languages = tuple(path.split(",")) if path else ()
    return words.numbers(form, languages) if kind == "numbers" else words.names(languages)


def build(content: Content, data: DataConfig, form: Form, tokenizer: Tokenizer, part: Path) -> TokenManifest:
    """Write the pack of a source into the empty folder `part`."""
    rows = [_up_to(each, data.limit) for each in content.parts]
    with _bar(content.bytes) as progress:
        return write_pack(part, rows, shape_of(data, form, labelled=content.labels), tokenizer, progress)


def _cached(kind: str, path: str, data: DataConfig, tokenizer: Tokenizer, form: Form) -> TokenPack:
    content = content_of(kind, path, data, form)
    read = [kind, form, data.columns, data.all_labels, data.limit, data.bad_rows]
    key = [(VERSION, _READING), *read, tokenizer.fingerprint, content.identity]
    key += [tokenizer.chat_template] if form in CHATS else []
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
    target = cache_folder("text") / name
    if not target.is_dir():
        with _locked(target):  # other ranks wait, and then find it
            if not target.is_dir():
                message = "Tokenising %s:%s with %s, once; the result is kept in %s."
                _log.info(message, kind, path, tokenizer.name, target)
                with new_pack(target) as part:
                    manifest = build(content, data, form, tokenizer, part)
                for each in manifest.parts:
                    message = "%s: %d rows, %d tokens, %d left out."
                    _log.info(message, target, each.rows, each.tokens, each.skipped)
    for file in (target, *target.iterdir()):
        if reason := distrust(file):
            raise EnvironmentProblem(
                f"{target} is not used, because {reason}. Remove it, and it is made again."
            )
    return TokenPack(target)


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Context that one process at a time enters for the same target; others wait."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(target.with_name(target.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _up_to(rows: Iterator[RowOrBad], limit: int | None) -> Iterator[RowOrBad]:
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
    """The rows of `NAME`, or of its configuration `NAME:CONFIGURATION`, in its own splits. Raises ConfigError,
    DataError and EnvironmentProblem if it is not available."""
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
    if features is None:  # a stream's first row shows its columns
        features = next(iter(rows.take(1)), {})
    if columns.by_number:
        raise ConfigError(f"{where} has named columns; give data.columns their names.")
    names = columns.among([str(name) for name in features], where)
    classes = getattr(features.get(names[-1]), "names", None) if columns.shape.labels else None
    stored = list(dict.fromkeys(outer(name, features) for name in names))
    for number, row in enumerate(rows.select_columns(stored), start=1):
        values = [without_nulls(value_in(row, name)) for name in names]
        if columns.shape.labels and isinstance(values[-1], int) and classes:
            if not 0 <= values[-1] < len(classes):
                yield Bad(where, number, f"its class is {values[-1]}, which means none")
                continue
            values[-1] = classes[values[-1]]
        yield row_of(values, names, columns, where, number)


# -- packing text on request, with a tokenizer that is there or one that is trained on it


KINDS = ("text", "pairs", "hf", "stdlib", "numbers", "names")
"""Sources that are packed as text."""
_TRAINED = re.compile(r"bpe:([0-9]{1,9})")
_SMALLEST = 256 + len(Bytes.WORDS) + Bytes.SENTINELS


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPacking(Checked):
    """How text is packed. Fields are options of `penstock pack`; each docstring is one line, as `--help` shows it."""

    tokenizer: FilledText = "bytes"
    """Tokenizer, as `data.tokenizer`; or `bpe:N`: a byte-level BPE of N tokens is trained on the text."""
    rows: Literal["auto", "document", "single", "pair", "translation", "two"] = "auto"
    """Form of a row of text: `auto` is `pair` for pairs:PATH and numbers, else a `document`."""
    columns: tuple[str, ...] = ()
    """Columns of a table of text that are read, as `data.columns`."""
    separator: FilledText = "auto"
    """Character between the cells of a table, as `data.separator`."""
    encoding: FilledText = "utf-8"
    """Encoding of the files, as `data.encoding`."""
    bad_rows: Literal["fail", "skip"] = "fail"
    """`fail` stops at a line or row that cannot be read. `skip` leaves it out and logs it, up to 1 % of the rows."""
    limit: Count | None = None
    """How many documents or rows are packed at most; none: all."""
    streaming: bool = False
    """Whether a dataset `hf:NAME` is read while it is fetched, without a copy of it on the disk."""


def is_text(source: str) -> bool:
    """Whether the name of a source means text."""
    kind, colon, _ = source.partition(":")
    return kind in KINDS and (bool(colon) or kind in ("stdlib", "numbers", "names"))


def pack_text(source: str, target: Path, packing: TextPacking | None = None) -> TokenManifest:
    """Pack the source `text:PATH`, `pairs:PATH`, `hf:NAME`, `stdlib` or `numbers` into the new folder `target`, which
    has its name only when it is complete. Raises ConfigError, DataError, and EnvironmentProblem for missing packages.
    """
    packing = packing or TextPacking()
    settings = asdict(packing)
    kind, _, path = source.partition(":")
    form: Form = settings.pop("rows")
    if packing.rows == "auto":
        form = "pair" if kind in ("pairs", "numbers") else "document"
    trained = _TRAINED.fullmatch(packing.tokenizer)
    data = DataConfig(source=source, **settings | ({"tokenizer": "bytes"} if trained else {}))
    content = content_of(kind, path, data, form)
    with new_pack(target) as part:
        if trained:
            rows = content_of(kind, path, data, form).parts[0]
            tokenizer: Tokenizer = train_bpe(rows, int(trained[1]), data)
        else:
            tokenizer = open_tokenizer(data)
        return build(content, data, form, tokenizer, part)


def train_bpe(rows: Iterator[RowOrBad], size: int, data: DataConfig) -> LibraryTokenizer:
    """A byte-level BPE of `size` tokens (Sennrich et al., ACL 2016) with the special tokens of `Bytes`, trained on the
    rows, or on the first `data.limit` of them. No text is unknown to it.

    Raises ConfigError for a size that holds less than bytes and special tokens, and DataError for too little text.
    """
    if not _SMALLEST <= size < MOST_TOKENS:
        raise ConfigError(
            f"--tokenizer bpe:{size} has {size:,} tokens, but must have at least {_SMALLEST} (bytes and specials) "
            f"and fewer than {MOST_TOKENS:,}."
        )
    library = tokenizers_library("Training a tokenizer")
    specials = [*Bytes.WORDS, *(f"<extra_{number}>" for number in range(Bytes.SENTINELS))]
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=size, special_tokens=specials, show_progress=False,
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    with refusing(f"bpe:{size}"):
        tokenizer.train_from_iterator(_texts(rows, data.limit), trainer=trainer)
    trained_size = tokenizer.get_vocab_size()
    if trained_size < size:
        _log.warning("The text yields a BPE of %d tokens, fewer than bpe:%d.", trained_size, size)
    return LibraryTokenizer(tokenizer.to_str(), f"bpe:{trained_size}", {**named_words(), "unk_token": None})


def _texts(rows: Iterator[RowOrBad], limit: int | None) -> Iterator[str]:
    """The texts of readable rows; the other rows are refused when they are packed."""
    for number, row in enumerate(rows):
        if limit is not None and number >= limit:
            return
        if isinstance(row, TextRow):
            yield from row.texts
