"""Which fused operators pay on which kind of machine: a table of measurements, shipped and re-measured.

`gains.json` holds, by kind of machine, operator, variant, type and form of the rest (eager, compiled), how many times
as fast the fused operator was. A variant is the kind of a norm or an activation. `penstock tune-kernels` measures the
machine at hand and stores its own table in the cache folder, which goes before the shipped one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from penstock.boundary.files import read_text, write_text
from penstock.boundary.trees import parse_json
from penstock.config.fused import FusedName
from penstock.config.machine import cache_folder
from penstock.cpu import this_cpu
from penstock.errors import PenstockError

LEAST_GAIN = 1.03
"""Times as fast that an operator must be at least for `auto` to take it: smaller differences are noise."""
_LARGEST = 1 << 20
Gains = Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]]
"""By operator, variant, type and form of the rest."""


def kind_of(device: str) -> str:
    """The kind of machine that measurements are stored under: a CPU's instruction sets, or a GPU's name."""
    return (
        this_cpu().kind if device == "cpu" else torch.cuda.get_device_name() if device == "cuda" else device
    )


def stored_path() -> Path:
    """The file of this user's own measurements."""
    return cache_folder() / "kernels.json"


def gains_of(kind: str) -> Gains:
    """Measured gains of a kind of machine: this user's, else those shipped, else none."""
    for path in (stored_path(), Path(__file__).parent / "gains.json"):
        table = _read(path)
        if isinstance(table, dict) and isinstance(table.get(kind), dict):
            return table[kind]  # type: ignore[no-any-return]
    return {}


def variants_that_pay(name: FusedName, device: str, dtype: torch.dtype, *, compiled: bool) -> frozenset[str]:
    """The variants of an operator that were measured to be faster than eager or compiled operators, for products of a
    type."""
    form, type_ = "compiled" if compiled else "eager", str(dtype).removeprefix("torch.")
    variants: Any = gains_of(kind_of(device)).get(name, {})
    try:
        return frozenset(key for key, types in variants.items() if types[type_][form] >= LEAST_GAIN)
    except (AttributeError, KeyError, TypeError):  # a table of another version; measuring again replaces it
        return frozenset()


def store(kind: str, gains: Gains) -> Path:
    """Keep measurements for later runs, beside those of other kinds; returns the file."""
    path = stored_path()
    write_text(path, json.dumps({**_read(path), kind: gains}, indent=1) + "\n")
    return path


def _read(path: Path) -> dict[str, Any]:
    """The table in a file; empty where there is none that can be read, which measuring again replaces."""
    try:
        text = read_text(path, "The table of kernels", limit=_LARGEST) if path.is_file() else "{}"
        table = parse_json(text, "The table of kernels")
    except PenstockError:
        return {}
    return table if isinstance(table, dict) else {}
