"""Making packs of tokens from rows of text, in bounded memory."""

from __future__ import annotations

import json
import logging
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock import __version__
from penstock.data.pack import MANIFEST, File, write_part
from penstock.data.source import LeftOut
from penstock.data.text.chat import ChatWriter, template_of, within
from penstock.data.text.tokenizers import Bytes, Numbers, Tokenizer
from penstock.data.text.tokenpack import (
    BLOCK_BYTES,
    PARTS,
    PackPart,
    PackVocabulary,
    TokenManifest,
    index_type,
    token_type,
)
from penstock.disk import digest_file, sync_folder, write_file
from penstock.errors import ConfigError, DataError

_log = logging.getLogger(__name__)

PIECE_CHARACTERS = 1 << 18
"""Longer texts are tokenised in pieces of this length, cut before a space."""
_BATCH_CHARACTERS, _BATCH_TEXTS = 1 << 20, 4096
_MOST_CLASSES = 10_000
_MOST_LABELS = 1 << 24


class TextRow(NamedTuple):
    """A row of a table, a document, or, with `more`, a piece of one that the next row continues."""

    texts: tuple[str, ...]
    label: str | None
    path: str
    line: int
    more: bool = False


class Bad(NamedTuple):
    """A row that cannot be used, and why."""

    path: str
    line: int
    why: str

    @property
    def where(self) -> str:
        return f"{self.path}, line {self.line:,}" if self.line else self.path


RowOrBad = TextRow | Bad
Progress = Callable[[int], None]
"""Called with the bytes of text that were tokenised since the last call."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The form and the fields of a pack."""

    form: Literal["documents", "rows", "chats"]
    fields: int = 1
    labels: bool = False
    targets: bool = False
    """Whether the second text of a row is the target of a translation."""
    bad_rows: Literal["fail", "skip"] = "fail"


def write_pack(
    target: Path, parts: Iterable[Iterator[RowOrBad]], shape: Shape, tokenizer: Tokenizer,
    progress: Progress = lambda _: None,
) -> TokenManifest:  # fmt: skip
    """Pack the rows of train, and of val where there is one, into the empty folder `target`. Raises DataError for bad
    rows as the policy says, for more than 1 % of them, and where nothing is left."""
    if shape.form == "documents" and tokenizer.end is None:
        raise ConfigError(
            f"The tokenizer {tokenizer.name} has no token that ends a document. Name one as eos_token in its "
            "tokenizer_config.json, or choose another with data.tokenizer."
        )
    labels: dict[str, int] = {}
    writers = []
    for name, rows in zip(PARTS, parts):
        writer = _SplitWriter(shape, tokenizer, labels, progress)
        writer.data = write_part(target, f"{name}.tokens", writer.tokens(rows))
        writers.append(writer)
    kind, classes, values = _label_values(labels)
    packed = []
    for name, writer in zip(PARTS, writers):
        index = writer.index(values)
        packed.append(
            PackPart(
                rows=len(index), tokens=writer.at, text_bytes=writer.text_bytes, skipped=writer.left_out.count,
                data=writer.data,
                index=write_part(target, f"{name}.index", [index.tobytes()]),
                checks=write_part(target, f"{name}.checks", [np.array(writer.checks, "<u4").tobytes()]),
            )
        )  # fmt: skip
    files: tuple[File, ...] = ()
    if not isinstance(tokenizer, Bytes):
        folder = target / "tokenizer"
        tokenizer.save(folder)
        files = tuple(
            File(f"tokenizer/{path.name}", path.stat().st_size, digest_file(path))
            for path in sorted(folder.iterdir())
        )
    manifest = TokenManifest(
        form="rows" if shape.form == "chats" else shape.form, fields=shape.fields, labels=kind, classes=classes,
        tokenizer=PackVocabulary(name=tokenizer.name, fingerprint=tokenizer.fingerprint, size=tokenizer.size),
        parts=tuple(packed), tokenizer_files=files, made_by={"penstock": __version__, "bad_rows": shape.bad_rows},
        targets=shape.targets, chats=shape.form == "chats",
    )  # fmt: skip
    write_file(target / MANIFEST, [manifest.to_json()])
    sync_folder(target)
    return manifest


