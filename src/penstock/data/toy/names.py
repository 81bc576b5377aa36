"""Names of languages, territories, currencies and units in many languages, from Unicode CLDR through the package Babel:
rows of translation whose label is the language that is translated to."""

from __future__ import annotations

import importlib.metadata
import random
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from penstock.boundary.files import quoted
from penstock.boundary.packages import package
from penstock.data.text.build import RowOrBad, TextRow
from penstock.data.text.columns import Content, Form
from penstock.errors import ConfigError

PIVOTS = ("en", "fr")
AFRICAN = (
    "af", "ak", "am", "bm", "ee", "ff", "ha", "ig", "ki", "lg", "ln", "luo", "mg", "nd", "om", "rn", "sn", "so", "sw",
    "ti", "wo", "xh", "yo", "zu",
)  # fmt: skip
LANGUAGES = (*PIVOTS, *AFRICAN)
"""Languages of `names` by default: English, French and 24 of Africa."""
KINDS = ("languages", "territories", "currency_names", "unit_display_names")
LONGEST = 56
"""Bytes of a name; longer ones are left out, so that rows fit models of 64 tokens with a tokenizer of bytes."""
_HELD_OUT = 10
_PROMPT = re.compile(r"[^\s>:]+>([^\s>:]+): ")
"""How `prompt_of` begins."""

Names = Mapping[str, Mapping[str, str]]
"""The names of each item by language. Items are keyed by kind and English name, so that what CLDR has under two codes
is one."""


def names(form: Form, languages: tuple[str, ...] = ()) -> Content:
    """Names from CLDR, `en>sw: Germany` and `Ujerumani`, with the second language as label. Each name that a language
    has is the target of two rows: from English or French, and from another of the languages.

    A tenth of the items is for validation, in all languages: and no name that one of these has in a language is seen in
    training in that language, be it another item's.
    """
    languages = languages or LANGUAGES
    if form != "translation":
        raise ConfigError(
            f"data.source=names are translations, and this task takes {form}; choose task translation, or "
            "another source."
        )
    if len(languages) < 2:
        raise ConfigError(
            f"data.source=names needs two languages, such as names:en,sw, not {quoted(languages[0])}."
        )
    by_item = read_names(languages)
    return Content(
        [_rows(by_item, languages, val) for val in (False, True)],
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
    # What a language has of its own: what it lacks would come as the code, or in another language.
    data = {one: localedata.load(one, merge_inherited=False) for one in dict.fromkeys(("en", *languages))}
    by_item: dict[str, dict[str, str]] = defaultdict(dict)
    for kind in KINDS:
        for code, value in data["en"].get(kind, {}).items():
            english = _text(value)
            key = f"{kind}: {english.casefold()}"
            for language in languages:
                text = _text(data[language].get(kind, {}).get(code, ""))
                if text and text != code and len(text.encode()) <= LONGEST and english:
                    by_item[key].setdefault(language, text)
    return {key: by_language for key, by_language in sorted(by_item.items()) if len(by_language) > 1}


def _text(value: object) -> str:
    """A name; of a unit, which has several lengths, the long one."""
    if not isinstance(value, str):
        value = value.get("long", "") if hasattr(value, "get") else ""
    return " ".join(str(value).split())


def prompt_of(source: str, target: str, name: str) -> str:
    """The text that asks for the translation of a name from one language to another, its label."""
    return f"{source}>{target}: {name}"


def label_of(prompt: str) -> str | None:
    """The language that a text of `prompt_of` asks for; None of any other text."""
    match = _PROMPT.match(prompt)
    return match[1] if match else None


def is_held_out(key: str, every: int = _HELD_OUT) -> bool:
    """Whether an item is for validation, which one in `every` is, by its key alone."""
    return zlib.crc32(key.encode()) % every == 0


def _rows(by_item: Names, languages: Sequence[str], val: bool) -> Iterator[RowOrBad]:
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
