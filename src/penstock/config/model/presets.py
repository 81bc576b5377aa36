"""The named models: `presets/models.toml` has their settings, and the publications of their sizes."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from functools import partial
from typing import Any

from penstock.config.load import from_dict
from penstock.config.model.every import FAMILIES, ModelConfig
from penstock.config.model.family import NAMED, ModelFamily
from penstock.config.shipped import read_shipped, with_forms

_SIZES = ("width", "depth", "heads", "kv_heads", "mlp_width")


def preset(name: str) -> ModelConfig:
    """The preset called `name`, of any family. Raises `ConfigError` naming the nearest."""
    return ModelFamily.parse(name)  # type: ignore[no-any-return]


def _make(name: str, tables: Mapping[str, Any]) -> ModelConfig:
    settings = with_forms(tables["presets"][name], tables["forms"])
    family: Any = FAMILIES[settings.pop("family")]
    return from_dict(family, settings, origin=f"models.toml, {name}")  # type: ignore[no-any-return]


def _sized(table: Mapping[str, Any]) -> dict[str, Any]:
    """Expand a table into one key for each of its `sizes`."""
    settings: dict[str, Any] = {}
    for key, value in table.items():
        if key == "sizes":
            names = _SIZES if len(value) == len(_SIZES) else (*_SIZES[:3], _SIZES[-1])
            settings |= zip(names, value, strict=True)
        else:
            settings[key] = _sized(value) if isinstance(value, dict) else value
    return settings


PRESETS: MutableMapping[str, ModelConfig] = NAMED
_TABLES = _sized(read_shipped("models"))
NAMED.update({name: partial(_make, name, _TABLES) for name in _TABLES["presets"]})
