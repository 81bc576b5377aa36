"""sentencepiece models, unigram and BPE, made into a `tokenizers` tokenizer, which is saved as transformers reads it.

The package sentencepiece includes the messages of its file format (sentencepiece_model.proto).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.boundary.files import printable, read_bytes, shown
from penstock.boundary.packages import package
from penstock.data.text.tokenizers import LibraryTokenizer, refusing, tokenizers_library
from penstock.errors import DataError

MOST_BYTES = 64 << 20
SPACE = "\u2581"
_LONGEST_PIECE = 1000
_UNIGRAM, _BPE = 1, 2
_UNKNOWN, _CONTROL, _USER, _UNUSED = 2, 3, 4, 5
_ROLES = ("unk", "bos", "eos", "pad")


def sentencepiece_library(where: str, module: str = "") -> Any:
    """The package sentencepiece, or a module of it, to open the model that `where` names. Raises EnvironmentProblem."""
    return package(f"sentencepiece{module}", f"{where} needs the packages sentencepiece and protobuf", "text")


def read_model(path: Path, settings: Mapping[str, Any] | None = None) -> LibraryTokenizer:
    """The tokenizer in a `.model` file. Raises DataError for another kind of file, and for models other than unigram
    and BPE; EnvironmentProblem without the packages sentencepiece and tokenizers."""
    name = shown(path)
    where = f"The sentencepiece model {name}"
    raw = read_bytes(path, "The sentencepiece model", limit=MOST_BYTES)
    model = sentencepiece_library(where, ".sentencepiece_model_pb2").ModelProto()
    library = tokenizers_library(where)
    from google.protobuf.message import DecodeError

    try:
        model.ParseFromString(raw)
        _check(model)
    except (DecodeError, ValueError) as error:
        raise unreadable(where, error) from None
    with refusing(name):
        text = _built(library, model).to_str()
    words = dict[str, str | None]()
    for role in _ROLES:
        number = getattr(model.trainer_spec, f"{role}_id")
        words[f"{role}_token"] = model.pieces[number].piece if 0 <= number < len(model.pieces) else None
    return LibraryTokenizer(text, name, {**words, **(settings or {})})


def unreadable(where: str, error: Exception) -> DataError:
    """The error for a model that cannot be read."""
    why = printable(str(error)).strip(" .")
    return DataError(f"{where} cannot be read: {why}. Check that it is the right file.")


def _check(model: Any) -> None:
    """Raise ValueError for content that would crash the library or exhaust memory, or that is not supported."""
    words = {each.piece for each in model.pieces}
    if not words or len(words) < len(model.pieces):
        raise ValueError("it has no pieces, or one of them twice")
    for number, each in enumerate(model.pieces):
        if not 0 < len(each.piece) <= _LONGEST_PIECE or not math.isfinite(each.score):
            raise ValueError(f"piece {number} is no word with a score")
    if model.trainer_spec.model_type not in (_UNIGRAM, _BPE):
        raise ValueError("it is a model of whole words or letters, and only unigram and BPE are read")
    # The library takes memory for as large a trie as the first 4 bytes say, whatever follows.
    letters = model.normalizer_spec.precompiled_charsmap
    if letters and (len(letters) < 4 or struct.unpack_from("<I", letters)[0] > len(letters) - 4):
        raise ValueError("its table of letters is cut off")


def _built(library: Any, model: Any) -> Any:
    trained, letters = model.trainer_spec, model.normalizer_spec
    words, kinds = [each.piece for each in model.pieces], [each.type for each in model.pieces]
    unknown = kinds.index(_UNKNOWN) if _UNKNOWN in kinds else 0
    if trained.model_type == _UNIGRAM:
        # Text that spells a special token stays text: such a piece gets the lowest score.
        worst = min(each.score for each in model.pieces) - 1e3
        special = (_UNKNOWN, _CONTROL, _UNUSED)
        pieces = [(each.piece, worst if each.type in special else each.score) for each in model.pieces]
        tokenizer = library.Tokenizer(library.models.Unigram(pieces, unknown, trained.byte_fallback))
    else:
        numbers = {word: number for number, word in enumerate(words)}
        tokenizer = library.Tokenizer(
            library.models.BPE(
                numbers, _merges(model, numbers), unk_token=words[unknown], fuse_unk=True,
                byte_fallback=trained.byte_fallback,
            )
        )  # fmt: skip
    symbols = _USER in kinds
    table = letters.precompiled_charsmap
    steps = [library.normalizers.Precompiled(table)] if table else []
    if letters.remove_extra_whitespaces:
        steps += [library.normalizers.Replace(library.Regex(" {2,}"), " ")]
        if not symbols:  # or the library would strip around each of them
            steps += [library.normalizers.Replace(library.Regex(rf"\A +|[ {SPACE}]+\z"), "")]
    tokenizer.normalizer = library.normalizers.Sequence(steps)
    scheme = ("first" if symbols else "always") if letters.add_dummy_prefix else "never"
    # Where no piece continues after a space, words can be cut one by one, which is faster and gives the same pieces.
    alone = not any(SPACE in word[1:] for word in words)
    tokenizer.pre_tokenizer = library.pre_tokenizers.Metaspace(SPACE, scheme, alone)
    decoders = library.decoders
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(SPACE, scheme, alone), decoders.Fuse()]
    )
    added = library.AddedToken
    tokenizer.add_special_tokens(
        [added(word, special=True) for word, kind in zip(words, kinds) if kind in (_UNKNOWN, _CONTROL)]
    )
    tokenizer.add_tokens([added(word, normalized=False) for word, kind in zip(words, kinds) if kind == _USER])
    return tokenizer


def _merges(model: Any, numbers: dict[str, int]) -> list[tuple[str, str]]:
    """All pairs of pieces that merge into a third piece, the best third first, as sentencepiece merges them."""
    merges: list[tuple[float, int, int, str, str]] = []
    for each in model.pieces:
        if each.type in (_UNKNOWN, _CONTROL):
            continue
        word = each.piece
        for cut in range(1, len(word)):
            first, second = word[:cut], word[cut:]
            if first in numbers and second in numbers:
                merges.append((-each.score, numbers[first], numbers[second], first, second))
    merges.sort()
    return [(first, second) for *_, first, second in merges]
