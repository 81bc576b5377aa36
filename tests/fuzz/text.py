"""Trees of values written as text, odd ones too: what the standard writers refuse, these write all the same."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from typing import Any


def as_json(tree: Any) -> bytes:
    """JSON with NaN, Infinity and half characters, of any depth."""
    return _deep(lambda: json.dumps(tree)).encode()


def as_toml(tree: Any) -> bytes:
    """TOML with a line for each entry, in which inner tables stand in braces."""
    if not isinstance(tree, dict):
        return as_json(tree)
    return _deep(
        lambda: "".join(f"{json.dumps(key)} = {_toml(value)}\n" for key, value in tree.items())
    ).encode()


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{json.dumps(key)} = {_toml(entry)}' for key, entry in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return '"none"' if value is None else json.dumps(value)


def _deep(write: Callable[[], str]) -> str:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(100_000)
    try:
        return write()
    finally:
        sys.setrecursionlimit(before)
