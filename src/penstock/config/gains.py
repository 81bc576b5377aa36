"""Which fused operators are faster on which kind of machine: a table of measurements, shipped or made by the user.

`presets/gains.json` holds the speedup of each fused operator by kind of machine, operator, variant, type and form of
the rest (eager, compiled). A variant is the kind of a norm or an activation. `penstock tune-kernels` measures this
machine and stores its own table in the cache folder, which takes precedence over the shipped one. `plan.fuse=auto`
chooses by it, and the planner predicts by it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from penstock.boundary.files import read_text, write_text
from penstock.boundary.trees import parse_json
from penstock.config.fused import FusedName
from penstock.config.machine import cache_folder, is_trusted
from penstock.errors import PenstockError

LEAST_GAIN = 1.03
"""The smallest speedup for which `auto` chooses an operator: smaller differences are noise."""
_LARGEST = 1 << 20
_SHIPPED = Path(__file__).parent / "presets" / "gains.json"
Gains = Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]]
"""Speedups by operator, variant, type and form of the rest."""


def stored_path() -> Path:
    """The file of this user's own measurements."""
    return cache_folder() / "kernels.json"


def gains_of(kind: str) -> Gains:
    """Measured speedups of a kind of machine: the user's own, else the shipped ones, else none."""
    for path in (stored_path(), _SHIPPED):
        table = _table(path)
        if isinstance(table.get(kind), dict):
            return table[kind]  # type: ignore[no-any-return]
    return {}


def variants_that_pay(name: FusedName, kind: str, dtype: str, *, compiled: bool) -> frozenset[str]:
    """The variants of an operator that were measured to be faster than eager or compiled operators on a kind of
    machine, for products of `dtype` (torch's name, such as `bfloat16`)."""
    form = "compiled" if compiled else "eager"
    variants: Any = gains_of(kind).get(name, {})
    try:
        return frozenset(key for key, types in variants.items() if types[dtype][form] >= LEAST_GAIN)
    except (AttributeError, KeyError, TypeError):  # a table of another version; measuring again replaces it
        return frozenset()


def store(kind: str, gains: Gains) -> Path:
    """Store measurements for later runs, next to those of other kinds of machines; returns the file."""
    path = stored_path()
    write_text(path, json.dumps({**_table(path), kind: gains}, indent=1) + "\n")
    return path


def _table(path: Path) -> dict[str, Any]:
    """The table in a file; empty if there is none or it cannot be read. Measuring again replaces it."""
    try:
        state = path.stat()
    except OSError:
        return {}
    return _read(path, state.st_ctime_ns, state.st_size)


@lru_cache(maxsize=4)
def _read(path: Path, changed: int, size: int) -> dict[str, Any]:
    """The table in a file, cached by the file's time and size: a search for a layout reads it a thousand times."""
    if path != _SHIPPED and not is_trusted(path):
        return {}
    try:
        table = parse_json(read_text(path, "The table of kernels", limit=_LARGEST), "The table of kernels")
    except PenstockError:
        return {}
    return table if isinstance(table, dict) else {}
