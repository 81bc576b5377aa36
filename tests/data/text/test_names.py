"""Names from CLDR: what is held out is held out in all languages, and labels reach the samples."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from penstock.config.run import DataConfig
from penstock.data.text.build import TextRow
from penstock.data.text.rows import open_rows
from penstock.data.text.tokenizers import Bytes
from penstock.data.toy.words import AFRICAN, LANGUAGES, LONGEST, is_held_out, names, read_names
from penstock.errors import ConfigError, EnvironmentProblem


def test_held_out_names_are_seen_in_no_language() -> None:
    train, val = (list(part) for part in names().parts)
    assert all(isinstance(row, TextRow) for row in train + val)
    assert len(AFRICAN) == 24
    counts = Counter(row.label for row in train)  # type: ignore[union-attr]
    assert set(counts) == set(LANGUAGES)
    assert min(counts.values()) > 500
    seen = set()
    for row in train:
        source, target = row.texts  # type: ignore[union-attr]
        languages, _, name = source.partition(": ")
        first, second = languages.split(">")
        assert second == row.label  # type: ignore[union-attr]
        assert first != second
        seen |= {(first, name.casefold()), (second, target.casefold())}
    read = read_names(LANGUAGES)
    held = {key: by_language for key, by_language in read.items() if is_held_out(key)}
    assert len(held) > 100
    assert not seen & {
        (language, name.casefold()) for each in held.values() for language, name in each.items()
    }
    assert read["territories: germany"]["sw"] == "Ujerumani"
    assert all(len(name.encode()) <= LONGEST for each in read.values() for name in each.values())
    assert list(names().parts[1]) == val, "the same rows each time"


def test_the_label_of_a_row_is_its_target_language(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tokenizer = Bytes()
    data = DataConfig(source="names:en,sw,yo", limit=200)
    rows = open_rows(data, tokenizer, "train", form="translation", length=64, target_length=64)
    assert rows.label_names == ("en", "sw", "yo")
    samples = np.empty(len(rows), rows.sample)
    rows.read_into(np.arange(len(rows)), samples)
    assert set(samples["label"]) == {0, 1, 2}
    for sample in samples:
        text = tokenizer.decode(sample["source"][: sample["source_length"]].tolist())
        assert text.partition(">")[2].startswith(rows.label_names[sample["label"]])
    data = DataConfig(source="numbers:en,de", limit=50)
    plain = open_rows(data, tokenizer, "train", form="translation", length=64, target_length=64)
    assert plain.label_names == ()
    assert plain.sample.names is not None
    assert "label" not in plain.sample.names


def test_a_third_column_is_a_label_of_a_translation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lines = [f"{n}\t{n + 1}\t{('sw', 'yo')[n % 3 == 0]}" for n in range(40)]
    (tmp_path / "rows.tsv").write_text("\n".join(["source\ttarget\tlanguage", *lines]))
    for columns, label_names in ((("source", "target", "language"), ("sw", "yo")), ((), ())):
        data = DataConfig(source=f"pairs:{tmp_path / 'rows.tsv'}", columns=columns)
        rows = open_rows(data, Bytes(), "train", form="translation", length=16, target_length=16)
        assert rows.label_names == label_names
        if label_names:
            samples = np.empty(len(rows), rows.sample)
            rows.read_into(np.arange(len(rows)), samples)
            for sample in samples:
                number = int(Bytes().decode(sample["source"][: sample["source_length"]].tolist()))
                assert sample["label"] == (number % 3 == 0)


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no language 'tlh-x'"):
        names(("en", "tlh-x"))
    with pytest.raises(ConfigError, match="two languages"):
        names(("en",))
    with pytest.raises(ConfigError, match=r"names are translations.*takes rows \(pair\)"):
        open_rows(DataConfig(source="names"), Bytes(), "train", form="pair", length=16)
    monkeypatch.setitem(sys.modules, "babel", None)
    with pytest.raises(EnvironmentProblem, match=r"penstock\[languages\]"):
        names()
