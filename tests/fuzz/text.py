"""Trees of values written as text, odd ones too: what the standard writers refuse, these write all the same."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Iterator
from typing import Any


def as_json(tree: Any) -> bytes:
    """JSON with NaN, Infinity and half characters, of any depth."""
    with deep():
        return json.dumps(tree).encode()


def as_toml(tree: Any) -> bytes:
    """TOML with a line for each entry, in which inner tables stand in braces."""
    if not isinstance(tree, dict):
        return as_json(tree)
    with deep():
        return "".join(f"{json.dumps(key)} = {_toml(value)}\n" for key, value in tree.items()).encode()


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{json.dumps(key)} = {_toml(entry)}' for key, entry in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return '"none"' if value is None else json.dumps(value)


@contextlib.contextmanager
def deep() -> Iterator[None]:
    """Let Python's own functions recurse into trees that are thousands of levels deep."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(100_000)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)
