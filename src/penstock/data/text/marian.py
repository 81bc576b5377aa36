"""Marian's tokenizer: a sentencepiece model for sources, another for targets, and one table of the pieces of both.

Files and rules as in transformers' MarianTokenizer (`models/marian/tokenization_marian.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.boundary.files import quoted, read_bytes, shown, write_text
from penstock.boundary.trees import Bounds, parse_json
from penstock.data.text.sentencepiece import MOST_BYTES, SPACE, sentencepiece_library, unreadable
from penstock.data.text.tokenizers import KEYS, MOST_TOKENS, UNSAVED, Numbers, Tokenizer, refusing
from penstock.disk import write_file
from penstock.errors import ConfigError, DataError

SOURCE, TARGET, TABLE = "source.spm", "target.spm", "vocab.json"
SECOND_TABLE = "target_vocab.json"
"""Table of targets, for models with a table for each side."""
_TABLE = Bounds(bytes=64 << 20, values=2 * MOST_TOKENS, control=True)
_WORDS = {"pad": "<pad>", "unknown": "<unk>", "end": "</s>"}
"""Special tokens, unless `tokenizer_config.json` names others."""


class Marian(Tokenizer):
    """The tokenizer of a folder with `source.spm`, `target.spm` and `vocab.json`. A text is cut by the model of its
    side. Each piece is numbered by the table, or as the unknown token. A language code such as `>>fr<<` at the
    beginning of a text is one piece."""

    two_sided = True

    def __init__(
        self, name: str, source: bytes, target: bytes, table: Mapping[str, int], settings: Mapping[str, Any]
    ) -> None:
        """`source` and `target` are the contents of the two models, `table` has the number of each piece, and
        `settings` is the content of `tokenizer_config.json`. Raises DataError for what is broken, ConfigError for what
        Penstock does not do, and EnvironmentProblem without the package sentencepiece."""
        self.name = name
        self._table, self._settings = dict(table), dict(settings)
        self._check_table()
        self.size = max(self._table.values()) + 1
        self._words = [""] * self.size
        for word, number in self._table.items():
            self._words[number] = word
        self.pad, self.unknown, self.end = (self._special(role) for role in _WORDS)
        self._check_added()
        self._raw = {SOURCE: source, TARGET: target}
        self._models = {side: _opened(raw, f"{name}/{side}") for side, raw in self._raw.items()}
        described = json.dumps([sorted(self._table.items()), self.pad, self.unknown, self.end]).encode()
        sums = [hashlib.sha256(part).hexdigest() for part in (source, target, described)]
        self.fingerprint = hashlib.sha256(json.dumps(["marian", *sums]).encode()).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[Numbers]:
        return self._numbers(texts, SOURCE)

    def encode_target(self, texts: Sequence[str]) -> list[Numbers]:
        return self._numbers(texts, TARGET)

    def decode(self, numbers: Sequence[int]) -> str:
        """The text of either side."""
        left_out = {self.pad, self.unknown, self.end}
        words = [self._words[n] for n in numbers if 0 <= n < self.size and n not in left_out]
        text: str = self._models[TARGET].decode(words) if words else ""
        return text.replace(SPACE, " ").strip()

    def words(self) -> list[str]:
        return list(self._words)

    def save(self, folder: Path, rows: int = 0) -> None:
        """Write the files that transformers' MarianTokenizer reads; tokens that are not in its table have no names."""
        settings = {key: value for key, value in self._settings.items() if key not in UNSAVED}
        settings |= {KEYS[role]: self._words[getattr(self, role)] for role in _WORDS}
        settings |= {"separate_vocabs": False, "tokenizer_class": "MarianTokenizer"}
        write_text(folder / "tokenizer_config.json", json.dumps(settings, indent=2) + "\n")
        write_text(folder / TABLE, json.dumps(self._table, indent=2, ensure_ascii=False) + "\n")
        for side, raw in self._raw.items():
            write_file(folder / side, [raw])

    def _numbers(self, texts: Sequence[str], side: str) -> list[Numbers]:
        split_texts = [_without_code(text) for text in texts]
        with refusing(self.name):
            cut = self._models[side].encode([rest for _, rest in split_texts], out_type=str)
        return [
            np.array([self._table.get(piece, self.unknown) for piece in (*code, *pieces)], np.int32)
            for (code, _), pieces in zip(split_texts, cut, strict=True)
        ]

    def _special(self, role: str) -> int:
        setting = self._settings.get(KEYS[role], _WORDS[role])
        word = setting.get("content") if isinstance(setting, Mapping) else setting
        if not isinstance(word, str) or word not in self._table:
            raise DataError(
                f"{TABLE} of the tokenizer {self.name} lacks the {KEYS[role]} {quoted(word)}. Check that it is the "
                "right file, or name the token in tokenizer_config.json."
            )
        return self._table[word]

    def _check_table(self) -> None:
        wrongs = (w for w, n in self._table.items() if type(n) is not int or not 0 <= n < MOST_TOKENS)
        wrong, why = next(wrongs, None), ""
        if not self._table:
            why = "has no pieces"
        elif wrong is not None:
            number, most = quoted(self._table[wrong]), MOST_TOKENS - 1
            why = f"has the number {number} for {quoted(wrong)}, not one from 0 to {most:,}"
        elif len(set(self._table.values())) < len(self._table):
            why = "has the same number for two pieces"
        if why:
            raise DataError(f"{TABLE} of the tokenizer {self.name} {why}. Check that it is the right file.")

    def _check_added(self) -> None:
        """Refuse added tokens that the table lacks: transformers would cut a text at them first."""
        added = self._settings.get("added_tokens_decoder")
        for number, token in added.items() if isinstance(added, Mapping) else ():
            word = token.get("content") if isinstance(token, Mapping) else None
            if not isinstance(word, str) or str(self._table.get(word)) != number:
                raise ConfigError(
                    f"The tokenizer {self.name} cannot be used: tokenizer_config.json adds {quoted(word)} as number "
                    f"{quoted(number)}, which {TABLE} does not. Add it there, or choose another with data.tokenizer."
                )


