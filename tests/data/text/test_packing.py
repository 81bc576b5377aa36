from __future__ import annotations

import hashlib
import json
import zlib
from pathlib import Path

import numpy as np
import pytest

from penstock.boundary.manifests import sealed
from penstock.cli import main
from penstock.config.run import DataConfig
from penstock.data.source import BadSample
from penstock.data.text.open import open_tokenizer
from penstock.data.text.rows import open_rows
from penstock.data.text.sources import TextPacking, pack_text
from penstock.data.text.tokenizers import Bytes, LibraryTokenizer
from penstock.data.text.tokenpack import BLOCK_BYTES, TokenPack, verify
from penstock.data.text.tokens import open_tokens
from penstock.errors import ConfigError, DataError

WORDS = "the cat sat on the mat and the dog on the log. "


def corpus(root: Path, size: int = 200_000) -> Path:
    root.mkdir(exist_ok=True)
    (root / "train.txt").write_text(WORDS * (size // len(WORDS)))
    (root / "val.txt").write_text(WORDS * 40)
    return root


def first(data: DataConfig, length: int = 64) -> str:
    tokenizer = open_tokenizer(data)
    source = open_tokens(data, tokenizer, "train", length=length)
    out = np.empty(1, source.sample)
    source.read_into(np.zeros(1, np.int64), out)
    return tokenizer.decode(out[0].tolist())


def test_packing_and_verifying_text_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "packed"
    assert main(["pack", f"text:{corpus(tmp_path / 'c')}", str(target)]) == 0
    said = capsys.readouterr().out
    assert "1 documents for train, 199,9" in said
    assert f"--data.source pack:{target}" in said
    assert first(DataConfig(source=f"pack:{target}")).startswith("the cat sat")
    assert main(["pack", str(target), "--verify"]) == 0
    assert "is whole" in capsys.readouterr().out


def test_a_bpe_is_trained_on_request_and_found_in_the_pack(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    target = tmp_path / "packed"
    manifest = pack_text(f"text:{corpus(tmp_path / 'c')}", target, TextPacking(tokenizer="bpe:400"))
    assert 362 < manifest.tokenizer.size <= 400
    assert manifest.parts[0].text_bytes > 2 * manifest.parts[0].tokens
    tokenizer = open_tokenizer(DataConfig(source=f"pack:{target}"))
    assert isinstance(tokenizer, LibraryTokenizer)
    assert tokenizer.fingerprint == manifest.tokenizer.fingerprint
    assert len(tokenizer.sentinels) == 100
    assert tokenizer.decode(tokenizer.encode(["<end> naïve 雪\n"])[0].tolist()) == "<end> naïve 雪\n"
    assert first(DataConfig(source=f"pack:{target}")).startswith("the cat sat on the mat")
    with pytest.raises(ConfigError, match="was made with the tokenizer 'bpe:"):
        open_tokens(DataConfig(source=f"pack:{target}"), Bytes(), "train", length=8)


def test_rows_are_packed_too(tmp_path: Path) -> None:
    (tmp_path / "t.tsv").write_text("premise\thypothesis\tlabel\n" + "a b\tc\tyes\nd\te f\tno\n" * 150)
    pack_text(f"pairs:{tmp_path}/t.tsv", tmp_path / "packed")
    data = DataConfig(source=f"pack:{tmp_path / 'packed'}")
    assert open_rows(data, Bytes(), "train", form="pair", length=16).classes == ("no", "yes")
    with pytest.raises(ConfigError, match="has 2 texts in a row, and this task takes 1"):
        open_rows(data, Bytes(), "train", form="single", length=16)
    with pytest.raises(ConfigError, match="holds rows, and this task takes documents"):
        open_tokens(data, Bytes(), "train", length=8)


def test_a_changed_token_is_noticed_where_it_is_read(tmp_path: Path) -> None:
    target = tmp_path / "packed"
    pack_text(f"text:{corpus(tmp_path / 'c', 300_000)}", target)
    path = target / "train.tokens"
    raw = bytearray(path.read_bytes())
    raw[3 * BLOCK_BYTES + 5] ^= 1
    path.write_bytes(raw)
    source = open_tokens(DataConfig(source=f"pack:{target}"), Bytes(), "train", length=1024)
    out = np.empty(len(source), source.sample)
    source.read_into(np.arange(96), out[:96])
    with pytest.raises(
        DataError, match=r"train.tokens at byte 196,608 cannot be read: it changed .* data.bad_rows"
    ):
        source.read_into(np.arange(96, 98), out[:2])
    skipping = open_tokens(
        DataConfig(source=f"pack:{target}", bad_rows="skip"), Bytes(), "train", length=1024
    )
    assert len(skipping.read_into(np.arange(96, 98), out[:2]).bad) >= 2
    with pytest.raises(DataError, match="is not what was written"):
        verify(target)


def test_a_token_outside_of_the_vocabulary_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "packed"
    pack_text(f"text:{corpus(tmp_path / 'c', 1000)}", target)
    raw = bytearray((target / "train.tokens").read_bytes())
    raw[20:22] = (4000).to_bytes(2, "little")
    (target / "train.tokens").write_bytes(raw)
    checks = zlib.crc32(raw).to_bytes(4, "little")
    (target / "train.checks").write_bytes(checks)
    manifest = json.loads((target / "manifest.json").read_text())
    manifest["parts"][0]["checks"]["sha256"] = hashlib.sha256(checks).hexdigest()
    (target / "manifest.json").write_bytes(sealed(manifest))
    with pytest.raises(
        BadSample, match="at byte 20: it holds the token 4,000, outside of the vocabulary of 362"
    ):
        TokenPack(target).split(0).read(0, 100)


@pytest.mark.parametrize("name", ["train.tokens", "train.index", "train.checks", "val.index"])
def test_a_cut_or_changed_file_is_refused(tmp_path: Path, name: str) -> None:
    target = tmp_path / "packed"
    pack_text(f"text:{corpus(tmp_path / 'c', 1000)}", target)
    raw = (target / name).read_bytes()
    (target / name).write_bytes(raw[:-1])
    with pytest.raises(DataError, match="was written with"):
        TokenPack(target)
    if name != "train.tokens":
        (target / name).write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        with pytest.raises(DataError, match="is not what was written"):
            TokenPack(target)


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        (["text:{set}", "{set}"], 4, "exists already"),
        (["text:{set}/nowhere", "{set}/pack"], 4, "does not exist"),
        (["text:{set}", "{set}/pack", "--size", "8"], 2, "--size is about images"),
        (["{set}", "{set}/pack", "--tokenizer", "bytes:"], 2, "--tokenizer is about text"),
        (["text:{set}", "{set}/pack", "--tokenizer", "bpe:100"], 2, "but must have at least 362"),
        (["text:{set}", "{set}/pack", "--rows", "pair"], 4, "is no table"),
    ],
)
def test_mistakes_end_with_their_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, why: str
) -> None:
    folder = corpus(tmp_path / "c", 1000)
    assert main(["pack", *(word.format(set=folder) for word in arguments)]) == code
    assert why in capsys.readouterr().err


def test_nothing_is_left_of_a_pack_that_failed(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(b"good\n\xff\n")
    with pytest.raises(
        DataError, match=r"bad.txt, line 2 cannot be used: it is not text in UTF-8: byte 1 is 0xff"
    ):
        pack_text(f"text:{tmp_path / 'bad.txt'}", tmp_path / "packed")
    assert [path.name for path in tmp_path.iterdir()] == ["bad.txt"]
