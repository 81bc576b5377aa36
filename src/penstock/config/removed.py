"""Settings, values and commands of earlier versions that are gone, and what to use in their place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REMOVED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "Plan.master": (
        "leave it out: precision=O2 keeps an fp32 copy of its weights. A run with it goes on from its weights, with "
        "--init_from RUN/export or what penstock checkpoint export writes",
        ("copy",),
    ),
}
"""By class and setting: what to do without it, and the values that say what happens anyway, which are read, because a
run's folder has every setting."""
REMOVED_VALUES: dict[str, dict[str, str]] = {}
"""By class and setting: values that are gone, and what to do without them."""


def removal(cls: type, name: str, value: Any, path: str) -> str | None:
    """The problem of a setting or value that is gone, where `path` is what a message calls the setting; empty where
    leaving it out says the same, None where it is not gone."""
    key, text = f"{cls.__name__}.{name}", str(value)
    if key in REMOVED:
        instead, same = REMOVED[key]
        return (
            ""
            if text.lower() in [str(each).lower() for each in same]
            else f"{path}={text} was removed; {instead}."
        )
    instead = REMOVED_VALUES.get(key, {}).get(text, "")
    return f"{path}={text} was removed; {instead}." if instead else None


def without_removed(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a stored run without those that are gone, for whoever asks for its model and weights alone."""
    kept = dict(stored)
    for key in {**REMOVED, **REMOVED_VALUES}:
        section, name = key[0].lower() + key[1:].partition(".")[0], key.partition(".")[2]
        values = kept.get(section)
        if isinstance(values, Mapping) and (key in REMOVED or str(values.get(name)) in REMOVED_VALUES[key]):
            kept[section] = {other: value for other, value in values.items() if other != name}
    return kept
