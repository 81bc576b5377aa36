"""Images with names in many languages: what is held out of training, and emoji drawn by a font."""

from __future__ import annotations

import io
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ImageFont

from helpers.real_data import EMOJI, colour_fonts, needs_emoji
from penstock.config.run import DataConfig
from penstock.data.toy.captions import (
    EMOJI_SIZE,
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
    return {split: open_captions(DataConfig(), split, channels=1) for split in ("train", "val")}  # type: ignore[arg-type]


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
        ("captions:en", "needs two languages, such as captions:en,de"),
        ("captions:en,xx", "num2words does not speak 'xx'; data.source=captions:"),
        ("digits", "this task takes images with captions"),
        ("emoji:font.ttf,names", "there is no font font.ttf. Install a colour font"),
        ("emoji:font.ttf", "this task takes images with captions"),
    ],
)
def test_what_cannot_be_opened_is_refused(source: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_captions(DataConfig(source=source), "train", channels=1)
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


def _annotations(folder: Path, language: str, names: dict[str, Any]) -> None:
    (folder / language).mkdir(parents=True)
    tree = {
        "annotations": {
            "identity": {},
            "annotations": {code: {"tts": [name]} for code, name in names.items()},
        }
    }
    (folder / language / "annotations.json").write_text(json.dumps(tree), encoding="utf-8")


def _coloured(font: bytes, red: int, green: int, blue: int) -> bytes:
    """A font all of whose glyphs have one layer in a colour: with OpenType's tables COLR and CPAL, version 0."""
    kind, count = struct.unpack(">IH", font[:6])
    tables = {}
    for at in range(12, 12 + 16 * count, 16):
        tag, _, begin, length = struct.unpack(">4sIII", font[at : at + 16])
        tables[tag] = font[begin : begin + length]
    glyphs = range(struct.unpack(">H", tables[b"maxp"][4:6])[0])
    base = b"".join(struct.pack(">HHH", glyph, glyph, 1) for glyph in glyphs)
    layers = b"".join(struct.pack(">HH", glyph, 0) for glyph in glyphs)
    tables[b"COLR"] = struct.pack(">HHIIH", 0, len(glyphs), 14, 14 + len(base), len(glyphs)) + base + layers
    tables[b"CPAL"] = struct.pack(">4HIH4B", 0, 1, 1, 1, 14, 0, blue, green, red, 255)
    head, body = struct.pack(">IHHHH", kind, len(tables), 0, 0, 0), b""
    for tag, table in sorted(tables.items()):
        head += struct.pack(">4sIII", tag, 0, 12 + 16 * len(tables) + len(body), len(table))
        body += table + bytes(-len(table) % 4)
    return head + body


def test_emoji_are_drawn_and_held_out_as_a_whole(tmp_path: Path) -> None:
    """Letters stand for emoji, and Pillow's own font, in orange, for one of emoji."""
    loaded: Any = ImageFont.load_default(10)
    assert isinstance(loaded.path, io.BytesIO)
    font, folder = tmp_path / "font.ttf", tmp_path / "names"
    font.write_bytes(_coloured(loaded.path.getvalue(), 255, 128, 0))
    letters = [chr(n) for n in (*range(48, 58), *range(65, 91), *range(97, 123))]
    _annotations(folder, "en", {code: f"letter {code}" for code in [*letters, "中"]})  # which the font lacks
    _annotations(folder, "de", {code: f"Buchstabe {code}" for code in letters[:-1]})
    opened = {
        split: open_captions(DataConfig(source=f"emoji:{font},{folder}"), split, channels=3)  # type: ignore[arg-type]
        for split in ("train", "val")
    }
    train, val = opened["train"], opened["val"]
    assert train.pictures.images.shape == (62, EMOJI_SIZE, EMOJI_SIZE, 3)
    assert (train.pictures.images[..., 0] >= 254).all()
    assert (train.pictures.images.min((0, 1, 2)) <= [255, 140, 20]).all()
    assert len({image.tobytes() for image in train.pictures.images}) > 55
    assert not train.words.held.any()
    seen, unseen = (set(one.pictures.concepts[one.rows["image"]]) for one in (train, val))
    assert not seen & unseen
    assert len(unseen) >= 2
    assert len(train.words.texts) == 62 + 61
    blue = tmp_path / "blue.ttf"
    blue.write_bytes(_coloured(loaded.path.getvalue(), 0, 0, 255))
    both = DataConfig(source=f"emoji:{font}+{blue},{folder}")
    train, val = (open_captions(both, split, channels=3) for split in ("train", "val"))  # type: ignore[arg-type]
    assert train.pictures.images.shape[0] == 2 * 62
    assert (train.pictures.images[62:, ..., 2] >= 254).all(), "those of the second font are blue"
    seen, unseen = (set(one.rows["image"]) for one in (train, val))
    assert not seen & unseen
    assert len(unseen) >= 4
    known = set(train.pictures.concepts[train.rows["image"]])
    assert sum(concept in known for concept in val.pictures.concepts[val.rows["image"]]) > 0.8 * len(val.rows)
    broken = tmp_path / "broken.ttf"
    broken.write_bytes(b"no font")
    with pytest.raises(DataError, match="cannot be read"):
        open_captions(DataConfig(source=f"emoji:{broken},{folder}"), "train", channels=3)
    (folder / "de" / "annotations.json").write_text("{}")
    with pytest.raises(DataError, match=r"holds no annotations\.annotations"):
        open_captions(DataConfig(source=f"emoji:{font},{folder}"), "train", channels=3)


@pytest.mark.skipif(not colour_fonts(), reason="no colour font is installed (fonts-noto-color-emoji)")
def test_emoji_of_an_installed_font_have_their_colours(tmp_path: Path) -> None:
    codes = "🍎🍏🍋🍇🍉🍊🍓🥑🥕🌽🌶🥦"
    for language, names in (("en", "red green yellow"), ("de", "rot grün gelb")):
        _annotations(tmp_path, language, dict.fromkeys(codes, names) | dict(zip(codes, names.split())))
    source = DataConfig(source=f"emoji:{colour_fonts()[0]},{tmp_path}")
    pictures = open_captions(source, "train", channels=3).pictures
    at = {names: number for number, names in enumerate(pictures.names["en"])}
    apples = [pictures.images[at[name]].reshape(-1, 3).mean(0) for name in ("red", "green")]
    assert apples[0][0] > apples[0][1]
    assert apples[1][1] > apples[1][0]


@needs_emoji
def test_emoji_have_the_names_of_cldr_in_all_its_languages() -> None:
    train, val = (
        open_captions(DataConfig(source=f"emoji:{EMOJI}"), split, channels=3)  # type: ignore[arg-type]
        for split in ("train", "val")
    )
    pictures, words = train.pictures, train.words
    assert pictures.images.shape[0] > 1000
    assert len(words.languages) > 100
    (apple,) = (number for number, name in enumerate(pictures.names["en"]) if name == "red apple")
    apples = {language: pictures.names[language][apple] for language in ("de", "ja", "sw")}
    assert apples == {"de": "roter Apfel", "ja": "赤リンゴ", "sw": "tufaha jekundu"}
    red, green, blue = pictures.images[apple].reshape(-1, 3).mean(0)
    assert red > max(green, blue) + 20
    drawn = {image.tobytes() for image in pictures.images}
    assert len(drawn) > 0.99 * len(pictures.images)
    seen, unseen = (set(one.pictures.concepts[one.rows["image"]]) for one in (train, val))
    assert not seen & unseen
    assert 0.07 < len(unseen) / len(seen | unseen) < 0.13
    named = [len(set(words.language[source.rows["read"]])) for source in (train, val)]
    assert min(named) > 0.7 * len(words.languages), named  # of some regions there are a handful of names
