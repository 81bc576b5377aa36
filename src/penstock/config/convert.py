"""Type checks and conversion of values for the configuration dataclasses, with messages for wrong values.

A type here is one of `bool`, `int`, `float`, `str`, `Literal[...]`, a number with a `Range`, text with a `Text`, `T |
None`, `tuple[T, ...]`, `dict[str, T]`, a dataclass of these, or a union of dataclasses distinguished by their field
`family`. No other field types are allowed, so every configuration is plain data. Text has no control characters except
tabs and line ends, and whole numbers have at most 64 bits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import math
import re
import shlex
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from penstock.boundary.files import quoted, shown
from penstock.boundary.trees import INTEGERS, control_character, parse_json
from penstock.config.formats import level_of
from penstock.config.kinds import accepts_none, arms_of, describe, field_types, is_union, required_fields
from penstock.config.removed import removal
from penstock.errors import ConfigError

NONE_WORDS = ("none", "null")
TRUE_WORDS = ("true", "yes", "on", "1")
FALSE_WORDS = ("false", "no", "off", "0")


HUGE = 1e30
"""Above every real rate, time and number of FLOPs, but so small that products of several do not overflow."""
TINY = 1e-30
"""Numbers nearer to 0, except 0 itself, are refused: they have no use, and dividing by them overflows."""


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """The numbers that a field may hold, as in `Annotated[int, Range(1, 100)]`. Infinity and NaN are never
    allowed."""

    low: float
    high: float
    open_low: bool = False
    """Whether `low` itself is excluded."""
    open_high: bool = False

    def __str__(self) -> str:
        """The range as in a table of settings: `≥ 1`, or `> 0, ≤ 1`."""
        low = f"{'>' if self.open_low else '≥'} {self.low:,g}"
        reached = self.high < 2**31 - 1
        return f"{low}, {'<' if self.open_high else '≤'} {_figure(self.high)}" if reached else low

    def problem(self, value: float) -> str | None:
        """The problem of `value`, to complete `<key> is <value>, but ...`, or None."""
        above = self.low < value if self.open_low else self.low <= value
        below = value < self.high if self.open_high else value <= self.high
        if above and below:
            return f"must be 0, or at least {TINY:g} in size." if 0 < abs(value) < TINY else None
        low = f"{'above' if self.open_low else 'at least'} {self.low:g}"
        high = f"{'below' if self.open_high else 'at most'} {_figure(self.high)}"
        if self.high > 1e3:  # a bound that only absurd values reach; the other bound is enough then
            finite = "" if math.isfinite(value) else " and finite"
            return f"must be {high if above and math.isfinite(value) else low + finite}."
        if self.open_low or self.open_high:
            return f"must be {low} and {high}."
        return f"must be between {self.low:g} and {_figure(self.high)}."


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """The texts that a field may hold: `Annotated[str, Text()]` allows all that are not blank."""

    pattern: str = ""
    """A regular expression that the whole text must match; "": any text."""
    form: str = ""
    """The form in words, for messages."""
    longest: int = 4096
    as_typed: bool = False
    """Whether texts are used exactly as typed, blank ones too: lists are not split at commas, and spaces are not
    stripped."""

    def problem(self, value: str) -> str | None:
        """The fault of `value`, as from `Range.problem`."""
        if not value.strip() and not self.as_typed:
            return "must not be empty; leave it out if you do not mean it."
        if len(value) > self.longest:
            return f"must have at most {self.longest:,} characters."
        if self.pattern and not re.fullmatch(self.pattern, value):
            return f"must be {self.form}."
        return None


def _figure(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"


Count = Annotated[int, Range(1, 2**31 - 1)]
Natural = Annotated[int, Range(0, 2**31 - 1)]
Bytes = Annotated[int, Range(0, 2**60)]
Positive = Annotated[float, Range(0, HUGE, open_low=True)]
NotNegative = Annotated[float, Range(0, HUGE)]
Share = Annotated[float, Range(0, 1)]
PositiveShare = Annotated[float, Range(0, 1, open_low=True)]
Probability = Annotated[float, Range(0, 1, open_high=True)]
Headroom = Annotated[float, Range(1, 1 << 16)]
Ranks = Annotated[int, Range(1, 1 << 16)]
Seconds = Annotated[float, Range(0, 1e8)]
Seed = Annotated[int, Range(0, 2**63 - 1)]
FilledText = Annotated[str, Text()]
TypedText = Annotated[str, Text(as_typed=True)]
Device = Annotated[str, Text(r"auto|cpu|cuda(:[0-9]{1,3})?", "auto, cpu, cuda or cuda:N")]
WordFactor = Annotated[
    str, Text(r"[^=]+=(?=.*[1-9])\d{1,6}(\.\d{1,6})?", "a word and a factor above 0, as seven=2")
]
FunctionPath = Annotated[str, Text(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", "package.module:function")]


class BadValue(ValueError):
    """A value that its field cannot hold. The message completes the sentence `<key> is <value>, but ...`."""

    def __init__(self, value: Any, problem: str) -> None:
        super().__init__(problem)
        self.value = value
        self.path = ""
        """Path of the value inside the field's value, such as `[1].size`."""

    def sentence(self, key: str) -> str:
        """The whole sentence about the setting `key`."""
        return f"{shown(key + self.path)} is {shown_value(self.value)}, but {self}"


