"""The text models of transformers, with each option of their config.json, as `presets/libraries.toml` describes
them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from penstock.config.activations import GATED_NAMES, PLAIN_NAMES, Mlp
from penstock.config.load import from_dict
from penstock.config.model import FAMILIES
from penstock.config.shipped import read_shipped, with_forms
from penstock.config.theirs.library import Library, WindowTurns
from penstock.config.theirs.names import names_of

_ACTIVATIONS: dict[str, Mapping[str, Mlp]] = {
    "plain": PLAIN_NAMES,
    "gated": GATED_NAMES,
    # T5's `gated-gelu` is the tanh approximation.
    "feed_forward": {**PLAIN_NAMES, "gated-gelu": "geglu_tanh", "gated-silu": "swiglu"},
}


def _read(model_type: str, table: dict[str, Any]) -> Library:
    """A library from its table, with None for "none", tuples for lists, and without empty entries."""
    settings: dict[str, Any] = _plain(table)
    base, activation = settings.pop("base"), settings.pop("activation")
    family: Any = FAMILIES[base.pop("family")]
    names = activation["names"]
    settings["base"] = from_dict(family, base, origin=f"libraries.toml, {model_type}")
    settings["activation"] = activation["option"], _ACTIVATIONS[names] if isinstance(names, str) else names
    settings["options"] = {name: (option[0], option[1:]) for name, option in settings["options"].items()}
    settings["names"] = partial(names_of, settings["names"])
    if isinstance(window := settings.get("window"), dict):
        settings["window"] = WindowTurns(**window)
    settings |= {name: frozenset(settings[name]) for name in ("free", "nulls") if name in settings}
    return Library(model_type=model_type, **settings)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items() if entry != [] or name == "heads"}
    if isinstance(value, list):
        return tuple(map(_plain, value))
    return None if value == "none" else value


_TABLES = read_shipped("libraries")
LIBRARIES = tuple(
    _read(model_type, with_forms(table, _TABLES["forms"]))
    for model_type, table in _TABLES["libraries"].items()
)
ELSEWHERE: dict[str, str] = _TABLES["elsewhere"]
"""Why models of other types are not read, and what to use instead."""
