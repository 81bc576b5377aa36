"""The types of configuration fields: their parts, and their description in words."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union


def places_of(name: str, cls: Any, path: str = "") -> Iterator[str]:
    """The dotted keys of all fields called `name` in a dataclass and its parts: `recipe.lr` for `lr`."""
    for key, kind in field_types(cls).items():
        if key == name:
            yield f"{path}{key}"
        for arm in dataclasses_of(kind)[:1]:
            yield from places_of(name, arm, f"{path}{key}.")


_FIELD_TYPES: dict[Any, dict[str, Any]] = {}


def field_types(cls: Any) -> dict[str, Any]:
    """Resolved type of each field of a dataclass, in order of declaration."""
    if cls not in _FIELD_TYPES:  # resolving evaluates source text, so do it once per class
        hints = typing.get_type_hints(cls, include_extras=True)
        _FIELD_TYPES[cls] = {f.name: hints[f.name] for f in dataclasses.fields(cls)}
    return _FIELD_TYPES[cls]


def dataclasses_of(kind: Any) -> tuple[type, ...]:
    """The dataclasses among the types of `kind`: one, several for a union, or none."""
    if dataclasses.is_dataclass(kind):
        return (kind,) if isinstance(kind, type) else ()
    if is_union(kind):
        return tuple(arm for arm in arms_of(kind) if isinstance(arm, type) and dataclasses.is_dataclass(arm))
    return ()


_MORE: dict[Any, list[Any]] = {}


def add_arm(first: type, arm: type) -> None:
    """Add a dataclass to every union that begins with `first`, replacing one of the same family."""
    others = [other for other in _MORE.get(first, []) if family_of(other) != family_of(arm)]
    _MORE[first] = [*others, arm]


def arms_of(kind: Any) -> tuple[Any, ...]:
    """The types of a union, with those added later."""
    arms = typing.get_args(kind)
    return (*arms, *_MORE.get(arms[0], ()))


def family_of(cls: type) -> str:
    """The word that identifies a dataclass in a union: the only value of its field `family`."""
    return str(typing.get_args(field_types(cls)["family"])[0])


def is_union(kind: Any) -> bool:
    """Whether `kind` is `A | B`, in either spelling."""
    return typing.get_origin(kind) in (Union, types.UnionType)


def accepts_none(kind: Any) -> bool:
    """Whether `None` is one of the values of `kind`."""
    return is_union(kind) and type(None) in typing.get_args(kind)


def describe(kind: Any) -> str:
    """The type in words for a user: `a whole number`, `'a' or 'b'`, …"""
    if len(arms := dataclasses_of(kind)) > 1:
        return f"a table with the family {' or '.join(map(family_of, arms))}"
    if is_union(kind):
        return " or ".join("none" if arm is type(None) else describe(arm) for arm in typing.get_args(kind))
    origin = typing.get_origin(kind)
    if origin is Annotated:
        return describe(typing.get_args(kind)[0])
    if origin is Literal:
        words = [repr(option) for option in typing.get_args(kind)]
        return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
    if origin is tuple:
        return f"a list, each item {describe(typing.get_args(kind)[0])}"
    if origin is dict:
        return f"a table, each value {describe(typing.get_args(kind)[1])}"
    if dataclasses.is_dataclass(kind):
        return f"a table of {', '.join(f.name for f in dataclasses.fields(kind))}"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[kind]


def required_fields(cls: Any) -> list[str]:
    """Fields of a dataclass without a default."""
    none = dataclasses.MISSING
    return [f.name for f in dataclasses.fields(cls) if f.default is none and f.default_factory is none]