class OutOfRange(BadValue):
    """A value of the right type that its field does not allow."""


def shown_value(value: Any) -> str:
    """A user's value for a message, shortened, with control characters escaped."""
    try:
        text = repr(plain(value))
    except (ValueError, RecursionError):  # Python refuses to print numbers of thousands of digits
        return f"too large a {type(value).__name__} to show"
    return text if len(text) <= 80 else f"{text[:77]}..."


def nearest(name: str, options: Iterable[str]) -> str:
    """` Did you mean 'x'?`, or an empty string if no option is similar. Names that it begins are preferred to similar
    ones."""
    name, options = name[:200], list(options)
    near = difflib.get_close_matches(name, options, n=1, cutoff=0.85)
    if not near and len(name) > 1:
        near = [option for option in options if option.lower().startswith(name.lower())]
    if not 0 < len(near) <= 3:
        near = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


def _not_a(value: Any, kind: Any) -> BadValue:
    return BadValue(value, f"must be {describe(kind)}.")


def convert(value: Any, kind: Any, *, text: bool = False) -> Any:
    """`value` as the type `kind`.

    With `text`, strings come from a command line and are parsed (`"1e-3"` becomes a float). Without, they
    come from a typed file or a Python call, where a string is a string. The word `none` means `None` if the
    field allows it, because TOML has no null. Raises `BadValue`.
    """
    if is_union(kind):
        return _convert_union(value, kind, text=text)
    origin = typing.get_origin(kind)
    if origin is Annotated:
        base, allowed = typing.get_args(kind)
        made = convert(value, base, text=text)
        if problem := allowed.problem(made):
            raise OutOfRange(made, problem)
        return made
    if origin is Literal:
        options = typing.get_args(kind)
        if isinstance(value, str) and value in options:
            return value
        hint = ""
        if isinstance(value, str):
            hint = (level_of(value) if "O1" in options else "") or nearest(value, options)
        raise BadValue(value, f"must be {describe(kind)}.{hint}")
    if origin is tuple:
        return _convert_items(value, typing.get_args(kind)[0], kind, text=text)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise _not_a(value, kind)
        item = typing.get_args(kind)[1]
        return {str(key): _inside(f".{key}", entry, item, text=text) for key, entry in value.items()}
    if dataclasses.is_dataclass(kind):
        return _convert_record(value, kind)
    return _convert_plain(value, kind, text=text)


def _convert_union(value: Any, kind: Any, *, text: bool) -> Any:
    if accepts_none(kind) and (value is None or (isinstance(value, str) and value.lower() in NONE_WORDS)):
        return None
    arms = [arm for arm in arms_of(kind) if arm is not type(None)]
    for arm in arms:
        try:
            return convert(value, arm, text=text)
        except OutOfRange:
            raise
        except BadValue:
            if len(arms) == 1 and not accepts_none(kind):
                raise
    raise _not_a(value, kind)


