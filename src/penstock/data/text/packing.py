"""Packing text on request, with a tokenizer that is there or one that is trained on it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock.config.convert import Checked, Count, FilledText
from penstock.config.run import DataConfig
from penstock.data.text.build import RowOrBad, TextRow
from penstock.data.text.columns import Form
from penstock.data.text.open import open_tokenizer
from penstock.data.text.sources import build, content_of
from penstock.data.text.tokenizers import (
    MOST_TOKENS,
    Bytes,
    LibraryTokenizer,
    Tokenizer,
    refusing,
    tokenizers_library,
)
from penstock.data.text.tokenpack import TokenManifest, read_manifest
from penstock.errors import ConfigError, DataError

_log = logging.getLogger(__name__)

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
    """Whether the name of a source is one of text."""
    kind, colon, _ = source.partition(":")
    return kind in KINDS and (bool(colon) or kind in ("stdlib", "numbers", "names"))


def pack_text(source: str, target: Path, packing: TextPacking | None = None) -> TokenManifest:
    """Pack the source `text:PATH`, `pairs:PATH`, `hf:NAME`, `stdlib` or `numbers` into the new folder `target`, which
    has its name only when it is complete. Raises ConfigError, DataError, and EnvironmentProblem for missing packages.
    """
    packing = packing or TextPacking()
    if target.exists():
        raise DataError(f"{target} exists already. Remove it, or choose another name for the pack.")
    trained = _TRAINED.fullmatch(packing.tokenizer)
    data = DataConfig(
        source=source, tokenizer="bytes" if trained else packing.tokenizer, columns=packing.columns,
        bad_rows=packing.bad_rows, limit=packing.limit, streaming=packing.streaming, separator=packing.separator,
        encoding=packing.encoding,
    )  # fmt: skip
    kind, _, path = source.partition(":")
    form: Form
    if packing.rows == "auto":
        form = "pair" if kind in ("pairs", "numbers") else "document"
    else:
        form = packing.rows
    if trained:
        tokenizer: Tokenizer = train_bpe(content_of(kind, path, data, form).parts[0], int(trained[1]), data)
    else:
        tokenizer = open_tokenizer(data)
    build(content_of(kind, path, data, form), data, form, tokenizer, target)
    return read_manifest(target)


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
    pad, begin, end, separator, classify, mask = Bytes.WORDS
    settings = {
        "pad_token": pad, "bos_token": begin, "eos_token": end, "sep_token": separator, "cls_token": classify,
        "mask_token": mask, "unk_token": None,
    }  # fmt: skip
    return LibraryTokenizer(tokenizer.to_str(), f"bpe:{trained_size}", settings)


def _texts(rows: Iterator[RowOrBad], limit: int | None) -> Iterator[str]:
    """The texts of readable rows; the other rows are refused when they are packed."""
    for number, row in enumerate(rows):
        if limit is not None and number >= limit:
            return
        if isinstance(row, TextRow):
            yield from row.texts
