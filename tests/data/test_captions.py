"""Images with names in many languages: what is held out of training, and folders of one's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from penstock.config.run import DataConfig
from penstock.data.captions import (
    IMAGE,
    LANGUAGES,
    TEXT,
    Captions,
    Pictures,
    open_captions,
    trained_pairs,
)
from penstock.errors import ConfigError, DataError

pytest.importorskip("num2words")


@pytest.fixture(scope="module")
def splits() -> dict[str, Any]:
    return {split: open_captions(DataConfig(), split, channels=1, image_size=8) for split in ("train", "val")}


def test_names_are_in_many_languages_and_belong_to_their_images(splits: dict[str, Any]) -> None:
    assert len(set(LANGUAGES)) == len(LANGUAGES) > 30
    for source in splits.values():
        rows, words, pictures = source.rows, source.words, source.pictures
        for side in ("read", "written"):
            assert np.array_equal(words.concept[rows[side]], pictures.concepts[rows["image"]])
        out = np.empty(source.sample.shape, np.uint8)
        source.load(5, out)
        assert np.array_equal(out, pictures.images[rows["image"][5]])
    words = splits["train"].words
    seven = {words.languages[words.language[n]]: words.texts[n] for n in np.flatnonzero(words.concept == 7)}
    assert (seven["en"], seven["de"], seven["ja"]) == ("seven", "sieben", "七")


def test_training_sees_no_image_no_name_and_no_pair_that_is_held_out(splits: dict[str, Any]) -> None:
    train, val = splits["train"], splits["val"]
    words, rows = train.words, train.rows
    assert not set(rows["image"]) & set(val.rows["image"])
    assert len(set(val.rows["image"])) == 355
    held = set(np.flatnonzero(words.held))
    assert 5 < len(held) < len(words.texts) / 10
    assert not held & (set(rows["read"]) | set(rows["written"]))
    assert set(val.rows["read"]) == set(range(len(words.texts)))
    texts = rows[rows["sees"] == TEXT]
    assert 0.2 < len(texts) / len(rows) < 0.4  # a third of languages are not translated
    assert train.trained[words.language[texts["read"]], words.language[texts["written"]]].all()
    asked = val.rows[val.rows["sees"] == TEXT]
    trained = val.trained[words.language[asked["read"]], words.language[asked["written"]]]
    assert 0.2 < trained.mean() < 0.8
    assert (asked["read"] != asked["written"]).all()
    captioned = {words.languages[n] for n in set(words.language[rows["written"][rows["sees"] == IMAGE]])}
    assert captioned == set(LANGUAGES)


def test_pairs_are_held_out_both_ways_and_some_languages_as_a_whole() -> None:
    pairs = trained_pairs(LANGUAGES)
    assert np.array_equal(pairs, pairs.T)
    assert not pairs.diagonal().any()
    alone = np.flatnonzero(~pairs.any(1))
    assert alone.tolist() == list(range(2, len(LANGUAGES), 3))
    rest = np.delete(np.delete(pairs, alone, 0), alone, 1)
    assert 0.7 < rest.sum() / (len(rest) * (len(rest) - 1)) < 0.9
    assert trained_pairs(("en", "de")).tolist() == [[False, True], [True, False]]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("captions:no/such", "takes a folder or two languages (captions:en,de), not 'no/such'"),
        ("captions:en,xx", "num2words does not speak 'xx'; data.source=captions:"),
        ("digits", "this task takes images with captions"),
    ],
)
def test_what_cannot_be_opened_is_refused(source: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_captions(DataConfig(source=source), "train", channels=1, image_size=8)
    assert said in str(caught.value)


def test_all_languages_are_asked_for_where_each_concept_has_one_image() -> None:
    names = {language: [f"{language} {number}" for number in range(40)] for language in "abcdefg"}
    held = np.arange(40) >= 20
    pictures = Pictures(np.zeros((40, 4, 4, 1), np.uint8), np.arange(40), names, held, words=False)
    val = Captions("made", pictures, "val")
    language, rows = val.words.language, val.rows
    captions = rows[rows["sees"] == IMAGE]
    for numbers in (rows["read"], captions["read"], captions["written"]):
        counts = np.bincount(language[numbers], minlength=7)
        assert counts.min() >= counts.max() - 2 > 0, counts


LINES: list[dict[str, Any]] = [
    {"file_name": f"{n // 10}/{n}.png", "en": f"shade {n % 10}", "de": "" if n == 3 else f"Ton {n % 10}"}
    for n in range(60)
]


def _write_folder(folder: Path, lines: list[Any]) -> DataConfig:
    for n in range(60):
        (folder / str(n // 10)).mkdir(exist_ok=True)
        Image.new("RGB", (12, 9), (4 * n, 0, 255)).save(folder / f"{n // 10}/{n}.png")
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (folder / "metadata.jsonl").write_text(text, encoding="utf-8")
    return DataConfig(source=f"captions:{folder}")


@pytest.mark.parametrize(("shared", "concepts", "names"), [(False, 60, 119), (True, 10, 20)])
def test_a_folder_of_images_with_captions(shared: bool, concepts: int, names: int, tmp_path: Path) -> None:
    lines = [{**line, "concept": line["en"]} if shared else line for line in LINES]
    data = _write_folder(tmp_path, [*lines, ""])
    train = open_captions(data, "train", channels=3, image_size=6)
    val = open_captions(data, "val", channels=3, image_size=6)
    pictures = train.pictures
    assert pictures.images.shape == (60, 6, 6, 3)
    assert pictures.images[5, 0, 0].tolist() == [20, 0, 255]
    assert train.words.languages == ("de", "en")
    assert (len(set(pictures.concepts)), len(train.words.texts)) == (concepts, names)
    assert not train.words.held.any()
    seen, unseen = set(train.rows["image"]), set(val.rows["image"])
    assert not seen & unseen
    assert len(unseen) >= 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            {"file_name": "0/0.png", "en": "a"},
            "has captions in en, and needs two: a column for each language",
        ),
        ({"en": "a", "de": "b"}, "file_name is missing"),
        ({"file_name": "0/0.png", "en": 3}, "'en' is no text"),
        ({"file_name": "no.png", "en": "a"}, "the image 'no.png' cannot be read"),
        ({"file_name": "../x.png", "en": "a"}, "cannot be read: it is not in the folder"),
        ("[1]", "metadata.jsonl"),
    ],
)
def test_a_table_of_captions_that_is_wrong_is_refused(line: Any, said: str, tmp_path: Path) -> None:
    data = _write_folder(tmp_path, [line])
    with pytest.raises(DataError) as caught:
        open_captions(data, "train", channels=3, image_size=6)
    assert said in str(caught.value)
    assert "metadata.jsonl" in str(caught.value)


def test_a_folder_without_a_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no metadata\.jsonl, whose lines name images"):
        open_captions(DataConfig(source=f"captions:{tmp_path}"), "train", channels=3, image_size=6)
    with pytest.raises(ConfigError, match=r"emoji: was removed; draw them with examples/emoji_captions\.py"):
        DataConfig(source="emoji:font.ttf,names")
