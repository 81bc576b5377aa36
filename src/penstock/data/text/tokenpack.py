"""Packs of tokens: tokenised documents or rows of text, read by memory map. Format version 1.

    manifest.json   what it holds, by which tokenizer, bytes and SHA-256 of all files, its seal
    train.tokens    numbers one after the other, of 2 or 4 bytes; val.tokens likewise, where the source had a split
    train.index     one row per document or row of a table: where each of its texts ends, a key, its label
    train.checks    a CRC-32 for each block of the tokens
    tokenizer/      the tokenizer, as transformers reads it; nothing for `bytes`

Documents are stored with the tokenizer's `end` after them, and rows without special tokens. Sizes and the index are
checked whenever a pack is opened, a block when a process first reads it, and the SHA-256 of the tokens by `verify`.
"""

from __future__ import annotations

import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.boundary.files import quoted, shown
from penstock.boundary.manifests import read_manifest as read_sealed
from penstock.boundary.manifests import sealed
from penstock.config.convert import Bytes as ByteCount
from penstock.config.convert import Natural, Range
from penstock.config.load import from_dict
from penstock.data.pack import AGAIN, MANIFEST, File, check_sizes, check_sum, map_file, read_table
from penstock.data.source import BadSample, Split
from penstock.data.text.tokenizers import MOST_TOKENS, Tokenizer
from penstock.errors import ConfigError, DataError

KIND = "penstock-tokens"
VERSION = 1
BLOCK_BYTES = 1 << 16
"""Bytes that one CRC-32 covers."""
VAL_EVERY = 20
"""Without a split of its own, one row or document in this many is in the validation set, chosen by its text."""
FEW = 200
"""With fewer documents than this, the end of the text is the validation set; with fewer rows, every fifth row."""
PARTS: tuple[Split, ...] = ("train", "val")


def token_type(size: int) -> np.dtype[Any]:
    """The type of a token's number on the disk, for a vocabulary of this size."""
    return np.dtype("<u2" if size <= 1 << 16 else "<u4")


def index_type(fields: int) -> np.dtype[Any]:
    """One row of an index, of a table with `fields` texts per row."""
    return np.dtype([("end", "<u8", (fields,)), ("key", "<u4"), ("label", "<f4")])


