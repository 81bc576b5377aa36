"""Folders of images and tables of texts are classified as a whole; what cannot be read is reported, not dropped."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.images import write_folder
from penstock import PRESETS, create
from penstock.cli import main
from penstock.models.convert import save_pretrained

SIZES: dict[str, Any] = {"width": 16, "depth": 1, "heads": 2, "mlp_width": 32}


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of two classes with names, and seven images of which one is broken."""
    monkeypatch.chdir(tmp_path)
    model = create(replace(PRESETS["vit-digits"], channels=3, classes=2, image_size=16, **SIZES))
    names = {"id2label": {"0": "cat", "1": "dog"}}
    (tmp_path / "names").mkdir()
    (tmp_path / "names" / "config.json").write_text(json.dumps(names))
    save_pretrained(model, tmp_path / "model", beside=tmp_path / "names")
    write_folder(tmp_path / "photos", per_class=3)
    (tmp_path / "photos" / "cat" / "broken.jpg").write_bytes(b"no image")
    (tmp_path / "photos" / "notes.txt").write_text("none of them")
    return tmp_path


@pytest.mark.parametrize("kind", ["csv", "jsonl", "json"])
def test_a_folder_of_images(kind: str, images: Path, capsys: pytest.CaptureFixture[str], caplog: Any) -> None:
    file = images / f"predictions.{kind}"
    assert main(["classify", "model", "photos", "--output", str(file), "--batch", "2"]) == 4
    said = capsys.readouterr()
    assert "6 predictions in" in said.out
    assert "1 of 7 inputs could not be read" in said.err
    assert "broken.jpg" in said.err
    assert "notes.txt" in caplog.text or "1 other file was left out" in caplog.text
    text = file.read_text()
    if kind == "csv":
        rows = list(csv.DictReader(text.splitlines()))
        assert list(rows[0]) == ["input", "label", "probability", "problem"]
    else:
        rows = json.loads(text) if kind == "json" else [*map(json.loads, text.splitlines())]
        assert all({*row["probabilities"]} == {"cat", "dog"} for row in rows if "label" in row)
    assert [Path(row["input"]).name for row in rows] == [
        "0000.jpg", "0001.jpg", "0002.jpg", "broken.jpg", "0000.jpg", "0001.jpg", "0002.jpg",
    ]  # fmt: skip
    bad = [row for row in rows if row.get("problem")]
    assert len(bad) == 1
    assert "broken.jpg" in bad[0]["input"]
    assert not bad[0].get("label")


def test_lines_have_the_classes_by_name(images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["classify", "model", "photos/dog", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 3
    for line in lines:
        assert line["label"] == max(line["probabilities"], key=line["probabilities"].get)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["photos", "--output", "predictions.xls"], "must end in .csv"),
        (["photos", "--output", "photos"], "must end in"),
        (["empty"], "There are no images in"),
        (["photos", "--columns", "text"], "reads images"),
    ],
)
def test_what_cannot_be_is_refused(
    words: list[str], said: str, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("empty").mkdir()
    assert main(["classify", "model", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_table_of_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    tiny = replace(PRESETS["bert-tiny"], vocabulary=264, sequence=32, head="classes", classes=3, **SIZES)
    from penstock.data.text.tokenizers import Bytes

    (tmp_path / "beside").mkdir()
    Bytes().save(tmp_path / "beside", 264)
    save_pretrained(create(tiny), tmp_path / "model", beside=tmp_path / "beside")
    Path("reviews.csv").write_text('id,text\n1,good\n2,""\n3,"bad, really"\n')
    Path("pairs.jsonl").write_text('{"a": "one", "b": "two"}\n{"a": "one"}\n')
    assert main(["classify", "model", "reviews.csv", "--output", "made.csv"]) == 4
    rows = list(csv.DictReader(Path("made.csv").read_text().splitlines()))
    assert [row["input"] for row in rows] == ["good", "", "bad, really"]
    assert ["reviews.csv, line 3" in row["source"] for row in rows] == [False, True, False]
    assert "is empty" in rows[1]["problem"]
    capsys.readouterr()
    assert main(["classify", "model", "pairs.jsonl", "--columns", "a,b", "--json"]) == 4
    said = capsys.readouterr()
    first, second = map(json.loads, said.out.splitlines())
    assert first["input"] == ["one", "two"]
    assert set(first["probabilities"]) == {"LABEL_0", "LABEL_1", "LABEL_2"} or set(
        first["probabilities"]
    ) == {"0", "1", "2"}
    assert "missing" in second["problem"]
    assert main(["classify", "model", "reviews.csv", "--columns", "body"]) == 4
    assert "'body'" in capsys.readouterr().err
    assert main(["classify", "model", "reviews.csv", "--output", "reviews.csv"]) == 2
