"""Trees of values from outside: JSON, TOML and YAML. Their content is limited before it reaches a parser.

A tree here is a table whose entries are text, numbers, true, false, none, lists and tables. Every parser of this module
returns one within its `Bounds`, or raises the caller's error and nothing else. Parsers recurse into each level and
convert long digits in quadratic time, so levels are counted in the text, and files are limited in bytes.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from penstock.boundary.files import AnyPath, quoted, read_bytes, shown
from penstock.errors import ConfigError, PenstockError

LEVELS = 64
"""Most levels of nested tables and lists, and most parts of a dotted key."""
INTEGERS = range(-(1 << 63), 1 << 64)
"""Whole numbers of 64 bits, with a sign or without."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits on the content of a tree."""

    bytes: int = 1 << 20
    values: int = 100_000
    """Tables, lists and what they hold, counted as often as a YAML alias repeats them."""
    infinite: bool = False
    """Whether a number may be infinite or NaN."""
    control: bool = False
    """Whether text may hold control characters other than tabs and ends of lines."""
    wide: bool = False
    """Whether whole numbers may have more than 64 bits."""


SETTINGS = Bounds()
"""Limits of files that people write."""
YAML = Bounds(bytes=1 << 16, values=10_000)
"""Limits of YAML, whose parser is written in Python: 30,000 values take it two seconds."""

Language = Literal["JSON", "TOML", "YAML"]
_LANGUAGES: dict[str, Language] = {".json": "JSON", ".toml": "TOML", ".yaml": "YAML", ".yml": "YAML"}


class _Problem(Exception):
    """A fault in a tree, to complete `<the file> is refused: ...`, and its place there."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.path: list[str] = []

    def __str__(self) -> str:
        return f"{shown('.'.join(reversed(self.path)))} {self.args[0]}" if self.path else str(self.args[0])


def parse_tree(
    language: Language, raw: bytes | str, where: str, *, error: type[PenstockError] = ConfigError,
    bounds: Bounds = SETTINGS, remedy: str = "",
) -> dict[str, Any]:  # fmt: skip
    """The table in a text. `where` begins every message, such as "The index a.json"; `remedy` ends it. YAML has to be
    within `YAML` too; there an empty text is an empty table, `1e-3` is a number, as in YAML 1.2, and tags are refused.

    Raises `error` for anything but a table within `bounds`.
    """
    if language == "YAML":
        bounds = replace(bounds, bytes=min(bounds.bytes, YAML.bytes), values=min(bounds.values, YAML.values))
    try:
        if len(raw) > bounds.bytes:
            raise _Problem(f"it has {len(raw):,} bytes, and at most {bounds.bytes:,} are read")
        text = raw if isinstance(raw, str) else raw.decode("utf-8-sig")
        tree: Any = _LOADERS[language](text, bounds)
        if not isinstance(tree, dict):
            raise _Problem(f"it must hold a table of settings, not {type(tree).__name__}")
        _Examination(bounds).enter(tree, 1)
    except _Problem as problem:
        raise error(f"{where} is refused: {problem}. {remedy}".rstrip()) from None
    except (ValueError, OverflowError, RecursionError) as problem:
        reason = " ".join(str(problem).split()).rstrip(".")
        if "int_max_str_digits" in reason:
            reason = "a whole number has thousands of digits"
        raise error(f"{where} is not valid {language}: {reason}. {remedy}".rstrip()) from None
    return tree


parse_json = functools.partial(parse_tree, "JSON")


def read_tree(
    path: AnyPath, what: str, *, error: type[PenstockError] = ConfigError, bounds: Bounds = SETTINGS,
    remedy: str = "",
) -> dict[str, Any]:  # fmt: skip
    """The table in the file `path`, in the language of its ending: .toml, .yaml, .yml or .json.

    `what` begins every message, such as "The machine file". Raises `error` where there is none.
    """
    suffix = os.path.splitext(path)[1]
    if suffix not in _LANGUAGES:
        raise error(
            f"{what} {shown(path)} ends in {suffix or 'nothing'}; use a name that ends in .toml, .yaml or .json."
        )
    raw = read_bytes(path, what, limit=bounds.bytes, error=error, remedy=remedy)
    return parse_tree(
        _LANGUAGES[suffix], raw, f"{what} {shown(path)}", error=error, bounds=bounds, remedy=remedy
    )


class _Examination:
    """A walk through a parsed tree, which raises `_Problem` at the first value that is not allowed."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._left = bounds.values

    def enter(self, value: Any, level: int) -> None:
        """Examine a table or a list, and what is in it."""
        if level > LEVELS:
            raise _too_deep()
        self._left -= len(value) + 1
        if self._left < 0:
            raise _too_many(self._bounds)
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, entry in entries:
            kind = type(entry)
            try:
                if type(key) is str:
                    self._text(key, "the key")
                elif isinstance(value, dict):
                    raise _Problem("is no text, as a key must be; write it in quotes")
                if kind is dict or kind is list:
                    self.enter(entry, level + 1)
                elif kind is str:
                    self._text(entry, "the text")
                elif kind is int and entry not in INTEGERS and not self._bounds.wide:
                    raise _Problem("is a whole number of more than 64 bits")
                elif kind is float and not (math.isfinite(entry) or self._bounds.infinite):
                    raise _Problem(f"is {entry}, but must be a finite number")
                elif kind not in (int, float, bool, type(None), str):
                    raise _Problem(f"is a {kind.__name__}; write it in quotes")
            except _Problem as problem:
                problem.path.append(str(key))
                raise

    def _text(self, text: str, place: str) -> None:
        if character := control_character(text, halves_only=self._bounds.control):
            raise _Problem(f"has {character} in {place}; remove it")


