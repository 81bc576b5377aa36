"""Text that is always there: the standard library's source, and numbers as words in many languages."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import random
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from penstock.boundary.files import Unreadable, content, quoted, shown
from penstock.boundary.packages import package
from penstock.data.text.build import RowOrBad, Shape, TextRow
from penstock.data.text.columns import Content, Form, TextColumns
from penstock.data.text.documents import digest, read_files
from penstock.data.toy.names import prompt_of
from penstock.errors import ConfigError, DataError

_LEFT_OUT = {
    "test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3", "idlelib",
}  # fmt: skip
_FILE_EVERY = 20
_NUMBERS = 10_000
_ALL_SEEN = 100
"""Numbers below it are never held out, for all words occur in them."""
_HELD_OUT = 10
LANGUAGES = ("en", "de", "fr", "es", "it", "nl", "pt", "pl", "cs", "sv", "da", "tr")
"""Languages of `numbers` by default."""
DIGITS = "digits"
"""Name of numbers in digits, where `numbers` begins with it."""
Say = Callable[[int, str, str], str]
"""The words of a number in a language, `cardinal` or `ordinal`."""


def standard_library() -> Content:
    """The source of the running Python's standard library without its tests, one document a file. Every twentieth file
    is for validation.
    """
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
    """Whether it is UTF-8 that says something; a few old files of the library are Latin-1, or empty."""
    try:
        return bool(content(file, limit=1 << 24).decode("utf-8").strip())
    except (UnicodeDecodeError, Unreadable):
        return False


def numbers(form: Form, languages: tuple[str, ...] = ()) -> Content:
    """The numbers from 0 to 9,999 as words, of num2words. What a row holds, by form:

    - translation: `en>de: forty-two`, and `zweiundvierzig`
    - pair: a number in one language and one in another, and whether they are the `same` or `different`
    - single: a number, and whether it is `even` or `odd`
    - two: the same number in two languages

    With `digits` as the first of `languages`, a translation is from digits to each of the others, `digits>de: 42` and
    `zweiundvierzig`, and the language is its label, as in `names`.

    Of one language alone the second text of `pair` and `two` is an ordinal: `forty-two`, and `forty-second`.

    A tenth of the numbers from 100 on, in no language seen in training, is for validation.
    """
    languages = languages or LANGUAGES
    if form == "document":
        raise ConfigError(
            "data.source=numbers are rows, and this task takes running text; choose stdlib or text:PATH."
        )
    digits = languages[0] == DIGITS
    if digits:
        if form != "translation":
            raise ConfigError(
                f"data.source=numbers:{DIGITS} are translations, and this task takes {form}; choose task translation, "
                f"or leave {DIGITS} out."
            )
        languages = languages[1:] or LANGUAGES
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
    language that is not spoken, EnvironmentProblem without num2words."""
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
        except Exception as error:  # of a language that it speaks in part, whatever its table then raises
            raise ConfigError(
                f"num2words has no {to} number {number} in {quoted(language)}; give data.source={source}: "
                "another language, or two languages with a comma where one alone asks for ordinals."
            ) from error

    return say


def _is_held_out(number: int) -> bool:
    return number >= _ALL_SEEN and zlib.crc32(str(number).encode()) % _HELD_OUT == 0


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
    """A number that differs in one digit, or altogether; of the same split, so that nothing held out is seen."""
    while True:
        if rng.random() < 0.5:
            digits = list(str(number))
            digits[rng.randrange(len(digits))] = str(rng.randrange(10))
            other = int("".join(digits))
        else:
            other = rng.randrange(_NUMBERS)
        if other != number and other >= least and (val or not _is_held_out(other)):
            return other
