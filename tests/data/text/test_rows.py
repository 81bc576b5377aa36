from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from penstock.config.run import DataConfig
from penstock.data.text.rows import RowSource, open_rows
from penstock.data.text.tokenizers import Bytes
from penstock.errors import ConfigError, DataError, NoValidation

T = Bytes()


def opened(source: str, form: str, split: str = "train", length: int = 16, **options: object) -> RowSource:
    target = options.pop("target_length", 0)
    data = DataConfig(source=source, **options)  # type: ignore[arg-type]
    return open_rows(data, T, split, form=form, length=length, target_length=target)  # type: ignore[arg-type]


def read(source: RowSource) -> np.ndarray:
    out = np.empty(len(source), source.sample)
    source.read_into(np.arange(len(source)), out)
    return out


def test_pairs_of_a_table_with_tabs(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text(
        "id\tpremise\thypo\tlabel\n1\tab\tc\tyes\n2\td\tefghijklmnopqrstu\tno\n3\tx\ty\tyes\n"
    )
    (tmp_path / "dev.tsv").write_text("premise\thypo\tlabel\nq\tr\tno\n")
    source = opened(f"pairs:{tmp_path}", "pair", length=12)
    rows = read(source)
    c, s, p = T.classify, T.separator, T.pad
    assert rows["tokens"].tolist()[0] == [c, 97, 98, s, 99, s, p, p, p, p, p, p]
    assert rows["tokens"].tolist()[1] == [c, 100, s, *b"efghijkl", s]
    assert rows["segment"].tolist() == [4, 3, 3]
    assert rows["length"].tolist() == [6, 12, 5]
    assert source.lengths.tolist() == [6, 12, 5]
    assert source.classes == ("no", "yes")
    assert rows["label"].tolist() == [1, 0, 1]
    assert rows["label"].dtype == np.int64
    assert read(opened(f"pairs:{tmp_path}", "pair", "val"))["label"].tolist() == [0]


def test_numbers_as_labels_are_a_regression(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text('sentence,score\n"a, ""b""\nc",0.5\nd,3\n')
    (tmp_path / "val.csv").write_text("sentence,score\nq,1\n")
    source = opened(f"text:{tmp_path}", "single")
    assert source.classes is None
    rows = read(source)
    assert rows["label"].tolist() == [0.5, 3.0]
    assert rows["label"].dtype == np.float32
    assert T.decode(rows["tokens"][0].tolist()) == 'a, "b"\nc'


def test_columns_by_name_and_by_number(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text("first\tsecond\n" * 3)
    (tmp_path / "val.tsv").write_text("one\ttwo\n")
    source = opened(f"pairs:{tmp_path}", "two", columns=("2", "1"))
    rows = read(source)
    assert T.decode(rows["first"][0].tolist()) == "second"
    assert rows["second_length"].tolist() == [7, 7, 7]
    with pytest.raises(DataError, match=r"train.tsv lacks 'a', 'b'; its columns are 'first, second'"):
        opened(f"pairs:{tmp_path}", "two", columns=("a", "b"))


def test_translations_end(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"source": "abc", "target": "0123456789"}\n')
    (tmp_path / "val.jsonl").write_text('{"source": "abc", "target": "0"}\n')
    rows = read(opened(f"pairs:{tmp_path}", "translation", length=6, target_length=5))
    assert rows["source"].tolist() == [[97, 98, 99, T.end, T.pad, T.pad]]
    assert rows["target"].tolist() == [[*b"0123", T.end]]
    assert (rows["source_length"][0], rows["target_length"][0]) == (4, 5)


def test_number_words_hold_whole_numbers_out() -> None:
    pytest.importorskip("num2words")
    train, val = (
        opened("numbers:en,de", "translation", split, length=64, target_length=64)
        for split in ("train", "val")
    )
    assert len(train) + len(val) == 20_000
    assert 800 < len(val) / 2 < 1100
    targets = [{T.decode(row["target"].tolist()) for row in read(source)} for source in (train, val)]
    assert not targets[0] & targets[1]
    assert T.decode(read(train)[84]["source"].tolist()) == "en>de: forty-two"
    assert T.decode(read(train)[84]["target"].tolist()) == "zweiundvierzig"


def test_digits_are_translated_to_words_whose_label_is_their_language() -> None:
    num2words = pytest.importorskip("num2words").num2words
    source = opened("numbers:digits,ar,en", "translation", "val", length=24, target_length=80, limit=400)
    assert source.label_names == ("ar", "en")
    assert source.labels_in_prompts
    assert not opened("numbers:en,de", "translation", length=64, target_length=64, limit=9).labels_in_prompts
    rows = read(source)
    assert len(rows) == 400
    for row in rows:
        words = T.decode(row["source"][: row["source_length"]].tolist())
        language = source.label_names[row["label"]]
        number = int(words.removeprefix(f"digits>{language}: "))
        said = T.decode(row["target"][: row["target_length"]].tolist())
        assert said == num2words(number, lang=language)
    with pytest.raises(ConfigError, match="task translation, or leave digits out"):
        opened("numbers:digits,en", "pair", limit=9)
    with pytest.raises(ConfigError, match="digits, of translations, comes first"):
        opened("numbers:en,digits", "translation", length=64, target_length=64, limit=9)


def test_number_pairs_have_known_labels() -> None:
    pytest.importorskip("num2words")
    source = opened("numbers:en,de", "pair", length=128, limit=2000)
    assert source.classes == ("different", "same")
    share = read(source)["label"].mean()
    assert 0.45 < share < 0.55
    assert opened("numbers", "single", limit=100).classes == ("even", "odd")


def test_one_language_pairs_numbers_with_ordinals() -> None:
    num2words = pytest.importorskip("num2words").num2words
    source = opened("numbers:en", "pair", length=128, limit=2000)
    of = {num2words(number): num2words(number, to="ordinal") for number in range(1, 10_000)}
    for row in read(source):
        tokens, split = row["tokens"].tolist(), row["segment"]
        first, second = T.decode(tokens[:split]), T.decode(tokens[split:])
        assert second in of.values()
        assert (of[first] == second) == (source.classes[row["label"]] == "same")
    assert opened("numbers:es", "two", limit=100)
    with pytest.raises(ConfigError, match=r"no ordinal number 1 in 'cs'; give .* two languages"):
        opened("numbers:cs", "pair", limit=100)
    with pytest.raises(ConfigError, match="needs two languages for this task"):
        opened("numbers:en", "translation", limit=100)


def test_forms_that_a_source_lacks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="stdlib is text without rows"):
        opened("stdlib", "pair")
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match="is no table"):
        opened(f"text:{tmp_path}", "single")
    (tmp_path / "b.tsv").write_text("a\tb\n" * 20)
    with pytest.raises(ConfigError, match="no room for text"):
        opened(f"pairs:{tmp_path}/b.tsv", "two", length=2, columns=("1", "2"))


def test_classes_may_be_called_none(tmp_path: Path) -> None:
    rows = [(f"text {n}", ("favour", "none", "-", "nan", "NA")[n % 5]) for n in range(50)]
    (tmp_path / "a.csv").write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t, "label": c}) + "\n" for t, c in rows))
    table, typed = (f"text:{tmp_path}/a.{kind}" for kind in ("csv", "jsonl"))
    with pytest.raises(
        DataError, match=r"holds no label: 'none'; if that is a class, set data\.all_labels to true"
    ):
        open_rows(DataConfig(source=table), Bytes(), "train", form="single", length=30)
    for data in (DataConfig(source=typed), DataConfig(source=table, all_labels=True)):
        read = open_rows(data, Bytes(), "train", form="single", length=30)
        assert read.classes == ("-", "NA", "favour", "nan", "none")
    (tmp_path / "a.jsonl").write_text('{"text": "a", "label": null}\n{"text": "a", "label": NaN}\n')
    with pytest.raises(DataError, match="line 1 cannot be used: the column 'label' holds no label"):
        open_rows(DataConfig(source=typed), Bytes(), "train", form="single", length=30)
    (tmp_path / "a.csv").write_text("text,label\n" + "a,1\nb,--1\n" * 20)
    assert opened(table, "single").classes == ("--1", "1")


@pytest.mark.parametrize("rows", [100, 300])
@pytest.mark.parametrize("texts", [1, 3, 40])
def test_rows_that_share_their_first_text_are_in_one_split(tmp_path: Path, rows: int, texts: int) -> None:
    lines = [f"{'abcd'[n % texts % 4]}{n % texts}\t{n}\t{n % 2}" for n in range(rows)]
    (tmp_path / "few.tsv").write_text("\n".join(["first\tsecond\tlabel", *lines]))
    train = opened(f"pairs:{tmp_path / 'few.tsv'}", "pair")
    if len(train) == rows:
        assert texts < 40
        with pytest.raises(NoValidation, match="too few different first texts"):
            opened(f"pairs:{tmp_path / 'few.tsv'}", "pair", "val")
        return
    val = opened(f"pairs:{tmp_path / 'few.tsv'}", "pair", "val")
    assert len(train) + len(val) == rows
    assert len(val) <= rows / 2
    first = [{bytes(row["tokens"][1 : row["segment"] - 1]) for row in read(side)} for side in (train, val)]
    assert not first[0] & first[1]
