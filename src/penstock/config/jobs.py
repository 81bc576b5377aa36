"""Defaults of `penstock train NAME`, in `presets/jobs.toml`: settings that suit a preset, or its task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from penstock.config.shipped import read_shipped, with_forms

Settings = dict[str, Any]
"""Values by dotted key."""


def _dotted(table: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


_TABLES = read_shipped("jobs")


def _settings(kind: str) -> dict[str, Settings]:
    return {name: dict(_dotted(with_forms(table, _TABLES["forms"]))) for name, table in _TABLES[kind].items()}


JOBS = _settings("presets")
"""Settings by preset."""
TUNING = _settings("tasks")
"""Settings by task, for models that start from weights. They override those of the preset."""