def _convert_items(value: Any, item: Any, kind: Any, *, text: bool) -> tuple[Any, ...]:
    if text and isinstance(value, str) and item == TypedText:
        value = [value]
    if text and isinstance(value, str):
        if not value.strip():
            raise BadValue(value, "must name something; write none for an empty list.")
        none = value.lower() in NONE_WORDS
        if dataclasses.is_dataclass(item) and not none:
            try:
                value = parse_json(f'{{"list": {value}}}', "The list")["list"]
            except ConfigError:
                raise BadValue(value, "must be a list of tables, as JSON.") from None
        else:
            value = [] if none else [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise _not_a(value, kind)
    return tuple(_inside(f"[{i}]", entry, item, text=text) for i, entry in enumerate(value))


def _convert_record(value: Any, kind: Any) -> Any:
    """A dataclass from a table. A finished dataclass is checked and returned unchanged."""
    types_by_name = field_types(kind)
    finished = isinstance(value, kind)
    if finished:
        entries = {name: getattr(value, name) for name in types_by_name}
    elif isinstance(value, Mapping):
        entries = dict(value)
    else:
        raise _not_a(value, kind)
    for name in entries:
        if name not in types_by_name:
            raise BadValue(
                value, f"has the unknown key {quoted(name)}; known are {', '.join(types_by_name)}."
            )
    made = {name: _inside(f".{name}", entry, types_by_name[name]) for name, entry in entries.items()}
    if finished:
        return value
    if missing := [name for name in required_fields(kind) if name not in made]:
        raise BadValue(value, f"lacks {', '.join(missing)}.")
    return kind(**made)


def _inside(place: str, value: Any, kind: Any, *, text: bool = False) -> Any:
    """`convert` for a part of a value; `place` is its path inside the value."""
    try:
        return convert(value, kind, text=text)
    except BadValue as bad:
        bad.path = place + bad.path
        raise


def _convert_plain(value: Any, kind: Any, *, text: bool) -> Any:
    if kind is str and isinstance(value, str):
        if character := control_character(value):
            raise BadValue(value, f"must be text without {character}.")
        return value
    if kind is bool and isinstance(value, bool):
        return value
    if kind is bool and text and isinstance(value, str) and value.lower() in TRUE_WORDS + FALSE_WORDS:
        return value.lower() in TRUE_WORDS
    number = _number(value, kind) if text or not isinstance(value, str) else None
    # Users write whole numbers as 1e4 too, which parses as a float; 1.5 and infinity are not whole numbers.
    if kind is int and number is not None and (isinstance(number, int) or number.is_integer()):
        if int(number) not in INTEGERS:
            raise OutOfRange(value, "must have at most 64 bits.")
        return int(number)
    if kind is float and number is not None and (isinstance(number, float) or number in INTEGERS):
        return float(number)
    raise _not_a(value, kind)


def _number(value: Any, kind: Any) -> int | float | None:
    """A number unchanged, or parsed from a text; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if not isinstance(value, str):
        return value
    for parse in (int, float) if kind is int else (float,):
        with contextlib.suppress(ValueError):
            return parse(value)
    return None


def word(value: Any) -> str:
    """The value of a setting as written on a command line: a list of tables as JSON, in quotes for a shell."""
    if isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
        return shlex.quote(json.dumps(plain(value), separators=(",", ":")))
    if isinstance(value, tuple):
        return ",".join(map(word, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def present(cls: type, name: str, value: Any) -> tuple[str, Any]:
    """The current name and value of a setting of `cls`, which may come from an earlier version. `cls.RENAMED` maps
    changed names, and `cls.REWORDED` changed values by the earlier name.
    """
    reworded = getattr(cls, "REWORDED", {}).get(name, {})
    if reworded and isinstance(value, str | bool):
        value = reworded.get(word(value).lower(), value)
    return getattr(cls, "RENAMED", {}).get(name, name), value


def plain(value: Any) -> Any:
    """`value` as dicts, lists and scalars, which JSON, YAML and TOML can all hold."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    return value


def require(name: str, value: Any, kind: Any) -> None:
    """Raise ConfigError if the argument `name` of a function is not of type `kind`, such as `Count`."""
    try:
        convert(value, kind)
    except BadValue as bad:
        raise ConfigError(bad.sentence(name)) from None


def check_fields(config: Any, where: str) -> list[str]:
    """Problems of a dataclass whose values do not match its field types.

    Python does not check annotations, so `Plan(precision="O7")` would otherwise fail much later. `where` is
    the path of the dataclass, empty for the root.
    """
    path = f"{where}." if where else ""
    problems = []
    for name, kind in field_types(type(config)).items():
        value = getattr(config, name)
        try:
            converted = convert(value, kind)
        except BadValue as bad:
            refusal = removal(type(config), name, value, path + name)
            problems.append(refusal or bad.sentence(f"{path}{name}"))
            continue
        if type(converted) is not type(value) and not (type(converted) is float and type(value) is int):
            problems.append(_not_a(value, kind).sentence(f"{path}{name}"))
    return problems


EXCLUSIVE: Mapping[str, tuple[tuple[str, str], ...]] = {
    "Recipe": (("steps", "epochs"), ("warmup_steps", "warmup_share")),
    "Distil": (("steps", "epochs"),),
    "PlanConfig": (("tokens", "images"), ("compute", "budget_gpu_hours")),
}
"""Pairs of alternative settings, by dataclass: at most one of a pair may be set. A setting in a higher layer replaces
its alternative, and both in one layer are an error (`penstock.config.load`)."""


def both_given(key: str, value: Any, other_key: str, other: Any) -> str:
    """The problem of two settings of `EXCLUSIVE` that are both given."""
    return (
        f"{shown(key)} is {shown_value(value)} and {shown(other_key)} is {shown_value(other)}, but both set the same "
        "thing; keep one."
    )


class Checked:
    """A configuration dataclass that checks its fields' types when it is created, and then its own rules."""

    __slots__ = ()
    _where: ClassVar[str] = ""

    def __init_subclass__(cls, where: str | None = None) -> None:
        """`where` is the path of the dataclass from the configuration's root, empty for the root."""
        if where is not None:  # a dataclass with slots creates its class a second time, without `where`
            cls._where = where

    def __post_init__(self) -> None:
        problems = check_fields(self, self._where) or [*self._both_given(), *self._problems()]
        if problems:
            raise ConfigError(problems)

    def _both_given(self) -> Iterator[str]:
        path = f"{self._where}." if self._where else ""
        for pair in EXCLUSIVE.get(type(self).__name__, ()):
            values = [getattr(self, name) for name in pair]
            if None not in values:
                yield both_given(path + pair[0], values[0], path + pair[1], values[1])

    def _problems(self) -> Iterable[str]:
        """Every contradiction between these values; called only if each has its type."""
        return ()