@dataclass
class _SplitWriter:
    """Writes the tokens of one split, and the index that says where each row is."""

    shape: Shape
    tokenizer: Tokenizer
    labels: dict[str, int]
    """The number of every label so far; shared by both splits."""
    progress: Progress
    data: File = field(default_factory=lambda: File("", 0, ""))
    at: int = 0
    text_bytes: int = 0
    rows: int = 0
    checks: list[int] = field(default_factory=list)
    left_out: LeftOut = field(init=False)
    _chunks: list[NDArray[np.void]] = field(default_factory=list)
    _begun: TextRow | None = None
    """The document whose pieces are being read."""

    def __post_init__(self) -> None:
        self.left_out = LeftOut(self.shape.bad_rows, "rows", "data.bad_rows=skip")

    def tokens(self, rows: Iterator[RowOrBad]) -> Iterator[bytes]:
        """The content of the file of tokens, in whole blocks except the last."""
        kind = token_type(self.tokenizer.size)
        unwritten = b""
        for batch in _read_ahead(_batches(self._accepted(rows))):
            raw = unwritten + self._encoded(batch).astype(kind).tobytes()
            whole_bytes = len(raw) // BLOCK_BYTES * BLOCK_BYTES
            yield self._checked(raw[:whole_bytes])
            unwritten = raw[whole_bytes:]
        yield self._checked(unwritten)
        self.left_out.close(self.rows)
        if not self.rows:
            raise DataError("There is no text in it. Check data.source.")

    def index(self, values: NDArray[np.float32]) -> NDArray[np.void]:
        """The index (rows,), with the values of labels in place of their numbers."""
        index = np.concatenate(self._chunks)
        if self.shape.labels:
            index["label"] = values[index["label"].astype(np.int64)]
        return index

    def _checked(self, raw: bytes) -> bytes:
        self.checks += [
            zlib.crc32(raw[start : start + BLOCK_BYTES]) for start in range(0, len(raw), BLOCK_BYTES)
        ]
        return raw

    def _accepted(self, rows: Iterator[RowOrBad]) -> Iterator[TextRow]:
        for row in _templated(rows, self.tokenizer) if self.shape.form == "chats" else rows:
            if isinstance(row, TextRow):
                yield row
            else:
                self.left_out.add(row.where, row.why, self.rows)

    def _encoded(self, batch: list[TextRow]) -> Numbers:
        """The tokens of a batch of rows; their ends go to the index."""
        chats = self.shape.form == "chats"
        out: list[Numbers] = []
        index = np.zeros(len(batch), index_type(self.shape.fields))
        count = 0
        for row, columns in zip(batch, self._chats(batch) if chats else self._texts(batch), strict=True):
            for place, pieces in enumerate(columns):
                out += pieces
                self.at += sum(map(len, pieces))
                index[count]["end"][place] = self.at
            self._begun = self._begun or row
            if not row.more:
                index[count]["key"] = zlib.crc32(self._begun.texts[0].encode("utf-8", "replace"))
                index[count]["label"] = self._label(row)
                count, self._begun = count + 1, None
        texts = (text for row in batch for text in (row.texts[1::2] if chats else row.texts))
        size = sum(len(text.encode("utf-8", "replace")) for text in texts)
        self.text_bytes += size
        self.rows += count
        self._chunks.append(index[:count])
        self.progress(size)
        return np.concatenate(out) if out else np.zeros(0, np.int32)

    def _texts(self, batch: list[TextRow]) -> Iterator[list[list[Numbers]]]:
        """For each row the tokens of each text, in pieces; after a document also its end token."""
        encode, fields = self.tokenizer.encode, self.shape.fields
        texts = [list(_pieces(text)) for row in batch for text in row.texts]
        if self.shape.targets:
            sources, targets = ([piece for text in texts[side::2] for piece in text] for side in (0, 1))
            sides = [iter(encode(sources)), iter(self.tokenizer.encode_target(targets))]
        else:
            sides = [iter(encode([piece for text in texts for piece in text]))] * fields
        end = np.array([self.tokenizer.end or 0], np.int32)
        for number, row in enumerate(batch):
            own = texts[number * fields : (number + 1) * fields]
            columns = [[next(side) for _ in text] for side, text in zip(sides, own, strict=True)]
            if self.shape.form == "documents" and not row.more:
                columns[0].append(end)
            yield columns

    def _chats(self, batch: list[TextRow]) -> Iterator[list[list[Numbers]]]:
        """For each conversation of a row its tokens, and a 1 for each token to learn and a 0 for each other token."""
        encoded = iter(self.tokenizer.encode_marked([text for row in batch for text in row.texts[1::2]]))
        for row in batch:
            columns = []
            for answers in row.texts[2::2]:
                ids, places = next(encoded)
                learned = np.fromiter(within(places, json.loads(answers)), np.int32, len(ids))
                columns += [[ids], [learned]]
            yield columns

    def _label(self, row: TextRow) -> int:
        if not self.shape.labels:
            return 0
        number = self.labels.setdefault(row.label or "", len(self.labels))
        if number >= _MOST_LABELS:
            raise DataError(
                f"{row.path} has more than {_MOST_LABELS:,} different labels. Check data.columns."
            )
        return number


