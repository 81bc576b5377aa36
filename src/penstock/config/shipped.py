"""Tables in TOML that come with the package: presets, jobs, machines, and the models of transformers."""

from __future__ import annotations

import functools
import pkgutil
import tomllib
from collections.abc import Mapping
from typing import Any


@functools.cache
def read_shipped(name: str) -> dict[str, Any]:
    """The content of `presets/NAME.toml`; callers must not modify it."""
    data = pkgutil.get_data("penstock.config", f"presets/{name}.toml")  # in the browser the package is a zip
    assert data is not None
    return tomllib.loads(data.decode())


def with_forms(table: Mapping[str, Any], forms: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a table on top of those of the forms that it refers to, in order."""
    settings: dict[str, Any] = {}
    like = table.get("like", ())
    for form in [like] if isinstance(like, str) else like:
        settings = over(settings, with_forms(forms[form], forms))
    return over(settings, {key: value for key, value in table.items() if key != "like"})


def over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two trees of settings; those in `above` take precedence. A key with commas stands for several names."""
    merged = dict(below)
    for key, value in above.items():
        for name in key.split(","):
            before = merged.get(name)
            if isinstance(value, Mapping):
                merged[name] = over(before if isinstance(before, Mapping) else {}, value)
            else:
                merged[name] = value
    return merged
