"""What a check reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "absent", "broken"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing looked at: `ok`, `absent` (does without) or `broken` (does wrong or not at all, and should)."""

    area: str
    name: str
    status: Status
    detail: str
    remedy: str = ""
    """One line that mends it; empty where there is nothing to mend."""
    required: bool = False
    """Whether Penstock cannot work at all while this is broken."""


def first_line(error: object) -> str:
    """The first line of a message, short enough for a table."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0] if len(lines[0]) <= 160 else f"{lines[0][:157]}..."


def last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return first_line(lines[-1]) if lines else "it gave no reason"
