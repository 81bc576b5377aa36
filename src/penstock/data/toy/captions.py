"""Images with names in many languages: digits with their names, and emoji with those of Unicode.

A sample is an image, a name of what it shows, another name of it that is to be written, and whether the writer sees the
image or the first name. Training never sees some of the images, some of the names, and translations between some pairs
of languages, among them all pairs with a language that training sees in captions alone.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.boundary.files import quoted, read_bytes, shown
from penstock.boundary.trees import Bounds, parse_json
from penstock.config.run import DataConfig
from penstock.data.source import ImageSource, Pixels, Split
from penstock.data.toy.words import LONGEST, is_held_out, speaker
from penstock.errors import ConfigError, DataError

LANGUAGES = (
    "en", "de", "fr", "es", "it", "pt", "nl", "sv", "da", "pl", "cs", "ru", "uk", "tr", "fi", "hu", "ro", "ca", "id",
    "vi", "cy", "eo", "is", "lt", "lv", "sk", "sl", "sr", "be", "az", "tg", "kz", "tet", "no", "ar", "he", "ja", "ko",
)  # fmt: skip
"""Languages of `captions` by default."""
IMAGE, TEXT = 0, 1
"""Whether a writer sees the image or a name, as numbers."""
EMOJI_SIZE = 32
_DRAWN = 109
"""Pixels at which a font of bitmaps, such as Noto's, draws."""
_WORDS_EVERY, _PAIRS_EVERY, _ALONE_EVERY, _CODES_EVERY = 20, 5, 3, 10
_UNASSIGNED = "\U0010ffff"
_LOOKS = 4
"""Samples of each image for validation."""
_MOST_FONT = 64 << 20
_NAMES = Bounds(bytes=1 << 24, values=1 << 20)


class Pictures(NamedTuple):
    """Images, the concept that each shows, and its names."""

    images: Pixels
    """(I, S, S, C)"""
    concepts: NDArray[np.int64]
    """(I,)"""
    names: Mapping[str, Sequence[str]]
    """By language, a name of each concept; empty where there is none."""
    held: NDArray[np.bool_]
    """(I,), images for validation."""
    words: bool = True
    """Whether names are held out beside images."""


class NameTable(NamedTuple):
    """Names as a model takes them, W in all."""

    languages: tuple[str, ...]
    language: NDArray[np.int64]
    concept: NDArray[np.int64]
    held: NDArray[np.bool_]
    """Names that training never sees."""
    texts: tuple[str, ...]


class Captions(ImageSource):
    """Samples of one split: images by number, and all else in tables by number. `rows` has, of each sample, its image,
    the names that are read and written, and what the writer sees. Its label is the concept that it shows.
    """

    classes = ()
    crop_share, scalable = 1.0, True

    def __init__(self, name: str, pictures: Pictures, split: Split) -> None:
        self.name = f"{name} ({split})"
        self.pictures, self.words = pictures, _words(pictures)
        self.languages = self.words.languages
        self.size, self.channels = pictures.images.shape[2:]
        self.trained = trained_pairs(self.words.languages)
        """(L, L), pairs of languages between which training translates."""
        samples = list(_training(self) if split == "train" else _validation(self))
        if not samples:
            raise DataError(f"{name} has no names for {split}; give more languages, or more images.")
        self.rows = np.array(samples, [(field, np.int64) for field in ("image", "read", "written", "sees")])
        self.labels = pictures.concepts[self.rows["image"]]

    def load(self, index: int, out: Pixels) -> None:
        out[...] = self.pictures.images[self.rows["image"][index]]


def open_captions(data: DataConfig, split: Split, *, channels: int) -> Captions:
    """Open `captions`, `captions:LANGUAGES` (digits and their names) or `emoji:FONT,NAMES`: a font or several joined by
    `+`, and a folder with `LANGUAGE/annotations.json` of Unicode CLDR.

    Raises ConfigError, DataError, and EnvironmentProblem without num2words.
    """
    data = data.filled("captions")
    kind, _, rest = data.source.partition(":")
    if kind == "captions":
        return Captions(data.source, digits(tuple(rest.split(",")) if rest else LANGUAGES, channels), split)
    font, comma, names = rest.rpartition(",")
    if kind != "emoji" or not comma:
        raise ConfigError(
            f"data.source is {quoted(data.source)}, but this task takes images with captions: captions, "
            "captions:LANGUAGES or emoji:FONT,NAMES."
        )
    return Captions(
        data.source, emoji([Path(each) for each in font.split("+")], Path(names), channels), split
    )


