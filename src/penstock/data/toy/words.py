"""Text that is always there: the standard library's source, numbers as words in many languages, and names of languages,
territories, currencies and units from Unicode CLDR through the package Babel."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import random
import re
import sysconfig
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from penstock.boundary.files import Unreadable, content, quoted, shown
from penstock.boundary.packages import package
from penstock.data.text.build import RowOrBad, Shape, TextRow
from penstock.data.text.columns import Content, Form, TextColumns
from penstock.data.text.documents import digest, read_files
from penstock.errors import ConfigError, DataError

_LEFT_OUT = {
    "test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3", "idlelib",
}  # fmt: skip
_FILE_EVERY = 20
_NUMBERS = 10_000
_ALL_SEEN = 100
"""Smaller numbers are never held out, because they contain all words."""
NUMBER_LANGUAGES = ("en", "de", "fr", "es", "it", "nl", "pt", "pl", "cs", "sv", "da", "tr")
"""Languages of `numbers` by default."""
DIGITS = "digits"
"""The first language of `numbers` if its sources are in digits."""
Say = Callable[[int, str, str], str]
"""The words of a number in a language, `cardinal` or `ordinal`."""
PIVOTS = ("en", "fr")
AFRICAN = (
    "af", "ak", "am", "bm", "ee", "ff", "ha", "ig", "ki", "lg", "ln", "luo", "mg", "nd", "om", "rn", "sn", "so", "sw",
    "ti", "wo", "xh", "yo", "zu",
)  # fmt: skip
LANGUAGES = (*PIVOTS, *AFRICAN)
"""Languages of `names` by default: English, French and 24 of Africa."""
CLDR_KINDS = ("languages", "territories", "currency_names", "unit_display_names")
LONGEST = 56
"""Bytes of a name; longer ones are left out, so that rows fit models of 64 tokens with a tokenizer of bytes."""
_HELD_OUT = 10
_PROMPT = re.compile(r"[^\s>:]+>([^\s>:]+): ")
"""How `prompt_of` begins."""
Names = Mapping[str, Mapping[str, str]]
"""The names of each item by language. Items are keyed by kind and English name, so that an item with two codes in CLDR
is one item."""


def standard_library() -> Content:
    """The source of the running Python's standard library without its tests, one document a file. Every twentieth file
    is for validation."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _LEFT_OUT)
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    files = [file for file in sorted(files) if _is_text(file)]
    if len(files) < 2 * _FILE_EVERY:
        raise DataError(
            f"The standard library in {shown(root)} has no source files; some builds of Python leave them out. Name "
            "other text with data.source, such as text:PATH."
        )
    parts = [
        [file for n, file in enumerate(files) if (n % _FILE_EVERY == _FILE_EVERY - 1) == val]
        for val in (False, True)
    ]
    identity: list[object] = [[[digest(file) for file in part] for part in parts]]
    size = sum(file.stat().st_size for file in files)
    columns = TextColumns("document", (), Shape(form="documents"))
    return Content([read_files(part, columns) for part in parts], identity, size)


def _is_text(file: Path) -> bool:
    """Whether a file is UTF-8 and not empty; a few old files of the library are Latin-1 or empty."""
    try:
        return bool(content(file, limit=1 << 24).decode("utf-8").strip())
    except (UnicodeDecodeError, Unreadable):
        return False


