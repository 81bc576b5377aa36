"""A check's finding, and how a check runs Python in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "slow", "absent", "broken"]

SUBPROCESS_SECONDS = 120


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


def last_line(text: str) -> str:
    """The last line of a traceback, short enough for a table."""
    lines = text.strip().splitlines()
    return first_line(lines[-1]) if lines else "it gave no reason"


def run(words: list[str]) -> tuple[int, str]:
    """Exit code and error output of a command; 1 and why, where it could not be run."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=SUBPROCESS_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as failure:
        return 1, str(failure)
    return done.returncode, done.stderr


def run_python(program: str) -> tuple[int, str]:
    """`run`, for a short program in a new Python interpreter, so that a crash does not end this one."""
    return run([sys.executable, "-c", program])
