"""Words about the configuration dataclasses, read from their source: for `--help` and for the reference pages."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import textwrap
import typing
from collections.abc import Iterator
from typing import Any, Literal

from penstock.config.convert import accepts_none, dataclass_of, field_types, is_union


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a configuration."""

    key: str
    """Dotted, from the configuration's root."""
    kind: Any
    """Its type; a dataclass for a part that can be given whole (`--plan "precision=O1"`)."""
    default: Any
    help: str
    """What the source says beneath the field; may be empty."""


def field_docs(cls: type) -> dict[str, str]:
    """The string beneath each field of a dataclass, one paragraph of plain text; fields without one are absent."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    docs = {}
    for statement, after in itertools.pairwise(body):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
            and isinstance(after.value.value, str)
        ):
            docs[statement.target.id] = " ".join(after.value.value.split())
    return docs


def settings(cls: type, path: str = "", default: Any = None) -> Iterator[Setting]:
    """Every setting of `cls`, depth first; a nested part that has a short text form comes before its fields."""
    docs = field_docs(cls)
    default = default if default is not None else cls()
    for name, kind in field_types(cls).items():
        inner = dataclass_of(kind)
        value = getattr(default, name)
        key = f"{path}{name}"
        if inner is None:
            yield Setting(key, kind, value, docs.get(name, ""))
            continue
        if hasattr(inner, "parse") or hasattr(inner, "SHORT_FIELD"):
            yield Setting(key, kind, value, docs.get(name, "") or _first_line(inner))
        yield from settings(inner, f"{key}.", value)


def type_word(kind: Any) -> str:
    """The type as short words for a help page: `a|b`, `INT`, `FLOAT|none`."""
    if is_union(kind):
        arms = [type_word(arm) for arm in typing.get_args(kind) if arm is not type(None)]
        return "|".join([*arms, "none"] if accepts_none(kind) else arms)
    if typing.get_origin(kind) is Literal:
        return "|".join(str(option) for option in typing.get_args(kind))
    if dataclasses.is_dataclass(kind):
        return "TEXT"
    return {int: "INT", float: "FLOAT", bool: "true|false"}.get(kind, "TEXT")


def default_word(value: Any) -> str:
    """A default as a user would type it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        short = getattr(value, "SHORT_FIELD", None)
        if short is not None:
            return str(getattr(value, short))
        short_form = getattr(value, "short_form", None)
        return str(short_form()) if short_form is not None else str(value)
    return str(value)


def _first_line(cls: type) -> str:
    return (inspect.getdoc(cls) or "").partition("\n")[0]