def numbers(form: Form, languages: tuple[str, ...] = ()) -> Content:
    """The numbers from 0 to 9,999 as words, by num2words. A row, by form:

    - translation: `en>de: forty-two`, and `zweiundvierzig`
    - pair: a number in one language and one in another, and whether they are the `same` or `different`
    - single: a number, and whether it is `even` or `odd`
    - two: the same number in two languages

    With `digits` as the first of `languages`, a translation is from digits to each of the others, `digits>de: 42` and
    `zweiundvierzig`, and the language is its label, as in `names`. With one language alone the second text of `pair`
    and `two` is an ordinal: `forty-two`, and `forty-second`. A tenth of the numbers from 100 on, in no language seen in
    training, is for validation."""
    languages = languages or NUMBER_LANGUAGES
    digits = languages[0] == DIGITS
    if digits:
        if form != "translation":
            raise ConfigError(
                f"data.source=numbers:{DIGITS} are translations, and this task takes {form}; choose task translation, "
                f"or leave {DIGITS} out."
            )
        languages = languages[1:] or NUMBER_LANGUAGES
    elif form == "translation" and len(languages) < 2:
        raise ConfigError(
            f"data.source=numbers needs two languages for this task, such as numbers:en,de, not {quoted(languages[0])}."
        )
    say, named = speaker("numbers", languages), [*([DIGITS] if digits else []), *languages]
    parts = [
        _digit_rows(languages, say, val) if digits else _number_rows(form, languages, say, val)
        for val in (False, True)
    ]
    return Content(parts, ["numbers", 1, importlib.metadata.version("num2words"), named], labels=digits)


def speaker(source: str, languages: Sequence[str]) -> Say:
    """The words of a number in a language, `cardinal` or `ordinal`, for a source of this name. Raises ConfigError for a
    language that num2words lacks, EnvironmentProblem without num2words."""
    num2words = package("num2words", f"data.source={source} needs the package num2words", "text")
    unknown = [language for language in languages if language not in num2words.CONVERTER_CLASSES]
    if unknown:
        raise ConfigError(
            f"num2words does not speak {quoted(unknown[0])}; data.source={source}: takes languages with commas, of "
            f"{', '.join(sorted(num2words.CONVERTER_CLASSES))}; {DIGITS}, of translations, comes first."
        )

    @functools.cache
    def say(number: int, language: str, to: str) -> str:
        try:
            return str(num2words.num2words(number, lang=language, to=to))
        except Exception as error:  # num2words raises anything for numbers that a language lacks
            raise ConfigError(
                f"num2words has no {to} number {number} in {quoted(language)}; give data.source={source}: "
                "another language, or two languages with a comma where one alone asks for ordinals."
            ) from error

    return say


def _is_held_out(number: int) -> bool:
    return number >= _ALL_SEEN and is_held_out(str(number))


def _digit_rows(languages: Sequence[str], say: Say, val: bool) -> Iterator[RowOrBad]:
    for number in range(_NUMBERS):
        if _is_held_out(number) == val:
            for language in languages:
                texts = prompt_of(DIGITS, language, str(number)), say(number, language, "cardinal")
                yield TextRow(texts, language, f"{number} in {language}", 0)


def _number_rows(form: Form, languages: Sequence[str], say: Say, val: bool) -> Iterator[RowOrBad]:
    count = len(languages)
    to = "ordinal" if count == 1 and form != "single" else "cardinal"
    least = 1 if to == "ordinal" else 0  # several languages have no word for "zeroth"
    for number in range(least, _NUMBERS):
        if _is_held_out(number) != val:
            continue
        rng = random.Random(number)
        for place, first in enumerate(languages):
            second = languages[(place + 1 + number % max(1, count - 1)) % count]
            words, other = say(number, first, "cardinal"), say(number, second, to)
            where = f"the number {number} in {first} and {second}"
            if form == "single":
                yield TextRow((words,), "odd" if number % 2 else "even", where, 0)
            elif form == "translation":
                yield TextRow((f"{first}>{second}: {words}", other), None, where, 0)
            elif form == "two":
                yield TextRow((words, other), None, where, 0)
            else:
                same = rng.random() < 0.5
                other = other if same else say(_another(number, rng, val, least), second, to)
                yield TextRow((words, other), "same" if same else "different", where, 0)