@dataclass(frozen=True, slots=True, kw_only=True)
class PackPart:
    """One split."""

    rows: Annotated[int, Range(0, 1 << 40)]
    tokens: ByteCount
    """Number of tokens."""
    text_bytes: ByteCount
    """Bytes of the text in UTF-8, by which bits per byte are counted."""
    skipped: Natural
    """Bad lines and rows that were left out."""
    data: File
    index: File
    checks: File

    @property
    def files(self) -> tuple[File, ...]:
        return (self.data, self.index, self.checks)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackVocabulary:
    """The tokenizer that made the token numbers."""

    name: str
    fingerprint: str
    size: Annotated[int, Range(1, MOST_TOKENS)]

    @property
    def type(self) -> np.dtype[Any]:
        """The type of a token's number on the disk."""
        return token_type(self.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenManifest:
    """The content of `manifest.json`."""

    form: Literal["documents", "rows"]
    fields: Annotated[int, Range(1, 4)]
    """Texts in a row."""
    labels: Literal["none", "classes", "numbers"]
    classes: tuple[str, ...]
    tokenizer: PackVocabulary
    parts: tuple[PackPart, ...]
    """Train and val, or train alone."""
    tokenizer_files: tuple[File, ...]
    made_by: dict[str, str | int]
    """Version and settings of the packer, for information."""
    chats: bool = False
    """Whether rows are conversations, one or two to compare: tokens, and a mark for each token to learn."""
    targets: bool = False
    """Whether second texts are numbered as targets of a translation. It matters if the tokenizer is two-sided."""

    def to_json(self) -> bytes:
        return sealed({"layout": KIND, "version": VERSION, **asdict(self)})

    @property
    def files(self) -> tuple[File, ...]:
        return (*(file for part in self.parts for file in part.files), *self.tokenizer_files)


def is_token_pack(root: Path) -> bool:
    """Whether a folder's manifest says that it is a pack of tokens. Raises DataError where that cannot be read."""
    path = root / MANIFEST
    if not path.is_file():
        return False
    table, _ = read_sealed(path, shown(path), error=DataError, remedy=AGAIN)
    return table.get("layout") == KIND


def read_manifest(root: Path) -> TokenManifest:
    """Read and check the manifest of a pack of tokens. Raises DataError as `penstock.data.pack.read_table` does, and
    for a manifest that contradicts itself."""
    where, table = shown(root / MANIFEST), read_table(root, KIND, VERSION, "packed text")
    manifest = from_dict(TokenManifest, table, origin=where, error=DataError)
    names = [file.name for part in manifest.parts for file in part.files]
    due = [f"{part}.{end}" for part in PARTS[: len(manifest.parts)] for end in ("tokens", "index", "checks")]
    inside = all(
        file.name.count("/") == 1 and file.name.startswith("tokenizer/") and ".." not in file.name
        for file in manifest.tokenizer_files
    )
    if not manifest.parts or names != due or not inside:
        raise DataError(f"{where} is broken: it names impossible files. {AGAIN}")
    return manifest


class TokenPack:
    """A packed text, opened. It can be pickled; each process maps the files again."""

    def __init__(self, root: Path) -> None:
        """Raises DataError if the pack is not whole, as far as visible without reading the tokens."""
        self.root = root
        self.manifest = read_manifest(root)
        check_sizes(root, self.manifest.files)
        for part in self.manifest.parts:
            self._check_index(part)

    def split(self, part: int) -> PackedPart:
        """Train (0) or val (1)."""
        return PackedPart(self.root, self.manifest, self.manifest.parts[part])

    def require(self, tokenizer: Tokenizer) -> None:
        """Raise ConfigError if another tokenizer made the token numbers."""
        packed = self.manifest.tokenizer
        if packed.fingerprint != tokenizer.fingerprint:
            raise ConfigError(
                f"pack:{shown(self.root)} was made with the tokenizer {quoted(packed.name)} of {packed.size:,} tokens, "
                f"but {quoted(tokenizer.name)} of {tokenizer.size:,} is used. Leave data.tokenizer out, or pack the "
                "text again with --tokenizer."
            )

    def _check_index(self, part: PackPart) -> None:
        kind = index_type(self.manifest.fields)
        width = self.manifest.tokenizer.type.itemsize
        blocks = -(-part.tokens * width // BLOCK_BYTES)
        expected = (part.tokens * width, part.rows * kind.itemsize, blocks * 4)
        whole = tuple(file.bytes for file in part.files) == expected
        if whole:
            check_sum(self.root, part.index)
            check_sum(self.root, part.checks)
            ends = np.frombuffer(map_file(self.root / part.index.name), kind)["end"].reshape(-1)
            whole = (int(ends[-1]) if len(ends) else 0) == part.tokens and bool((ends[1:] >= ends[:-1]).all())
        if not whole:
            raise DataError(
                f"{shown(self.root / part.index.name)} does not hold the {part.rows:,} rows of its manifest. {AGAIN}"
            )


def verify(root: Path) -> int:
    """Check every byte of a pack against its manifest. Returns the bytes checked; raises DataError."""
    files = TokenPack(root).manifest.files
    for file in files:
        check_sum(root, file)
    return sum(file.bytes for file in files)


class PackedPart:
    """One split of a pack. The files are mapped when they are first read."""

    def __init__(self, root: Path, manifest: TokenManifest, part: PackPart) -> None:
        self.part = part
        self.fields = manifest.fields
        self._path = root / part.data.name
        self._index_path, self._checks_path = root / part.index.name, root / part.checks.name
        self._type = manifest.tokenizer.type
        self._size = manifest.tokenizer.size
        self._maps: tuple[NDArray[Any], memoryview, NDArray[np.uint32]] | None = None
        self._checked = np.zeros(-(-part.tokens * self._type.itemsize // BLOCK_BYTES), np.bool_)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": None}

    @property
    def index(self) -> NDArray[Any]:
        """(rows,) of `index_type`."""
        return np.frombuffer(map_file(self._index_path), index_type(self.fields))

    def row(self, number: int) -> str:
        """The name of a row in messages."""
        return f"{shown(self._index_path)}, row {number:,}"

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Tokens start..stop, not to be written to. Raises BadSample where tokens changed since they were packed, or a
        number is outside the vocabulary."""
        if self._maps is None:
            raw = map_file(self._path)
            checks = np.frombuffer(map_file(self._checks_path), "<u4")
            self._maps = np.frombuffer(raw, self._type), raw, checks
        tokens, raw, checks = self._maps
        width = self._type.itemsize
        first, last = start * width // BLOCK_BYTES, -(-stop * width // BLOCK_BYTES)
        for block in (first + np.flatnonzero(~self._checked[first:last])).tolist():
            at = block * BLOCK_BYTES
            if zlib.crc32(raw[at : at + BLOCK_BYTES]) != checks[block]:
                why = "it changed since it was packed: its checksum is wrong"
                raise BadSample(f"{shown(self._path)} at byte {at:,}", why)
            self._check_vocabulary(tokens[at // width : (at + BLOCK_BYTES) // width], at)
            self._checked[block] = True
        return tokens[start:stop]

    def _check_vocabulary(self, tokens: NDArray[Any], at: int) -> None:
        if int(tokens.max()) >= self._size:
            place = int(np.argmax(tokens >= self._size))
            raise BadSample(
                f"{shown(self._path)} at byte {at + place * self._type.itemsize:,}",
                f"it holds the token {int(tokens[place]):,}, outside of the vocabulary of {self._size:,}",
            )