def digits(languages: Sequence[str], channels: int) -> Pictures:
    """The embedded digits, and their names as num2words has them. Raises ConfigError for fewer than two languages, and
    for one that it does not speak."""
    from penstock.data.toy.digits import Digits

    if len(set(languages)) < 2:
        raise ConfigError(
            f"data.source=captions needs two languages, such as captions:en,de, not {quoted(','.join(languages))}."
        )
    languages = tuple(dict.fromkeys(languages))
    say = speaker("captions", languages)
    splits = [Digits("train", channels), Digits("val", channels)]
    return Pictures(
        images=np.concatenate([one.read(np.arange(len(one)))[0] for one in splits]),
        concepts=np.concatenate([one.labels for one in splits]),
        names={one: [say(number, one, "cardinal") for number in range(10)] for one in languages},
        held=np.repeat([False, True], [len(one) for one in splits]),
    )


def emoji(fonts: Sequence[Path], folder: Path, channels: int) -> Pictures:
    """Emoji that all fonts draw, and their short names in the languages of a folder of CLDR's annotations. A tenth is
    held out: of one font, emoji with their names; of several, drawings, whose emoji another font may show in training.
    """
    files = {file.parent.name: file for file in sorted(folder.glob("*/annotations.json"))}
    absent = [font for font in fonts if not font.is_file()]
    if absent or len(files) < 2:
        problem = f"there is no font {shown(absent[0])}" if absent else (
            f"the folder {shown(folder)} has no two languages with an annotations.json"
        )  # fmt: skip
        raise ConfigError(
            f"data.source=emoji:FONT,NAMES: {problem}. Install a colour font (Debian: fonts-noto-color-emoji) and the "
            "annotations of Unicode CLDR (npm: cldr-annotations-full), and name both."
        )
    texts = {language: names for language, file in files.items() if (names := _annotations(file))}
    codes = sorted({code for names in texts.values() for code in names if len(code) == 1})
    drawn = {font: _drawn(font, codes, channels) for font in fonts}
    common = [code for code in codes if all(code in images for images in drawn.values())]
    keys = [code if len(fonts) == 1 else f"{font.name}:{code}" for font in fonts for code in common]
    return Pictures(
        images=np.stack([images[code] for images in drawn.values() for code in common]),
        concepts=np.tile(np.arange(len(common)), len(fonts)),
        names={language: [names.get(code, "") for code in common] for language, names in texts.items()},
        held=np.array([is_held_out(key, _CODES_EVERY) for key in keys]),
        words=False,
    )


def _drawn(font: Path, codes: Sequence[str], channels: int) -> dict[str, Pixels]:
    """The characters that a font draws, other than as blanks or as it draws those that it lacks."""
    from PIL import Image, ImageDraw, ImageFont

    read_bytes(font, "The font", limit=_MOST_FONT)
    try:
        typeface = ImageFont.truetype(str(font), _DRAWN)
    except OSError as error:
        raise DataError(f"The font {shown(font)} cannot be read: {error}") from error
    drawn = dict[str, Pixels]()
    for code in (_UNASSIGNED, *codes):
        left, top, right, bottom = typeface.getbbox(code)
        side = max(1, round(right - left), round(bottom - top))
        canvas = Image.new("RGB", (side, side), "white")
        corner = ((side - right - left) / 2, (side - bottom - top) / 2)
        ImageDraw.Draw(canvas).text(corner, code, font=typeface, fill="black", embedded_color=True)
        small = canvas.resize((EMOJI_SIZE,) * 2).convert("L" if channels == 1 else "RGB")
        image = np.asarray(small, np.uint8).reshape(EMOJI_SIZE, EMOJI_SIZE, channels)
        blank = canvas.getextrema() == ((255, 255),) * 3
        if code == _UNASSIGNED or not (blank or (image == drawn[_UNASSIGNED]).all()):
            drawn[code] = image
    del drawn[_UNASSIGNED]
    if len(drawn) < _CODES_EVERY:
        raise DataError(
            f"The font {shown(font)} draws {len(drawn)} of the named emoji; name a font of emoji."
        )
    return drawn


