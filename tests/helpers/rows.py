"""Figures of the fault suite, row by row in one JSON file, with where they came from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.report.record import environment

Note = Callable[..., None]
"""Puts figures under a row: see the fixture in tests/faults/conftest.py."""


def record(path: Path, row: str, figures: dict[str, Any], *, command: str) -> None:
    """Put `figures` under `row` into the result file `path`; rows that other tests put there stay."""
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    document = environment() | {"command": command, "rows": {**before.get("rows", {}), row: figures}}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
