"""Images with captions in many languages: the digits and their names, and a folder of images with a table of captions.

A sample is an image, a name of what it shows, a second name that the model is to write, and whether it writes from the
image or from the first name. Some images, some names, and translations between some pairs of languages are held out of
training, among them all pairs with a language that occurs in captions alone.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.boundary.files import Unreadable, content, quoted, shown
from penstock.boundary.images import MAX_BYTES
from penstock.boundary.text import read_lines
from penstock.boundary.trees import Bounds, parse_json
from penstock.config.run import DataConfig
from penstock.data.decode import decode
from penstock.data.open import open_source
from penstock.data.source import ImageSource, Pixels, Split
from penstock.data.toy.words import is_held_out, speaker
from penstock.errors import ConfigError, DataError

LANGUAGES = (
    "en", "de", "fr", "es", "it", "pt", "nl", "sv", "da", "pl", "cs", "ru", "uk", "tr", "fi", "hu", "ro", "ca", "id",
    "vi", "cy", "eo", "is", "lt", "lv", "sk", "sl", "sr", "be", "az", "tg", "kz", "tet", "no", "ar", "he", "ja", "ko",
)  # fmt: skip
"""Languages of `captions` by default."""
IMAGE, TEXT = 0, 1
"""Numbers that say whether the model writes from the image or from a name."""
TABLE, FILE, CONCEPT = "metadata.jsonl", "file_name", "concept"
"""A folder's table of captions, as in Hugging Face's image folders, and its columns that are not languages."""
_WORDS_EVERY, _PAIRS_EVERY, _ALONE_EVERY, _IMAGES_EVERY = 20, 5, 3, 10
_LOOKS = 4
"""Samples of each image for validation."""
_MOST_IN_MEMORY = 8 << 30
_LINE = Bounds(bytes=1 << 20, values=10_000)


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
    """Whether names are held out in addition to images."""


class NameTable(NamedTuple):
    """The names of all concepts, (W,) in each field."""

    languages: tuple[str, ...]
    language: NDArray[np.int64]
    concept: NDArray[np.int64]
    held: NDArray[np.bool_]
    """Names that training never sees."""
    texts: tuple[str, ...]


class Captions(ImageSource):
    """Samples of one split. `rows` holds numbers for each sample: its image, the names that are read and written, and
    what the model writes from. Its label is the concept of its image."""

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


def open_captions(data: DataConfig, split: Split, *, channels: int, image_size: int) -> Captions:
    """Open `captions`, `captions:LANGUAGES` (digits and their names), or `captions:FOLDER` (see `captioned`), whose
    images are made as large as `image_size`. Raises ConfigError, DataError, and EnvironmentProblem without num2words.
    """
    data = data.filled("captions")
    kind, _, rest = data.source.partition(":")
    if kind != "captions":
        raise ConfigError(
            f"data.source is {quoted(data.source)}, but this task takes images with captions: captions, "
            "captions:LANGUAGES or captions:FOLDER."
        )
    if (folder := Path(rest)).is_dir() and rest:
        return Captions(data.source, captioned(folder, data, channels, image_size), split)
    return Captions(data.source, digits(tuple(rest.split(",")) if rest else LANGUAGES, channels), split)


def captioned(folder: Path, data: DataConfig, channels: int, size: int) -> Pictures:
    """The images listed in a folder's `metadata.jsonl`, loaded into memory: each line has a `file_name`, and texts by
    language. Images with the same `concept` share their captions. A tenth of the images is held out."""
    captions: dict[str, dict[str, str]] = {}
    concepts: list[str] = []
    rows = list(_table_rows(folder))
    if len(rows) * size * size * channels > _MOST_IN_MEMORY:
        raise DataError(
            f"The {len(rows):,} images of {shown(folder)} are kept in memory, and take more than "
            f"{_MOST_IN_MEMORY >> 30} GiB at {size} × {size} pixels; list fewer, or set a smaller model.image_size."
        )
    images = np.empty((len(rows), size, size, channels), np.uint8)
    for (where, row), out in zip(rows, images, strict=True):
        file = Path(folder, row[FILE])
        try:
            if not file.resolve().is_relative_to(folder.resolve()):
                raise Unreadable("it is not in the folder")
            decode(content(file, limit=MAX_BYTES), out, max_pixels=data.max_pixels, white=data.range)
        except Unreadable as error:
            raise DataError(f"{where}: the image {quoted(row[FILE])} cannot be read: {error}.") from error
        concepts.append(row.get(CONCEPT, row[FILE]))
        texts = captions.setdefault(concepts[-1], {})
        texts |= {language: text for language, text in row.items() if language not in (FILE, CONCEPT)}
    languages = sorted({language for texts in captions.values() for language in texts})
    if len(languages) < 2:
        raise DataError(
            f"{shown(folder / TABLE)} has captions in {' and '.join(languages) or 'no language'}, and needs two: a "
            "column for each language, such as en and de, beside file_name."
        )
    number = {concept: place for place, concept in enumerate(captions)}
    return Pictures(
        images=images, concepts=np.array([number[concept] for concept in concepts]),
        names={one: [texts.get(one, "") for texts in captions.values()] for one in languages},
        held=np.array([is_held_out(str(Path(row[FILE]).with_suffix("")), _IMAGES_EVERY) for _, row in rows]),
        words=False,
    )  # fmt: skip


def _table_rows(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """The place of each line of a folder's table, in words, and its columns except empty ones."""
    table = folder / TABLE
    if not table.is_file():
        raise DataError(
            f"The folder {shown(folder)} has no {TABLE}, whose lines name images and their captions, such as "
            '{"file_name": "a.jpg", "en": "a red apple", "de": "ein roter Apfel"}.'
        )
    for line in read_lines(table, "The table of captions", longest=_LINE.bytes):
        where = f"Line {line.number:,} of {shown(table)}"
        if line.problem:
            raise DataError(f"{where} cannot be read: {line.problem}.")
        if not line.text.strip():
            continue
        row = parse_json(line.text, where, error=DataError, bounds=_LINE)
        wrong = next((name for name, value in row.items() if not isinstance(value, str)), None)
        if wrong is not None or not row.get(FILE):
            problem = f"{quoted(wrong)} is no text" if wrong is not None else f"{FILE} is missing"
            raise DataError(f"{where} cannot be used: {problem}.")
        yield where, {name: value for name, value in row.items() if value.strip()}


