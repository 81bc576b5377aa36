"""Descriptions of the configuration dataclasses, read from their source, for `--help` and the reference
pages."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import sys
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from penstock.config.convert import word
from penstock.config.kinds import accepts_none, dataclasses_of, family_of, field_types, is_union


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """One setting of a configuration."""

    key: str
    """The dotted path from the configuration's root."""
    kind: Any
    """Its type; a dataclass for a part that can be set as a whole (`--plan "precision=O1"`)."""
    default: Any
    help: str
    """The docstring below the field; may be empty."""
    families: tuple[str, ...] = ()
    """Families that have it, if the default of this part is of another family or is none; empty otherwise."""


def field_docs(cls: type) -> dict[str, str]:
    """The docstring below each field of a dataclass, as one paragraph; fields without one are absent."""
    docs = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            docs.update(_module_docs(base.__module__).get(base.__name__, {}))
    return docs


@functools.cache
def _module_docs(name: str) -> dict[str, dict[str, str]]:
    """The strings beneath fields, by class, of all classes at the top of a module: its source is parsed once."""
    tree = ast.parse(inspect.getsource(sys.modules[name]))
    return {
        statement.name: dict(_documented(statement))
        for statement in tree.body
        if isinstance(statement, ast.ClassDef)
    }


def _documented(cls: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for statement, after in itertools.pairwise(cls.body):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
            and isinstance(after.value.value, str)
        ):
            yield statement.target.id, " ".join(after.value.value.split())


def settings(cls: type, path: str = "", default: Any = None) -> Iterator[Field]:
    """Every setting of `cls`, depth first; a nested part that has a short text form comes before its fields.

    For a part that is a union, the settings of all families are included, each once.
    """
    docs = field_docs(cls)
    default = default if default is not None else cls()
    for name, kind in field_types(cls).items():
        value = getattr(default, name)
        key = f"{path}{name}"
        arms = dataclasses_of(kind)
        if not arms:
            yield Field(key, kind, value, docs.get(name, ""))
            continue
        if hasattr(arms[0], "parse") or hasattr(arms[0], "SHORT_FIELD"):
            yield Field(
                key, kind, value, docs.get(name, "") or (inspect.getdoc(arms[0]) or "").partition("\n")[0]
            )
        if len(arms) == 1:
            yield from settings(arms[0], f"{key}.", value)
        else:
            yield from _of_families(arms, f"{key}.", value)


def _of_families(arms: tuple[type, ...], path: str, default: Any) -> Iterator[Field]:
    """The settings of a union: those of the default's family first, then those that other families add."""
    own = arms[0] if default is None else type(default)
    words = tuple(family_of(arm) for arm in arms)
    seen = {f"{path}family"}
    all_of_them = words if default is None else ()
    yield Field(f"{path}family", Literal[words], family_of(own), "The family of the model.", all_of_them)
    for arm in (own, *(arm for arm in arms if arm is not own)):
        for field in settings(arm, path, default if arm is own else None):
            if field.key in seen:
                continue
            seen.add(field.key)
            if type(default) is not arm:
                name = field.key.removeprefix(path).partition(".")[0]
                having = tuple(family_of(arm) for arm in arms if name in field_types(arm))
                text = f"For {', '.join(having)}. {field.help}".strip()
                field = dataclasses.replace(field, help=text, families=having)
            yield field


def type_word(kind: Any) -> str:
    """The type in short form for a help page: `a|b`, `INT`, `FLOAT|none`."""
    if is_union(kind):
        arms = [type_word(arm) for arm in typing.get_args(kind) if arm is not type(None)]
        return "|".join(dict.fromkeys([*arms, "none"] if accepts_none(kind) else arms))
    if typing.get_origin(kind) is Annotated:
        return type_word(typing.get_args(kind)[0])
    if typing.get_origin(kind) is Literal:
        return "|".join(str(option) for option in typing.get_args(kind))
    if dataclasses.is_dataclass(kind):
        return "TEXT"
    return {int: "INT", float: "FLOAT", bool: "true|false"}.get(kind, "TEXT")


def default_word(value: Any) -> str:
    """A default as a user would type it; an empty list is shown as `()`."""
    if value == ():
        return "()"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        short = getattr(value, "SHORT_FIELD", None)
        if short is not None:
            return str(getattr(value, short))
        short_form = getattr(value, "short_form", None)
        return str(short_form()) if short_form is not None else str(value)
    return word(value)