def _another(number: int, rng: random.Random, val: bool, least: int) -> int:
    """Another number of the same split, which differs in one digit or in all; so training sees no held-out number."""
    while True:
        if rng.random() < 0.5:
            digits = list(str(number))
            digits[rng.randrange(len(digits))] = str(rng.randrange(10))
            other = int("".join(digits))
        else:
            other = rng.randrange(_NUMBERS)
        if other != number and other >= least and (val or not _is_held_out(other)):
            return other


def names(languages: tuple[str, ...] = ()) -> Content:
    """Names from CLDR, `en>sw: Germany` and `Ujerumani`, with the second language as label. Each name that a language
    has is the target of two rows: from English or French, and from another of the languages. A tenth of the items is
    for validation, in all languages, and none of their names is seen in training in its language, not even as another
    item's."""
    languages = languages or LANGUAGES
    if len(languages) < 2:
        raise ConfigError(
            f"data.source=names needs two languages, such as names:en,sw, not {quoted(languages[0])}."
        )
    by_item = read_names(languages)
    return Content(
        [_name_rows(by_item, languages, val) for val in (False, True)],
        ["names", 1, importlib.metadata.version("babel"), list(languages)],
        labels=True,
    )


def read_names(languages: Sequence[str]) -> Names:
    """The names of all items. Raises EnvironmentProblem without Babel, ConfigError for languages that it lacks."""
    localedata = package("babel.localedata", "data.source=names needs the package Babel", "languages")
    unknown = [language for language in languages if not localedata.exists(language)]
    if unknown:
        raise ConfigError(
            f"CLDR has no language {quoted(unknown[0])}; data.source=names: takes codes with commas, such as en,sw,yo."
        )
    # Only names that a language has itself: for others Babel returns the code, or the name in another language.
    data = {one: localedata.load(one, merge_inherited=False) for one in dict.fromkeys(("en", *languages))}
    by_item: dict[str, dict[str, str]] = defaultdict(dict)
    for kind in CLDR_KINDS:
        for code, value in data["en"].get(kind, {}).items():
            english = _text(value)
            key = f"{kind}: {english.casefold()}"
            for language in languages:
                text = _text(data[language].get(kind, {}).get(code, ""))
                if text and text != code and len(text.encode()) <= LONGEST and english:
                    by_item[key].setdefault(language, text)
    return {key: by_language for key, by_language in sorted(by_item.items()) if len(by_language) > 1}


def _text(value: object) -> str:
    """The text of a name; for a unit, which has several lengths, the long form."""
    if not isinstance(value, str):
        value = value.get("long", "") if hasattr(value, "get") else ""
    return " ".join(str(value).split())


def prompt_of(source: str, target: str, name: str) -> str:
    """The text that asks for the translation of a name from one language to another, its label."""
    return f"{source}>{target}: {name}"


def label_of(prompt: str) -> str | None:
    """The language that a text of `prompt_of` asks for; None for any other text."""
    match = _PROMPT.match(prompt)
    return match[1] if match else None


def is_held_out(key: str, every: int = _HELD_OUT) -> bool:
    """Whether an item belongs to the validation split: one in `every`, by a hash of its key."""
    return zlib.crc32(key.encode()) % every == 0


def _name_rows(by_item: Names, languages: Sequence[str], val: bool) -> Iterator[RowOrBad]:
    unseen = {
        (language, name.casefold())
        for key, by_language in by_item.items()
        if is_held_out(key)
        for language, name in by_language.items()
    }
    for key, by_language in by_item.items():
        if is_held_out(key) != val:
            continue
        usable = {
            language: name
            for language, name in by_language.items()
            if val or (language, name.casefold()) not in unseen
        }
        rng = random.Random(zlib.crc32(key.encode()))
        for target in languages:
            sources = [language for language in usable if language != target]
            if target not in usable or not sources:
                continue
            pivots = [language for language in sources if language in PIVOTS]
            others = [language for language in sources if language not in PIVOTS]
            for source in [rng.choice(several) for several in (pivots, others) if several]:
                texts = prompt_of(source, target, usable[source]), usable[target]
                yield TextRow(texts, target, f"{key} in {source}", 0)