def digits(languages: Sequence[str], channels: int) -> Pictures:
    """The digits, and their names from num2words. Raises ConfigError for unknown languages, and for fewer than two."""
    if len(set(languages)) < 2:
        raise ConfigError(
            f"data.source=captions takes a folder or two languages (captions:en,de), not {quoted(','.join(languages))}."
        )
    languages = tuple(dict.fromkeys(languages))
    say = speaker("captions", languages)
    config = DataConfig(source="digits")
    splits = [
        open_source(config, split="train", channels=channels), open_source(config, split="val", channels=channels),
    ]  # fmt: skip
    return Pictures(
        images=np.concatenate([one.read(np.arange(len(one)))[0] for one in splits]),
        concepts=np.concatenate([one.labels for one in splits]),
        names={one: [say(number, one, "cardinal") for number in range(10)] for one in languages},
        held=np.repeat([False, True], [len(one) for one in splits]),
    )


def beginning(language: str) -> str:
    """The prefix of each text in a language that the model writes."""
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
    """Whether training translates from one language to another, (L, L). With four languages or more, every third one
    occurs in captions alone; of the other pairs a fifth is held out, in both directions."""
    count = len(languages)
    pairs = np.zeros((count, count), np.bool_)
    for second, first in itertools.combinations(range(count), 2):
        alone = _ALONE_EVERY - 1 in (first % _ALONE_EVERY, second % _ALONE_EVERY)
        held_out = alone or is_held_out(f"{languages[first]}:{languages[second]}", _PAIRS_EVERY)
        pairs[first, second] = pairs[second, first] = count < 4 or not held_out
    return pairs


def _table(words: NameTable, *, held: bool) -> NDArray[np.int64]:
    """The number of each name, (L, concepts); −1 where there is none, or, unless `held`, where it is held out."""
    table = np.full((len(words.languages), int(words.concept.max()) + 1), -1)
    usable = np.flatnonzero(held | ~words.held)
    table[words.language[usable], words.concept[usable]] = usable
    return table


def _training(source: Captions) -> Iterator[tuple[int, int, int, int]]:
    """Each image with its name in each language; half are translations in languages with trained pairs."""
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
    """Each image with two captions, a translation between a trained pair of languages, and one between a held-out pair.
    Languages alternate over the images of a concept, or over all images where concepts are held out."""
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