def _annotations(file: Path) -> dict[str, str]:
    """The short name of each character in a file of CLDR's annotations, but for long ones."""
    raw = read_bytes(file, "The annotations", limit=_NAMES.bytes).decode("utf-8", "replace")
    tree = parse_json(raw, f"The file {shown(file)}", error=DataError, bounds=_NAMES)
    root = tree.get("annotations")
    by_code = root.get("annotations", {}) if isinstance(root, dict) else None  # some languages have none yet
    if not isinstance(by_code, dict):
        raise DataError(f"The file {shown(file)} holds no annotations.annotations, as CLDR's JSON has them.")
    names = {code: one.get("tts") for code, one in by_code.items() if isinstance(one, dict)}
    joined = {code: " ".join(map(str, name)) for code, name in names.items() if isinstance(name, list)}
    return {code: name for code, name in joined.items() if len(name.encode()) <= LONGEST}


def beginning(language: str) -> str:
    """The words that a text in a language begins with where it is written."""
    return f"{language}: "


def _words(pictures: Pictures) -> NameTable:
    entries = [
        (number, concept, pictures.words and is_held_out(f"{language}:{concept}", _WORDS_EVERY), text)
        for number, (language, names) in enumerate(pictures.names.items())
        for concept, text in enumerate(names)
        if text
    ]
    numbers, concepts, held, texts = zip(*entries, strict=True)
    languages = tuple(pictures.names)
    return NameTable(languages, np.array(numbers), np.array(concepts), np.array(held), texts)


def trained_pairs(languages: Sequence[str]) -> NDArray[np.bool_]:
    """(L, L), whether training translates from a language to another. Of every third language it sees captions alone,
    of four or more; of the other pairs a fifth is held out, in both directions."""
    count = len(languages)
    pairs = np.zeros((count, count), np.bool_)
    for second, first in itertools.combinations(range(count), 2):
        alone = _ALONE_EVERY - 1 in (first % _ALONE_EVERY, second % _ALONE_EVERY)
        held_out = alone or is_held_out(f"{languages[first]}:{languages[second]}", _PAIRS_EVERY)
        pairs[first, second] = pairs[second, first] = count < 4 or not held_out
    return pairs


def _table(words: NameTable, *, held: bool) -> NDArray[np.int64]:
    """(L, concepts), the number of each name, −1 where there is none, or one that is held out is not wanted."""
    table = np.full((len(words.languages), int(words.concept.max()) + 1), -1)
    usable = np.flatnonzero(held | ~words.held)
    table[words.language[usable], words.concept[usable]] = usable
    return table


def _training(source: Captions) -> Iterator[tuple[int, int, int, int]]:
    """Each image with its name in each language; half of the writers translate it where the language is translated."""
    pictures, table, rng = source.pictures, _table(source.words, held=False), random.Random(0)
    for image in np.flatnonzero(~pictures.held).tolist():
        column = table[:, pictures.concepts[image]]
        named = np.flatnonzero(column >= 0)
        partners = source.trained & (column >= 0)
        for language in named.tolist():
            translated = np.flatnonzero(partners[language])
            sees = TEXT if len(translated) and rng.random() < 0.5 else IMAGE
            target = rng.choice(translated if sees == TEXT else named)
            yield image, int(column[language]), int(column[target]), sees


def _validation(source: Captions) -> Iterator[tuple[int, int, int, int]]:
    """Each image with two captions, a translation between trained languages, and one between others. Languages take
    turns over the images of a concept, so that all names come up, or over all images where concepts are held out."""
    pictures, table, turns = source.pictures, _table(source.words, held=True), dict[int, int]()
    for image in np.flatnonzero(pictures.held).tolist():
        concept = int(pictures.concepts[image])
        by, column = concept if pictures.words else 0, table[:, concept]
        named = np.flatnonzero(column >= 0)
        for look in range(_LOOKS):
            turn = turns[by] = turns.get(by, -1) + 1
            if len(named) < 2:
                continue
            language, captions = named[turn % len(named)], _LOOKS // 2
            sees = IMAGE if look < captions else TEXT
            target = named[(turn // _LOOKS * captions + look) % len(named)]
            if sees == TEXT:
                targets = named[named != language]
                of_kind = targets[source.trained[language, targets] == (look == captions)]
                targets = of_kind if len(of_kind) else targets
                target = targets[7 * turn % len(targets)]
            yield image, int(column[language]), int(column[target]), sees
