"""Marian's tokenizer: both sides, one table, what is broken, and packs of translations."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.marian import BPE, CODE, LETTERS, NUMBERS, SOURCE, SPACE, model, write_files
from penstock.config.run import DataConfig
from penstock.data.text.marian import Marian
from penstock.data.text.open import open_tokenizer
from penstock.data.text.rows import open_rows
from penstock.data.text.sources import TextPacking, pack_text
from penstock.data.text.tokenizers import Bytes, Tokenizer
from penstock.errors import ConfigError, DataError

pytest.importorskip("sentencepiece")

REAL = Path(__file__).parent / "marian"
FILES = {"source.spm", "target.spm", "vocab.json", "tokenizer_config.json"}
UNKNOWN = NUMBERS["<unk>"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_files(tmp_path / "marian")


def opened(folder: Path) -> Tokenizer:
    return open_tokenizer(DataConfig(tokenizer=str(folder)))


def numbers(*pieces: str) -> list[int]:
    return [NUMBERS[piece] for piece in pieces]


def test_each_side_is_cut_by_its_own_model(folder: Path) -> None:
    tokenizer = opened(folder)
    assert isinstance(tokenizer, Marian)
    assert tokenizer.two_sided
    text = "3 in tens and"
    source = numbers(SPACE, "3", f"{SPACE}in", f"{SPACE}tens", SPACE, "a", "n", "d")
    target = numbers(SPACE, "3", SPACE, "i", "n", SPACE, "tens", f"{SPACE}and")
    assert tokenizer.encode([text, ""])[0].tolist() == source
    assert tokenizer.encode_target([text, ""])[0].tolist() == target
    assert tokenizer.encode([""])[0].dtype == tokenizer.encode([text])[0].dtype == np.int32
    assert tokenizer.encode([" "])[0].tolist() == []
    assert tokenizer.decode(source) == tokenizer.decode(target) == text
    assert Bytes().encode_target([text])[0].tolist() == Bytes().encode([text])[0].tolist()


@pytest.mark.parametrize(
    "case", json.loads((REAL / "expected.json").read_text()), ids=lambda case: case[0][:12]
)
def test_numbers_and_texts_are_those_of_transformers(case: list[Any]) -> None:
    """`expected.json` is what MarianTokenizer of transformers 5 gave, with models that sentencepiece 0.2.3 trained."""
    tokenizer = opened(REAL)
    text, source, target, *told = case
    assert tokenizer.encode([text])[0].tolist() == source
    assert tokenizer.encode_target([text])[0].tolist() == target
    assert [tokenizer.decode(source), tokenizer.decode(target)] == told


@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
def test_marian_tokenizer_reads_what_is_saved(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    opened(REAL).save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text, source, target, *_ in json.loads((REAL / "expected.json").read_text()):
        assert theirs(text, add_special_tokens=False).input_ids == source
        assert theirs(text_target=text, add_special_tokens=False).input_ids == target


def test_special_tokens_are_those_of_marian(folder: Path) -> None:
    tokenizer = opened(folder)
    assert (tokenizer.end, tokenizer.unknown, tokenizer.pad) == (0, 1, len(NUMBERS) - 1)
    assert tokenizer.begin is None
    assert tokenizer.start == tokenizer.pad
    assert tokenizer.size == len(NUMBERS)
    assert tokenizer.specials == (0, 1, len(NUMBERS) - 1)
    assert tokenizer.words()[3] == sorted((SOURCE.keys() | {"ö", "tens", f"{SPACE}and"}) - {"z"})[1]
    starts = tokenizer.word_starts()
    assert starts[numbers(f"{SPACE}in", "</s>")].all()
    assert not starts[numbers("ten", "a")].any()


def test_what_a_model_does_not_know_is_looked_up_as_it_is_spelled(folder: Path) -> None:
    """The table is of both sides, so that a letter of one has a number on the other too."""
    tokenizer = opened(folder)
    assert tokenizer.encode(["aö"])[0].tolist() == numbers(SPACE, "a", "ö")
    assert tokenizer.encode(["aöß"])[0].tolist() == [*numbers(SPACE, "a"), UNKNOWN], "one piece"
    assert tokenizer.encode_target(["aöß"])[0].tolist() == [*numbers(SPACE, "a", "ö"), UNKNOWN]
    assert tokenizer.encode(["z"])[0].tolist() == [*numbers(SPACE), UNKNOWN], "not in the table"
    assert tokenizer.encode(["</s>"])[0].tolist() == [*numbers(SPACE), UNKNOWN, *numbers("s"), UNKNOWN]
    assert tokenizer.decode([*numbers(SPACE, "a"), UNKNOWN, 0, tokenizer.pad, 10_000, -1]) == "a"
    with pytest.raises(DataError, match="cannot be used: List elements must be str"):
        tokenizer.encode(["a\ud800"])


def test_a_language_code_in_front_is_one_token(folder: Path) -> None:
    tokenizer = opened(folder)
    for encode in (tokenizer.encode, tokenizer.encode_target):
        assert encode([f"{CODE} 3"])[0].tolist() == numbers(CODE, SPACE, "3")
        assert encode([">>xx<< 3"])[0].tolist() == [UNKNOWN, *numbers(SPACE, "3")]
        assert encode([f"3 {CODE}"])[0][:2].tolist() == numbers(SPACE, "3")
        assert NUMBERS[CODE] not in encode([f"3 {CODE}"])[0]


def test_it_is_the_same_where_it_is_saved_pickled_or_read_again(folder: Path, tmp_path: Path) -> None:
    tokenizer = opened(folder)
    tokenizer.save(tmp_path / "saved")
    assert {path.name for path in (tmp_path / "saved").iterdir()} == FILES
    settings = json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "MarianTokenizer"
    assert settings["source_lang"] == "en"
    for other in (opened(tmp_path / "saved"), pickle.loads(pickle.dumps(tokenizer))):
        assert other.fingerprint == tokenizer.fingerprint
        assert other.encode_target(["tens"])[0].tolist() == numbers(SPACE, "tens")
        assert other.encode(["tens"])[0].tolist() == numbers(f"{SPACE}tens")


@pytest.mark.parametrize("file", ["source.spm", "target.spm", "vocab.json"])
def test_its_fingerprint_is_of_all_its_files(folder: Path, file: str) -> None:
    before = opened(folder).fingerprint
    path = folder / file
    if file == "vocab.json":
        path.write_text(json.dumps({**NUMBERS, "a": NUMBERS["b"], "b": NUMBERS["a"]}))
    else:
        path.write_bytes(model({**SOURCE, "ab": -1.0}))
    assert opened(folder).fingerprint != before


def _table(**changes: Any) -> str:
    return json.dumps({**NUMBERS, **changes})


def _without(word: str) -> str:
    return json.dumps({key: number for key, number in NUMBERS.items() if key != word})


BROKEN: dict[str, tuple[str, Callable[[Path], Any], type[Exception], str]] = {
    "no target.spm": ("target.spm", Path.unlink, DataError, r"is Marian's, but lacks target\.spm\. Copy that there"),
    "no source.spm": ("source.spm", Path.unlink, DataError, r"lacks source\.spm"),
    "no vocabulary": ("vocab.json", Path.unlink, DataError, r"lacks vocab\.json"),
    "a broken model": ("target.spm", lambda path: path.write_bytes(b"hello"), DataError, r"target\.spm cannot be read"),
    "a list": ("vocab.json", lambda path: path.write_text("[]"), DataError, r"vocab\.json is refused"),
    "an empty table": ("vocab.json", lambda path: path.write_text("{}"), DataError, "has no pieces"),
    "a number that is none": ("vocab.json", lambda path: path.write_text(_table(a=-1)), DataError, "the number '-1'"),
    "a number that is text": ("vocab.json", lambda path: path.write_text(_table(a="2")), DataError, "the number '2'"),
    "a number twice": ("vocab.json", lambda path: path.write_text(_table(a=3)), DataError, "the same number"),
    "no padding": ("vocab.json", lambda path: path.write_text(_without("<pad>")), DataError, "pad_token '<pad>'"),
    "a second table": (
        "target_vocab.json", lambda path: path.write_text("{}"), ConfigError, "by a table of their own"
    ),
    "separate tables": (
        "tokenizer_config.json", lambda path: path.write_text('{"separate_vocabs": true}'), ConfigError,
        "by a table of their own",
    ),
    "sampling": (
        "tokenizer_config.json", lambda path: path.write_text('{"sp_model_kwargs": {"enable_sampling": true}}'),
        ConfigError, "does not apply",
    ),
    "a token beside the table": (
        "tokenizer_config.json",
        lambda path: path.write_text('{"added_tokens_decoder": {"900": {"content": "<new>"}}}'),
        ConfigError, "adds '<new>' as number '900'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_or_not_supported_is_refused_by_name(folder: Path, name: str) -> None:
    file, change, error, said = BROKEN[name]
    change(folder / file)
    with pytest.raises(error, match=said):
        opened(folder)


@pytest.mark.parametrize("more", [{}, {"ö": -9.0}], ids=["a letter of the table alone", "all letters"])
def test_one_bpe_for_both_sides(folder: Path, more: dict[str, float]) -> None:
    pieces = {**LETTERS, **more, "te": -0.5, "ten": -1.0}
    for side in ("source.spm", "target.spm"):
        (folder / side).write_bytes(model(pieces, BPE))
    (folder / "vocab.json").write_text(_table(te=len(NUMBERS)))
    tokenizer = opened(folder)
    assert tokenizer.encode(["öten ß"])[0].tolist() == [*numbers(SPACE, "ö", "ten", SPACE), UNKNOWN]


def test_pieces_of_bytes_become_letters(folder: Path) -> None:
    first = len(NUMBERS)
    pieces = {f"<0x{byte:02X}>": -9.0 for byte in range(256)}
    table = NUMBERS | {piece: first + byte for byte, piece in enumerate(pieces)}
    source = model({**SOURCE, **pieces}) + b"\x12\x03\x98\x02\x01"  # trainer_spec.byte_fallback
    made = Marian("bytes", source, source, table, {})
    assert made.encode(["aö"])[0].tolist() == [*numbers(SPACE, "a"), first + 0xC3, first + 0xB6]
    assert made.decode([*numbers(SPACE, "a"), first + 0xC3, first + 0xB6]) == "aö"
    assert opened(folder).decode(numbers(SPACE, "a")) == "a"


def test_rows_and_packs_have_sources_and_targets_of_their_side(folder: Path, tmp_path: Path) -> None:
    for part in ("train", "val"):
        (tmp_path / f"{part}.tsv").write_text("source\ttarget\n" + "3 in tens\t3 and tens\n" * 3)
    tokenizer = opened(folder)
    source, target = tokenizer.encode(["3 in tens"])[0], tokenizer.encode_target(["3 and tens"])[0]
    assert target.tolist() == numbers(SPACE, "3", f"{SPACE}and", SPACE, "tens")
    pack_text(
        f"pairs:{tmp_path}", tmp_path / "packed", TextPacking(tokenizer=str(folder), rows="translation")
    )
    for data in (DataConfig(source=f"pairs:{tmp_path}"), DataConfig(source=f"pack:{tmp_path / 'packed'}")):
        found = tokenizer if data.source.startswith("pairs") else open_tokenizer(data)
        assert found.fingerprint == tokenizer.fingerprint
        rows = open_rows(data, found, "train", form="translation", length=9)
        out = np.empty(len(rows), rows.sample)
        rows.read_into(np.arange(len(rows)), out)
        end, pad = tokenizer.end, tokenizer.pad
        assert out["source"][2].tolist() == [*source, end, *[pad] * (8 - len(source))]
        assert out["target"][2].tolist() == [*target, end, *[pad] * (8 - len(target))]
    with pytest.raises(
        ConfigError, match="has targets as second texts, and this task takes texts of one side"
    ):
        open_rows(data, tokenizer, "train", form="two", length=9)
    two = DataConfig(source=f"pairs:{tmp_path}")
    out = np.empty(1, (rows := open_rows(two, tokenizer, "train", form="two", length=9)).sample)
    rows.read_into(np.arange(1), out)
    assert out["second"][0][:6].tolist() == tokenizer.encode(["3 and tens"])[0][:6].tolist()


def test_a_part_of_it_in_the_cache_of_the_hub_is_completed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    cached, asked = tmp_path / "cached", []
    cached.mkdir()
    for file in ("source.spm", "vocab.json", "tokenizer_config.json"):
        (cached / file).write_bytes((folder / file).read_bytes())

    def download(**options: Any) -> str:
        asked.append(options)
        if not options.get("local_files_only") and "target.spm" in options["allow_patterns"]:
            (cached / "target.spm").write_bytes((folder / "target.spm").read_bytes())
        return str(cached)

    monkeypatch.setattr(hub, "snapshot_download", download)
    assert opened(Path("somebody/opus-mt")).fingerprint == opened(folder).fingerprint
    assert len(asked) == 2
    assert "target_vocab.json" in asked[1]["allow_patterns"]
