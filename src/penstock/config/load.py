"""Loads a configuration from its defaults, then a file, then the command line; later layers override earlier ones.

Every layer is read completely and all its problems are collected, so one run of a command lists everything to
fix. Keys are dotted (`recipe.lr`) or nested tables; both mean the same in every layer. For a part that is a
union of dataclasses, such as the model, the key `family` selects the dataclass.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, cast, overload

from penstock.boundary.files import shown
from penstock.boundary.trees import read_tree
from penstock.config.convert import (
    EXCLUSIVE,
    NONE_WORDS,
    BadValue,
    both_given,
    convert,
    nearest,
    plain,
    present,
)
from penstock.config.kinds import (
    accepts_none,
    dataclasses_of,
    describe,
    family_of,
    field_types,
    places_of,
    required_fields,
)
from penstock.config.removed import removal, with_moved
from penstock.errors import ConfigError, PenstockError

T = TypeVar("T")

COMMAND_LINE = "the command line"
MOST_PROBLEMS = 10
"""Most problems that one error lists."""


def load(
    cls: type[T], *, file: Path | str | None = None, overrides: Mapping[str, Any] | None = None,
    base: T | None = None, stored: Mapping[str, Any] | None = None, origin: str = COMMAND_LINE,
) -> T:  # fmt: skip
    """Make a `cls` from its defaults (or `base`), then `file` (TOML, YAML or JSON), then `overrides`. `stored` is the
    content of `file`, if it has been read already.

    Strings in `overrides` are parsed to the type of their field, as from a command line. A whole value for a nested
    part (`plan="precision=O1"`, `model="vit-s16"`) replaces that part as earlier layers left it. Dotted keys of the
    same layer then apply on top, in any order. Of two alternative settings (`EXCLUSIVE`), the one in the later layer
    counts. Raises `ConfigError` with every problem, each naming `origin` or the file.
    """
    problems: list[str] = []
    layers: list[tuple[Mapping[str, Any], _Layer]] = []
    if file is not None:
        layers.append((read_file(file) if stored is None else stored, _Layer(str(file), False, problems)))
    if overrides:
        layers.append((overrides, _Layer(origin, True, problems)))
    return cast(T, _assemble(cls, base, layers, problems))


@overload
def from_dict(
    cls: type[T], values: Mapping[str, Any], *, origin: str = ..., error: type[PenstockError] = ...,
    base: T | None = ...,
) -> T: ...  # fmt: skip
@overload
def from_dict(
    cls: UnionType, values: Mapping[str, Any], *, origin: str = ..., error: type[PenstockError] = ...
) -> Any: ...
def from_dict(
    cls: Any, values: Mapping[str, Any], *, origin: str = "the given values",
    error: type[PenstockError] = ConfigError, base: Any = None,
) -> Any:  # fmt: skip
    """Make a `cls` (a dataclass or a union of them) from typed values, as from `to_dict`, TOML or JSON.

    Absent fields keep their defaults, or the values of `base`. Of two alternative settings the first that is set
    counts, for runs that were stored before this was an error. Raises `error` with every problem, each naming `origin`.
    """
    problems: list[str] = []
    try:
        return _assemble(cls, base, [(values, _Layer(origin, False, problems, stored=True))], problems)
    except ConfigError as problem:
        raise problem if error is ConfigError else error(str(problem)) from None


def _assemble(
    cls: Any, base: Any, layers: Sequence[tuple[Mapping[str, Any], _Layer]], problems: list[str]
) -> Any:
    """A `cls` from the values of all layers; problems are added to `problems`."""
    tree = _Node.of(cls, base)
    for values, layer in layers:
        tree.merge(values, layer, "")
    made = tree.make(problems)
    if problems:
        raise ConfigError(problems)
    return made


def to_dict(config: Any) -> dict[str, Any]:
    """Every field as nested dicts, lists and scalars; `from_dict` returns an equal object."""
    result = plain(config)
    assert isinstance(result, dict)
    return result


def dump_toml(config: Any) -> str:
    """Every field as TOML, from which `load(type(config), file=…)` makes an equal object.

    TOML has no null: `None` is written as the string "none", which `load` reads as `None` if the field allows
    it.
    """
    lines: list[str] = []
    _dump_table(to_dict(config), "", lines)
    return "\n".join(lines).strip() + "\n"


def read_file(path: Path | str, what: str = "The configuration file") -> dict[str, Any]:
    """The table in a TOML, YAML or JSON file. Raises `ConfigError`, which begins with `what` and the path."""
    return read_tree(path, what, remedy=_nearest_file(Path(path)))


def _nearest_file(path: Path) -> str:
    """A question that suggests a file with a similar name in the folder of one that does not exist."""
    if os.path.lexists(path):
        return ""
    with contextlib.suppress(OSError):
        return nearest(path.name, os.listdir(path.parent)).strip()
    return ""


@dataclass(frozen=True, slots=True)
class _Layer:
    """One source of values, and the list that collects its problems."""

    origin: str
    text: bool
    """Whether strings are parsed."""
    problems: list[str]
    stored: bool = False
    """Whether a program wrote it, with all settings."""

    def wrong(self, message: str) -> None:
        self.problems.append(f"In {self.origin}: {message}")


@dataclass(slots=True)
class _Node:
    """A dataclass under construction; `base` provides the values that no layer has set.

    For a union, `cls` is the dataclass that the layers selected so far; a later layer can select another family.
    """

    cls: type
    base: Any
    arms: tuple[type, ...]
    """All dataclasses that it can become: several for a union."""
    values: dict[str, Any] = field(default_factory=dict)
    children: dict[str, _Node] = field(default_factory=dict)
    origins: dict[str, None] = field(default_factory=dict)
    refused: bool = False
    """Whether a layer has a value that its field cannot hold. Then the whole object is not checked further."""

    @classmethod
    def of(cls, kind: Any, base: Any) -> _Node:
        """A node for a value of `kind`, a dataclass or a union of them."""
        arms = dataclasses_of(kind)
        return cls(arms[0] if base is None else type(base), base, arms)

    def merge(self, values: Mapping[str, Any], layer: _Layer, path: str) -> None:
        """Override the current values with `values`."""
        self.origins[layer.origin] = None
        given_here: list[str] = []
        # A preset sets every field and a family decides which fields exist, so both come before other keys.
        first = ("preset", "family")
        nested = with_moved(self.cls, _nested(values, layer))
        for name, given in sorted(nested.items(), key=lambda item: item[0] not in first):
            if len(layer.problems) >= MOST_PROBLEMS:
                return
            key, value = present(self.cls, name, given[-1])
            if key == "family" and len(self.arms) > 1:
                self._choose_family(value, layer, path)
                continue
            if (refusal := removal(self.cls, key, value, path + key)) is not None:
                layer.problems.extend([f"In {layer.origin}: {refusal}"] if refusal else [])
                self.refused |= bool(refusal)
                continue
            kinds = field_types(self.cls)
            if key == "preset" and "preset" not in kinds and hasattr(self.cls, "parse"):
                self._whole_self(value, layer, path + key)
            elif key not in kinds:
                self._unknown(path + key, key, layer, path)
            elif dataclasses_of(kinds[key]):
                for part in given:
                    self._merge_child(key, kinds[key], part, layer, path)
            else:
                try:
                    self.values[key] = convert(value, kinds[key], text=layer.text)
                    given_here.append(key)
                except BadValue as bad:
                    self.refused = True
                    layer.wrong(bad.sentence(path + key))
        self._settle_pairs(given_here, layer, path)

    def _settle_pairs(self, given: Sequence[str], layer: _Layer, path: str) -> None:
        """Drop the alternative of each setting that is `given` in this layer."""
        for pair in EXCLUSIVE.get(self.cls.__name__, ()):
            named = [name for name in pair if name in given and self.values[name] is not None]
            if len(named) == 2 and layer.stored:
                named = [name for name in pair if self.values[name]][:1]
            if len(named) == 2:
                self.refused = True
                first, second = pair
                layer.wrong(both_given(path + first, self.values[first], path + second, self.values[second]))
            elif named:
                self.values[pair[pair[0] == named[0]]] = None

    def _choose_family(self, value: Any, layer: _Layer, path: str) -> None:
        """Select the dataclass of the union whose family is `value`; if it changes, start from its
        defaults."""
        families = {family_of(arm): arm for arm in self.arms}
        if not isinstance(value, str) or value not in families:
            bad = BadValue(value, f"must be one of {', '.join(families)}.{nearest(str(value), families)}")
            layer.wrong(bad.sentence(f"{path}family"))
        elif families[value] is not self.cls:
            self.cls, self.base, self.values, self.children = families[value], None, {}, {}

    def _merge_child(self, key: str, kind: Any, value: Any, layer: _Layer, path: str) -> None:
        none = isinstance(value, str) and value.lower() in NONE_WORDS and accepts_none(kind)
        if value is None or none:
            if accepts_none(kind):
                self.values[key] = None
                self.children.pop(key, None)
            else:
                layer.wrong(f"{path}{key} is none, but must be {describe(kind)}.")
            return
        child = self.children.get(key)
        if child is None:
            child = self.children[key] = _Node.of(kind, self.values.pop(key, None) or self._default(key))
        if isinstance(value, Mapping):
            child.merge(value, layer, f"{path}{key}.")
        else:
            child._whole_self(value, layer, path + key)

    def _whole_self(self, value: Any, layer: _Layer, path: str) -> None:
        """Set the whole dataclass from an object of it, or from its short text form."""
        self.origins[layer.origin] = None
        short = getattr(self.cls, "SHORT_FIELD", None)
        if isinstance(value, self.arms):
            self._become(value)
        elif isinstance(value, str) and short is not None:
            self.values[short] = value
        elif isinstance(value, str) and hasattr(self.cls, "parse"):
            try:
                self._become(self._parsed(value))
            except ConfigError as error:
                for problem in error.problems:
                    layer.wrong(problem)
        else:
            layer.wrong(BadValue(value, f"must be {describe(self.cls)}.").sentence(path))

    def _parsed(self, line: str) -> Any:
        """The dataclass that a line describes; fields in `KEPT` do not change if the line names none of them."""
        cls: Any = self.cls
        made, kept = cls.parse(line), getattr(cls, "KEPT", ())
        if not kept or not cls.named(line).isdisjoint(kept):
            return made
        before = {name: self.values.get(name, self._default(name)) for name in kept}
        return dataclasses.replace(made, **before)

    def _become(self, value: Any) -> None:
        self.cls, self.base, self.values, self.children = type(value), value, {}, {}

    def _unknown(self, dotted: str, key: str, layer: _Layer, path: str) -> None:
        others = [family_of(arm) for arm in self.arms if key in field_types(arm)]
        inside = [f"{path}{place}" for place in places_of(key, self.cls) if "." in place]
        near = f" Did you mean {' or '.join(map(repr, inside))}?" if inside else ""
        near = near or nearest(key, field_types(self.cls))
        if others and not inside:
            near = f" It belongs to the family {' or '.join(others)}, and this is {family_of(self.cls)}."
        where = f"{path[:-1]} takes" if path else "known are"
        known = f"{where} {', '.join(field_types(self.cls))}."
        listed = any(problem.endswith(known) for problem in layer.problems)
        layer.wrong(
            f"{shown(dotted)} is not a setting.{near} Rename or remove it{'.' if listed else f'; {known}'}"
        )

    def _default(self, name: str) -> Any:
        if self.base is not None:
            return getattr(self.base, name)
        declared: Any = next(f for f in dataclasses.fields(self.cls) if f.name == name)
        if declared.default_factory is not dataclasses.MISSING:
            return declared.default_factory()
        return None if declared.default is dataclasses.MISSING else declared.default

    def make(self, problems: list[str]) -> Any:
        """The finished object, or None after adding to `problems`."""
        children = {name: child.make(problems) for name, child in self.children.items()}
        if self.refused or None in children.values():
            return None
        made = self.values | children
        missing = [] if self.base is not None else [n for n in required_fields(self.cls) if n not in made]
        origins = " and ".join(self.origins)
        if missing:
            problems.append(f"In {origins}: {', '.join(missing)} must be given for {self.cls.__name__}.")
            return None
        try:
            return self.cls(**made) if self.base is None else dataclasses.replace(self.base, **made)
        except ConfigError as error:
            problems.extend(f"In {origins}: {problem}" if origins else problem for problem in error.problems)
            return None


def _nested(values: Mapping[str, Any], layer: _Layer) -> dict[str, list[Any]]:
    """The values that a layer has for each field, with the first part of dotted keys split off: `{"a.b": 1}` becomes
    `{"a": [{"b": 1}]}`. A part may have two values, a whole one and a table that changes it: `--plan "…"` and
    `--plan.optimizer fused`.
    """
    whole: dict[str, Any] = {}
    inside: dict[str, dict[str, Any]] = {}
    for key, value in cast(Mapping[Any, Any], values).items():
        if not isinstance(key, str):
            layer.wrong(f"the key {key!r} is not text; write it in quotes.")
            continue
        head, dot, rest = key.partition(".")
        if dot:
            inside.setdefault(head, {})[rest] = value
        elif isinstance(value, Mapping):
            inside.setdefault(head, {}).update(value)
        else:
            whole[key] = value
    return {key: [part[key] for part in (whole, inside) if key in part] for key in {**whole, **inside}}


_BARE_KEY = re.compile(r"^[A-Za-z0-9_-]+$")


def _dump_table(table: dict[str, Any], path: str, lines: list[str]) -> None:
    """Write scalars first, then sub-tables, because in TOML everything after a header belongs to that
    header."""
    for key, value in table.items():
        if not _is_table(value):
            lines.append(f"{_dump_key(key)} = {_dump_value(value)}")
    for key, value in table.items():
        name = f"{path}.{_dump_key(key)}" if path else _dump_key(key)
        if isinstance(value, dict):
            lines.extend(("", f"[{name}]"))
            _dump_table(value, name, lines)
        elif _is_table(value):
            for entry in value:
                lines.extend(("", f"[[{name}]]"))
                _dump_table(entry, name, lines)


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and bool(value) and isinstance(value[0], dict))


def _dump_key(key: str) -> str:
    return key if _BARE_KEY.match(key) else json.dumps(key, ensure_ascii=False)


def _dump_value(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        # A float in the shortest form that reads back to the same bits; TOML spells inf and nan as Python does.
        return repr(value)
    if isinstance(value, list):
        return f"[{', '.join(_dump_value(entry) for entry in value)}]"
    return json.dumps(value, ensure_ascii=False)  # JSON's escapes are valid TOML
