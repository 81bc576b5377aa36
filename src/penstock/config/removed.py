"""Settings and commands of earlier versions that were removed, and their replacements: `presets/removed.toml`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.config.shipped import read_shipped

_INSTEAD = (
    "gradient_histogram and recommend say what fp16 loses and which scale saves it, and OverflowTrace where an "
    "overflow begins (docs/how-to/loss-scale.md)"
)
INSPECTION = {"report": _INSTEAD, "PrecisionReport": _INSTEAD}
"""Removed names of `penstock.precision`, and what to do instead."""


def removed(kind: str) -> Mapping[str, Any]:
    """The table of removed `settings`, `commands`, `options` or `sources`, by name."""
    table: Mapping[str, Any] = read_shipped("removed")[kind]
    return table


def removed_option(command: str, word: str) -> str | None:
    """The problem of a command's option (without its dashes) if it or its setting was removed; None for others."""
    if instead := removed("options").get(f"{command} {word}"):
        return f"--{word} was removed; {instead}."
    for key, setting in removed("settings").items():
        section, _, name = key.partition(".")
        alone = section in ("Decoding", "CompressConfig")
        if "instead" in setting and (word == f"{section.lower()}.{name}" or (alone and word == name)):
            return f"--{word} was removed; {setting['instead']}."
    return None


def removal(cls: type, name: str, value: Any, path: str) -> str | None:
    """The problem of a setting or value that was removed; `path` is the setting's name in messages. Empty if leaving
    the setting out means the same, None if it was not removed."""
    table, text = removed("settings"), str(value)
    entry: Mapping[str, Any] = next(
        (table[key] for base in cls.__mro__ if (key := f"{base.__name__}.{name}") in table), {}
    )
    if text.lower() in entry.get("same", ()):
        return ""
    instead = entry.get("instead") or entry.get("values", {}).get(text)
    return f"{path}={text} was removed; {instead}." if instead else None


def with_moved(cls: type, nested: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Values for the fields of `cls`, with moved fields (`cls.MOVED`) under their present names."""
    for before, now in getattr(cls, "MOVED", {}).items():
        (old, _, name), (new, _, today) = before.partition("."), now.partition(".")
        for part in nested.get(old, []):
            if isinstance(part, dict) and name in part:
                nested.setdefault(new, []).append({today: part.pop(name)})
    return nested


def without_removed(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a stored run without removed ones, for callers that need only its model and weights."""
    remaining = dict(stored)
    for key, entry in removed("settings").items():
        section, name = key[0].lower() + key[1:].partition(".")[0], key.partition(".")[2]
        values = remaining.get(section)
        if isinstance(values, Mapping) and ("instead" in entry or str(values.get(name)) in entry["values"]):
            remaining[section] = {other: value for other, value in values.items() if other != name}
    return remaining