def _templated(rows: Iterator[RowOrBad], tokenizer: Tokenizer) -> Iterator[RowOrBad]:
    """Conversations rendered by the tokenizer's template: first the conversation or the shared part, by which a
    validation set is chosen; then text and answers as JSON (of both conversations for preferences). Conversations
    without an answer to learn are left out, and counted in the log."""
    template = template_of(tokenizer)
    assert template is not None  # `give_template` has seen to it
    writer = ChatWriter(template, tokenizer.special_words())
    useless = 0
    for row in rows:
        if isinstance(row, Bad):
            yield row
            continue
        try:
            first, *sides, tools = map(json.loads, row.texts)
            if sides:
                written = [writer.write_from([*first, *side], len(first), tools) for side in sides]
                pair = [whole for whole in written if whole is not None]
                texts = [pair] if len(pair) == 2 and pair[0] != pair[1] else []
            else:
                texts = [[whole] for whole in writer.write(first, tools)]
            useless += not texts
            for several in texts:
                marked = [part for whole in several for part in (whole.text, json.dumps(whole.answers))]
                yield row._replace(texts=(row.texts[0], *marked))
        except ConfigError as problem:
            yield Bad(row.path, row.line, str(problem).rstrip("."))
    if useless:
        _log.warning(
            "%d conversations were left out: all their answers are marked as not to be learned, or the template writes "
            "both of a pair alike.", useless,
        )  # fmt: skip


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        cut = start + PIECE_CHARACTERS
        space = max(text.rfind(" ", start + 1, cut), text.rfind("\n", start + 1, cut))
        cut = space if space > 0 else cut
        yield text[start:cut]
        start = cut
    yield text[start:] if start else text


def _batches(rows: Iterator[TextRow]) -> Iterator[list[TextRow]]:
    batch: list[TextRow] = []
    characters = 0
    for row in rows:
        batch.append(row)
        characters += sum(map(len, row.texts))
        if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_TEXTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _read_ahead(batches: Iterator[list[TextRow]]) -> Iterator[list[TextRow]]:
    """Read the next batch in a second thread while this one is tokenised, which releases the GIL."""
    with ThreadPoolExecutor(1, thread_name_prefix="penstock-text") as thread:
        coming = thread.submit(next, batches, None)
        while (batch := coming.result()) is not None:
            coming = thread.submit(next, batches, None)
            yield batch


def _label_values(
    labels: dict[str, int],
) -> tuple[Literal["none", "classes", "numbers"], tuple[str, ...], NDArray[np.float32]]:
    """The kind of the labels, the names of classes, and the value of each label by number."""
    if not labels:
        return "none", (), np.zeros(1, np.float32)
    if all(re.fullmatch("-?[0-9]+", word) and len(word) < 10 for word in labels):
        classes = sorted(labels, key=int)
    else:
        try:
            numbers = np.array([float(word) for word in labels], np.float32)
        except ValueError:
            classes = sorted(labels)
        else:
            return "numbers", (), numbers
    if len(classes) > _MOST_CLASSES:
        raise DataError(
            f"The labels are {len(classes):,} different words, such as {classes[0]!r}, and a set has at "
            f"most {_MOST_CLASSES:,} classes. Check data.columns."
        )
    number = {word: value for value, word in enumerate(classes)}
    return "classes", tuple(classes), np.array([number[word] for word in labels], np.float32)
