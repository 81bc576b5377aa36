"""A rank's report to its agent on why it failed, so that the earliest failure is shown first."""

from __future__ import annotations

import json
import os
import re
import time
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Final

from penstock.boundary.files import printable, read_bytes, write_text
from penstock.boundary.trees import Bounds, parse_json
from penstock.errors import Hang, PenstockError

VARIABLE: Final = "PENSTOCK_REPORT"
"""Environment variable with the path that a failing rank writes to; not set without an agent."""
_LIMIT = 1_000_000
_BOUNDS = Bounds(bytes=16 * _LIMIT)
"""Limits of a report: JSON uses up to twelve bytes for a character."""
_CONSEQUENCES = re.compile(
    r"connection (closed|reset|refused|aborted)|closed by peer|pair closure|broken pipe|peer|remote process"
    r"|socket timeout|timed out waiting|timeout.*(ms|gloo|nccl|store)|nccl.*(abort|remote|watchdog)"
    r"|failed to recv|recvvalue failed|tcpstore|rendezvous",
    re.IGNORECASE,
)
_OF_TRANSPORT = ("DistBackendError", "DistNetworkError", "DistStoreError", "ConnectionError", "RuntimeError")


@dataclass(frozen=True, slots=True)
class Report:
    """The reason why a rank failed."""

    seconds: float
    """`time.time()` of the failure. Hosts' clocks are compared only if nothing else shows which rank was first."""
    text: str
    """Text to show: for an error that the user can fix its message, else the traceback."""
    consequence: bool
    """Whether the error only reports that another rank is gone."""
    hopeless: bool = False
    """Whether another start would end the same way: a module cannot be imported, or is not valid Python."""


def write_report(error: BaseException, trace: TracebackType | None = None) -> bool:
    """Write why this rank failed, for its agent. Returns False without an agent: then the caller shows the error."""
    path = os.environ.get(VARIABLE)
    if path is None:
        return False
    if isinstance(error, PenstockError):
        text = str(error)
    else:
        text = "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))
    hopeless = isinstance(error, ImportError | SyntaxError)
    report = Report(time.time(), printable(text[-_LIMIT:]), _is_consequence(error), hopeless)
    write_text(path, json.dumps(asdict(report)))  # atomic: the writer may be killed at any instant
    return True


def read_report(path: Path) -> Report | None:
    """Read the report that a rank wrote, if it did."""
    from penstock.config.load import from_dict  # here, because every verb imports this module

    try:
        raw = read_bytes(path, "The report", limit=_BOUNDS.bytes)
        report = from_dict(Report, parse_json(raw, "The report", bounds=_BOUNDS))
    except PenstockError:
        return None
    return replace(report, text=printable(report.text))


def _is_consequence(error: BaseException) -> bool:
    if isinstance(error, PenstockError):
        # Raised on behalf of another rank, which failed or did not answer.
        return isinstance(error, Hang) or str(error).startswith("On rank ")
    names = {cls.__name__ for cls in type(error).__mro__}
    return bool(names & set(_OF_TRANSPORT)) and bool(_CONSEQUENCES.search(str(error)))