def is_marian(folder: Path) -> bool:
    """Whether a folder holds Marian's tokenizer, or a part of it."""
    return any((folder / name).is_file() for name in (SOURCE, TARGET))


def lacking(folder: Path) -> list[str]:
    """Files of Marian's tokenizer that are not in a folder."""
    return [name for name in (SOURCE, TARGET, TABLE) if not (folder / name).is_file()]


def read_marian(folder: Path, settings: Mapping[str, Any]) -> Marian:
    """Marian's tokenizer in a folder. Raises DataError, ConfigError and EnvironmentProblem as `Marian`."""
    where = shown(folder)
    if missing := lacking(folder):
        raise DataError(
            f"The tokenizer in {where} is Marian's, but lacks {' and '.join(missing)}. Copy that there, from where the "
            "other files came."
        )
    if settings.get("separate_vocabs") or (folder / SECOND_TABLE).is_file():
        raise ConfigError(
            f"The tokenizer in {where} numbers targets by a table of their own ({SECOND_TABLE}, separate_vocabs), but "
            f"Penstock's encoder–decoders have one table for both sides. Use a model with one {TABLE}."
        )
    if settings.get("sp_model_kwargs"):
        raise ConfigError(
            f"tokenizer_config.json in {where} has sp_model_kwargs {quoted(settings['sp_model_kwargs'])}, which "
            "Penstock does not apply. Remove them; texts are then cut in the likeliest way."
        )
    source, target = (
        read_bytes(folder / name, "The sentencepiece model", limit=MOST_BYTES) for name in (SOURCE, TARGET)
    )
    raw = read_bytes(folder / TABLE, "The vocabulary", limit=_TABLE.bytes)
    table = parse_json(raw, f"The vocabulary {shown(folder / TABLE)}", error=DataError, bounds=_TABLE)
    return Marian(where, source, target, table, settings)


def _opened(raw: bytes, name: str) -> Any:
    where = f"The sentencepiece model {name}"
    processor = sentencepiece_library(where).SentencePieceProcessor
    try:
        return processor(model_proto=raw)
    except RuntimeError as error:
        raise unreadable(where, error) from None


def _without_code(text: str) -> tuple[list[str], str]:
    """The language code that a text begins with, such as `>>fr<<`, and the rest."""
    end = text.find("<<") if text.startswith(">>") else -1
    return ([], text) if end < 0 else ([text[: end + 2]], text[end + 2 :])