def control_character(text: str, *, halves_only: bool = False) -> str | None:
    """The first character of `text` that controls a terminal or has no place in UTF-8, in words; None without one.

    Tabs and line ends are allowed. With `halves_only`, only characters without a place in UTF-8 are found.
    """
    # All of them are unprintable, which is quick to check.
    if text.isprintable() or (match := re.search(_HALF if halves_only else _CONTROL, text)) is None:
        return None
    return f"{'half a' if re.match(_HALF, match[0]) else 'the control'} character {match[0]!a}"


_CONTROL = "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
_HALF = "[\ud800-\udfff]"


def _too_deep() -> _Problem:
    return _Problem(f"it nests more than {LEVELS} levels deep; write it flatter")


def _too_many(bounds: Bounds) -> _Problem:
    return _Problem(f"it holds more than {bounds.values:,} values")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _twice(twice)
    return table


def _twice(key: str) -> _Problem:
    return _Problem(f"it has the key {quoted(key)} twice in one table; keep one")


# JSON

_OUTSIDE_TEXT = b'[]{},"'
_DROPPED = bytes(byte for byte in range(256) if byte not in _OUTSIDE_TEXT)


def _load_json(text: str, bounds: Bounds) -> Any:
    # Without escapes every second part between quotes is text. Of the rest only brackets and commas matter.
    plain = text.replace(r"\\", "").replace(r"\"", "").encode("utf-8", "replace").translate(None, _DROPPED)
    _count_levels(b"".join(plain.split(b'"')[::2]).decode(), bounds)
    return json.loads(text, object_pairs_hook=_unique)


def _count_levels(outside: str, bounds: Bounds) -> None:
    """Refuse a text that nests too deep or holds too many values. `outside` is the text without its strings and
    comments."""
    if outside.count(",") + outside.count("[") + outside.count("{") >= bounds.values:
        raise _too_many(bounds)
    level = 0
    for bracket in re.findall(r"[][{}]", outside):
        level += 1 if bracket in "[{" else -1
        if level > LEVELS:
            raise _too_deep()


# TOML

# Strings, because compiling them takes longer than `--help` takes to import this module.
_TOML_STRING_OR_COMMENT = (
    r'''(?s)"""(?:[^"\\]++|\\.|"{1,2}(?!"))*+"{3,5}'''  # its last two quotes may belong to the text
    r"""|'''(?:[^']++|'{1,2}(?!'))*+'{3,5}"""
    r'''|"(?:[^"\\\n]++|\\[^\n])*+"'''
    r"|'[^'\n]*+'"
    r"|\#[^\n]*+"
)
_TOML_KEY_ENDS = r"[][{}=,\n]"


def _load_toml(text: str, bounds: Bounds) -> Any:
    import tomllib  # here, because `--help` reads none

    outside = re.sub(_TOML_STRING_OR_COMMENT, "_", text)
    _count_levels(outside, bounds)
    # The parser copies the whole path for each part of a dotted key.
    if max(part.count(".") for part in re.split(_TOML_KEY_ENDS, outside)) >= LEVELS:
        raise _too_deep()
    return tomllib.loads(text)


# YAML


def _load_yaml(text: str, bounds: Bounds) -> Any:
    import yaml  # here, because it takes a tenth of the time in which the command line starts

    try:
        tree = _yaml_loader()(text, bounds).get_single_data()
    except yaml.YAMLError as problem:
        raise ValueError(str(problem)) from None
    return {} if tree is None else tree


@functools.cache
def _yaml_loader() -> Any:
    """PyYAML's safe loader with limits, which are checked before any value is built."""
    import yaml

    class Loader(yaml.SafeLoader):
        def __init__(self, text: str, bounds: Bounds) -> None:
            self._bounds = bounds
            self._open: list[str | None] = []
            super().__init__(text)

        def get_event(self) -> Any:
            event: Any = super().get_event()  # type: ignore[no-untyped-call]
            if isinstance(event, yaml.AliasEvent):
                if event.anchor in self._open:
                    raise _Problem(
                        f"it has the alias {quoted(event.anchor)} inside the value that it repeats"
                    )
            elif getattr(event, "tag", None) is not None:
                raise _Problem(f"it has the tag {quoted(event.tag)}; write the value without it")
            elif isinstance(event, yaml.CollectionStartEvent):
                if len(self._open) == LEVELS:
                    raise _too_deep()
                self._open.append(event.anchor)
            elif isinstance(event, yaml.CollectionEndEvent):
                self._open.pop()
            return event

        def get_single_node(self) -> Any:
            node = super().get_single_node()
            if node is not None:
                _allowed_after(node, self._bounds.values, 0, self._bounds)
            return node

        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            seen = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                    if (key.tag, key.value) in seen:
                        raise _twice(key.value)
                    seen.add((key.tag, key.value))
            return node

        def construct_yaml_int(self, node: Any) -> int:
            if len(node.value) > 100:
                raise _Problem("it holds a whole number of more than 64 bits")
            return int(super().construct_yaml_int(node))

    Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)
    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9_]+)[eE][-+]?[0-9]+$"),
        list("-+.0123456789"),
    )
    return Loader


def _allowed_after(node: Any, left: int, level: int, bounds: Bounds) -> int:
    """How many of `left` values are still allowed after a YAML node, counted as often as aliases repeat it."""
    if left == 0:
        raise _too_many(bounds)
    left -= 1
    if isinstance(node.value, list):
        if level == LEVELS:
            raise _too_deep()
        for entry in node.value:
            for part in entry if isinstance(entry, tuple) else (entry,):
                left = _allowed_after(part, left, level + 1, bounds)
    return left


_LOADERS: dict[Language, Callable[[str, Bounds], Any]] = {
    "JSON": _load_json,
    "TOML": _load_toml,
    "YAML": _load_yaml,
}
