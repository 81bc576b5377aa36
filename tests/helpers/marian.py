"""The files of a Marian tokenizer, made without training: its models in the encoding of Protocol Buffers."""

from __future__ import annotations

import json
import string
import struct
from collections.abc import Mapping
from pathlib import Path

SPACE = "\u2581"
UNIGRAM, BPE = 1, 2
LETTERS = dict.fromkeys([SPACE, *string.ascii_lowercase, *string.digits], -8.0)
SOURCE = {**LETTERS, f"{SPACE}in": -2.0, f"{SPACE}tens": -3.0, "ten": -4.0}
TARGET = {**LETTERS, "ö": -8.0, f"{SPACE}and": -2.0, "tens": -3.0}
CODE = ">>de<<"
NUMBERS = {
    word: number
    for number, word in enumerate(["</s>", "<unk>", *sorted((SOURCE.keys() | TARGET) - {"z"}), CODE, "<pad>"])
}
"""Of the pieces of both models but for the letter z."""


def model(pieces: Mapping[str, float], kind: int = UNIGRAM) -> bytes:
    """A sentencepiece model of these pieces, with their scores, behind `<unk>`, `<s>` and `</s>`."""
    specials = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    entries = [
        _field(1, word.encode()) + b"\x15" + struct.pack("<f", score) + bytes([0x18, role])
        for word, score, role in [
            *specials,
            *((w, s, 6 if w.startswith("<0x") else 1) for w, s in pieces.items()),
        ]
    ]
    return b"".join(_field(1, entry) for entry in entries) + _field(2, bytes([0x18, kind]))


def _field(number: int, content: bytes) -> bytes:
    """A field of bytes, of which there are fewer than 128."""
    assert len(content) < 128
    return bytes([number << 3 | 2, len(content)]) + content


def write_files(folder: Path) -> Path:
    """Write `source.spm`, `target.spm`, `vocab.json` and `tokenizer_config.json`. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "source.spm").write_bytes(model(SOURCE))
    (folder / "target.spm").write_bytes(model(TARGET))
    (folder / "vocab.json").write_text(json.dumps(NUMBERS))
    settings = {"source_lang": "en", "target_lang": "de", "model_max_length": 512}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
