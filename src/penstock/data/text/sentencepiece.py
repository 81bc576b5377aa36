"""sentencepiece models, read without the package sentencepiece: unigram and BPE, made into a `tokenizers` tokenizer.

Format: sentencepiece_model.proto of google/sentencepiece, in the encoding of Protocol Buffers.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from penstock.boundary.files import read_bytes, shown
from penstock.data.text.tokenizers import LibraryTokenizer, refusing, tokenizers_library
from penstock.errors import DataError

MOST_BYTES = 64 << 20
SPACE = "\u2581"
_LONGEST_PIECE = 1000
UNIGRAM, BPE = 1, 2
_UNKNOWN, _CONTROL, _USER, _UNUSED = 2, 3, 4, 5


@dataclass
class SentencePieceModel:
    """The parts of a model file that determine how text is cut."""

    pieces: list[tuple[str, float]] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    kind: int = UNIGRAM
    byte_fallback: bool = False
    roles: dict[str, int] = field(
        default_factory=lambda: {"unk_token": 0, "bos_token": 1, "eos_token": 2, "pad_token": -1}
    )
    letters: bytes = b""
    """How letters are made the same, compiled."""
    prefix: bool = True
    """Whether a text begins with a space."""
    single_spaces: bool = True


def read_model(path: Path, settings: Mapping[str, Any] | None = None) -> LibraryTokenizer:
    """The tokenizer in a `.model` file. Raises DataError for what is none, or of a kind that is not unigram or BPE."""
    raw = read_bytes(path, "The sentencepiece model", limit=MOST_BYTES)
    return library_of(parsed(raw, shown(path)), shown(path), settings)


def parsed(raw: bytes, name: str) -> SentencePieceModel:
    """The model in the content of a `.model` file, of this name in messages. Raises DataError as `read_model`."""
    where = f"The sentencepiece model {name}"
    try:
        model = _parsed(memoryview(raw))
    except (ValueError, IndexError, struct.error, UnicodeDecodeError) as error:
        _refuse(where, f"its content is broken ({error})")
    if not model.pieces or len({piece for piece, _ in model.pieces}) < len(model.pieces):
        _refuse(where, "it has no pieces, or one of them twice")
    if model.kind not in (UNIGRAM, BPE):
        _refuse(where, "it is of whole words or letters, and only unigram and BPE are read")
    return model


Settings = Mapping[str, Any] | None


def library_of(model: SentencePieceModel, name: str, settings: Settings = None) -> LibraryTokenizer:
    """The tokenizer that a model makes. Raises EnvironmentProblem without the package tokenizers."""
    library = tokenizers_library(f"The sentencepiece model {name}")
    with refusing(name):
        text = _built(library, model).to_str()
    words = {
        key: model.pieces[number][0] if 0 <= number < len(model.pieces) else None
        for key, number in model.roles.items()
    }
    return LibraryTokenizer(text, name, {**words, **(settings or {})})


def of_text_alone(model: SentencePieceModel) -> SentencePieceModel:
    """The same model for text, in other numbers: without control pieces, so that no text is cut into one whatever it
    spells, and with a character that is no text as its unknown piece, number 0.
    """
    text_pieces = [
        (piece, kind) for piece, kind in zip(model.pieces, model.kinds) if kind not in (_UNKNOWN, _CONTROL)
    ]
    pieces = [("\uffff", 0.0), *(piece for piece, _ in text_pieces)]
    roles = {"unk_token": 0, "bos_token": -1, "eos_token": -1, "pad_token": -1}
    return replace(model, pieces=pieces, kinds=[_UNKNOWN, *(kind for _, kind in text_pieces)], roles=roles)


def _refuse(where: str, why: str) -> NoReturn:
    raise DataError(f"{where} cannot be read: {why}. Check that it is the right file.")


def _built(library: Any, model: SentencePieceModel) -> Any:
    words = [piece for piece, _ in model.pieces]
    unknown = next((number for number, kind in enumerate(model.kinds) if kind == _UNKNOWN), 0)
    if model.kind == UNIGRAM:
        # Text that spells a special token stays text: such a piece is the worst there is.
        worst = min(score for _, score in model.pieces) - 1e3
        pieces = [
            (word, worst if kind in (_UNKNOWN, _CONTROL, _UNUSED) else score)
            for (word, score), kind in zip(model.pieces, model.kinds)
        ]
        tokenizer = library.Tokenizer(library.models.Unigram(pieces, unknown, model.byte_fallback))
    else:
        numbers = {word: number for number, word in enumerate(words)}
        tokenizer = library.Tokenizer(
            library.models.BPE(
                numbers, _merges(model, numbers), unk_token=words[unknown], fuse_unk=True,
                byte_fallback=model.byte_fallback,
            )
        )  # fmt: skip
    symbols = _USER in model.kinds
    steps = [library.normalizers.Precompiled(model.letters)] if model.letters else []
    if model.single_spaces:
        steps += [library.normalizers.Replace(library.Regex(" {2,}"), " ")]
        if not symbols:  # or the library would strip around each of them
            steps += [library.normalizers.Replace(library.Regex(rf"\A +|[ {SPACE}]+\z"), "")]
    tokenizer.normalizer = library.normalizers.Sequence(steps)
    scheme = ("first" if symbols else "always") if model.prefix else "never"
    # Where no piece goes on behind a space, words can be cut one by one, which is faster and the same.
    alone = not any(SPACE in word[1:] for word in words)
    tokenizer.pre_tokenizer = library.pre_tokenizers.Metaspace(SPACE, scheme, alone)
    decoders = library.decoders
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(SPACE, scheme, alone), decoders.Fuse()]
    )
    added = library.AddedToken
    tokenizer.add_special_tokens(
        [added(word, special=True) for word, kind in zip(words, model.kinds) if kind in (_UNKNOWN, _CONTROL)]
    )
    tokenizer.add_tokens(
        [added(word, normalized=False) for word, kind in zip(words, model.kinds) if kind == _USER]
    )
    return tokenizer


def _merges(model: SentencePieceModel, numbers: dict[str, int]) -> list[tuple[str, str]]:
    """Every two pieces that make a third, the best third first, as sentencepiece joins them."""
    merges: list[tuple[float, int, int, str, str]] = []
    for (word, score), kind in zip(model.pieces, model.kinds):
        if kind in (_UNKNOWN, _CONTROL):
            continue
        for cut in range(1, len(word)):
            first, second = word[:cut], word[cut:]
            if first in numbers and second in numbers:
                merges.append((-score, numbers[first], numbers[second], first, second))
    merges.sort()
    return [(first, second) for *_, first, second in merges]


def _parsed(raw: memoryview) -> SentencePieceModel:
    model = SentencePieceModel()
    trainer, letters = dict[int, int | memoryview](), dict[int, int | memoryview]()
    for number, value in _fields(raw):
        if number == 1:
            _add_piece(model, _message(value))
        elif number == 2:
            trainer |= dict(_fields(_message(value)))
        elif number == 3:
            letters |= dict(_fields(_message(value)))
    model.kind, model.byte_fallback = _signed(trainer.get(3, model.kind)), bool(trainer.get(35, False))
    for key, role in enumerate(model.roles, start=40):
        model.roles[role] = _signed(trainer.get(key, model.roles[role]))
    model.letters = _letters(bytes(_message(letters.get(2, memoryview(b"")))))
    model.prefix, model.single_spaces = (bool(letters.get(key, True)) for key in (3, 4))
    return model


def _letters(raw: bytes) -> bytes:
    """A compiled table of letters: the bytes of its trie in 4 bytes, the trie, and texts. The library takes memory for
    as large a trie as the first says, whatever follows.
    """
    if raw and (len(raw) < 4 or struct.unpack_from("<I", raw)[0] > len(raw) - 4):
        raise ValueError("its table of letters is cut off")
    return raw


def _add_piece(model: SentencePieceModel, raw: memoryview) -> None:
    fields = dict(_fields(raw))
    word = str(_message(fields.get(1, memoryview(b""))), "utf-8")
    (score,) = struct.unpack("<f", _message(fields.get(2, memoryview(bytes(4)))))
    if not word or len(word) > _LONGEST_PIECE or not math.isfinite(score):
        raise ValueError(f"piece {len(model.pieces)} is no word with a score")
    model.pieces.append((word, score))
    model.kinds.append(_signed(fields.get(3, 1)))


def _signed(value: int | memoryview) -> int:
    if not isinstance(value, int):
        raise ValueError("a number is text")
    return value - (1 << 64) if value >= 1 << 63 else value


def _message(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise ValueError("text is a number")
    return value


def _fields(raw: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Number and value of each field of a message. Fixed-size numbers come as their bytes."""
    at = 0
    while at < len(raw):
        key, at = _varint(raw, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(raw, at)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _varint(raw, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"a field of kind {kind}")
        if size > len(raw) - at:
            raise ValueError("it ends inside a field")
        yield key >> 3, raw[at : at + size]
        at += size


def _varint(raw: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & ((1 << 64) - 1), at
    raise ValueError("a number of more than 64 bits")
