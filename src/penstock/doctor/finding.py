"""A check's finding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "slow", "absent", "broken"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check: `ok`, `slow` (right, but of no use for speed), `absent` (Penstock works without it) or
    `broken` (it should work, and does not)."""

    area: str
    name: str
    status: Status
    detail: str
    remedy: str = ""
    """How to fix it, in one line; empty where nothing needs fixing."""
    required: bool = False
    """Whether Penstock cannot work at all while this is broken."""


def first_line(error: object) -> str:
    """The first line of a message, short enough for a table."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0] if len(lines[0]) <= 160 else f"{lines[0][:157]}..."
