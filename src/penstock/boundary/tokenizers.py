"""Limits on the cost of a tokenizer from outside: how long its parts may make a text, and how long its regular
expressions may take. The package `tokenizers` abandons a match after 10,000,000 backtracking steps (Oniguruma's limit),
but a text can have many matches that take nearly as long, and nothing can end a call: after the time limit it goes on
in its thread."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from penstock.boundary.files import quoted
from penstock.errors import DataError

T = TypeVar("T")
MOST_GROWTH, MOST_ADDED = 256, 4096
"""Characters that a tokenizer may make of one, and that it may add to a text, before it cuts the text."""
SECONDS, PER_SECOND = 10.0, 10_000
"""Seconds that any texts may take, and characters for each further second; usual tokenizers are 100 times as fast."""
_SHORT = 200
"""So few characters cannot take long, because each match has its limit."""
RETRIES = "retry-limit-in-match over"
"""Oniguruma's message for a match that has taken too many steps."""


def in_time(work: Callable[[], T], characters: int, name: str) -> T:
    """Return the result of `work` on a text of this many `characters`. Raises DataError if it takes too long."""
    if characters <= _SHORT:
        return work()
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # noqa: BLE001 -- a panic of Rust is no Exception
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return result.result(SECONDS + characters / PER_SECOND)
    except TimeoutError:
        raise slow(name, f"has not tokenised {characters:,} characters in time") from None


def slow(name: str, problem: str) -> DataError:
    """The error for a tokenizer whose regular expression takes unbounded time."""
    return DataError(
        f"The tokenizer {quoted(name)} {problem}: a regular expression in its tokenizer.json takes too many steps. Use "
        "another tokenizer, or simplify the expression."
    )


def require_bounded(parts: Iterable[Mapping[str, Any]], name: str) -> None:
    """Raise DataError for a normaliser or a decoder (of `tokenizer.json`) that makes huge texts from small ones."""
    for part in parts:
        factor, added = _growth(part)
        if factor > MOST_GROWTH or added > MOST_ADDED:
            raise DataError(
                f"The tokenizer {quoted(name)} is refused: it may make {factor:,.0f} characters of one, and adds "
                f"{added:,.0f} to a text, but at most {MOST_GROWTH} and {MOST_ADDED:,} are allowed. Check that it is "
                "the right file."
            )


def _growth(part: Mapping[str, Any]) -> tuple[float, float]:
    """The most characters that a part of a tokenizer makes of one character, and how many it adds to each text."""
    factor, added = 1.0, 0.0
    for step in part.get("normalizers") or part.get("decoders") or ():
        ratio, constant = _growth(step)
        factor, added = factor * ratio, added * ratio + constant
    if part.get("type") == "Prepend":
        return 1.0, float(len(part["prepend"]))
    if part.get("type") == "Replace":
        ((kind, pattern),) = part["pattern"].items()
        length = len(part["content"])
        if kind == "String" and pattern:
            return max(1.0, length / len(pattern)), 0.0
        try:
            empty = re.match(pattern, "") is not None
        except re.error:  # written in another library's syntax
            empty = True
        return max(1.0, length + empty), 0.0
    return factor, added
