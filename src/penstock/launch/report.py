"""Why ranks failed: a rank reports it to its agent, which judges who failed first and whether a restart can help."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Final

from penstock.boundary.files import printable, read_bytes, write_text
from penstock.boundary.trees import Bounds, parse_json
from penstock.errors import ExitCode, Hang, PenstockError
from penstock.launch.signals import STOPS

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


FINAL = frozenset({
    ExitCode.CONFIG, ExitCode.ENVIRONMENT, ExitCode.DATA, ExitCode.CHECKPOINT, ExitCode.NUMERIC,
    ExitCode.OUT_OF_MEMORY, ExitCode.SAVED_REQUEUE, ExitCode.INTERRUPTED, 126, 127,
})  # fmt: skip
"""Exit codes after which nothing is restarted: the same command would end the same way, or it was asked to end. 126 and
127 are a shell's for a command that it cannot run or find."""
_SHELL_SIGNAL = 128


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of one rank."""

    rank: int
    code: int
    """Exit code of the process; minus the signal's number if a signal killed it."""
    text: str = ""
    """Text to show: for an error that the user can fix its message, else the traceback."""
    consequence: bool = False
    """Whether the error only reports that another rank is gone."""
    seconds: float = 0.0
    """`time.time()` of the failure. Hosts' clocks are compared only if nothing else shows which rank was first."""
    stacks: str = ""
    """Stacks of a rank that hangs, which show where it waits."""
    hopeless: bool = False
    """Whether another start would end the same way: a module cannot be imported, or is not valid Python."""

    @property
    def exit_code(self) -> int:
        """The exit code as a shell reports it: 128 + the number of the signal that killed it."""
        return _SHELL_SIGNAL - self.code if self.code < 0 else self.code

    @property
    def how(self) -> str:
        """How the rank ended, in words."""
        if self.stacks:
            return "hangs"
        if self.code < 0:
            return f"was killed by {_signal_name(-self.code)}"
        if self.code in (ExitCode.SAVED_REQUEUE, ExitCode.INTERRUPTED):
            return "saved its state and stopped"
        return f"ended with code {self.code}"


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
    reason = {"text": printable(text[-_LIMIT:]), "consequence": _is_consequence(error), "hopeless": hopeless}
    # Atomic, because the writer may be killed at any instant.
    write_text(path, json.dumps(reason | {"seconds": time.time()}))
    return True


def read_report(path: Path, rank: int, code: int) -> Failure | None:
    """The failure that a rank, which ended with `code`, has reported; None if it reported nothing."""
    from penstock.config.load import from_dict  # here, because every verb imports this module

    try:
        reason = parse_json(read_bytes(path, "The report", limit=_BOUNDS.bytes), "The report", bounds=_BOUNDS)
        failure = from_dict(Failure, reason | {"rank": rank, "code": code})
    except PenstockError:
        return None
    return replace(failure, text=printable(failure.text))


def _is_consequence(error: BaseException) -> bool:
    if isinstance(error, PenstockError):
        # Raised on behalf of another rank, which failed or did not answer.
        return isinstance(error, Hang) or str(error).startswith("On rank ")
    names = {cls.__name__ for cls in type(error).__mro__}
    return bool(names & set(_OF_TRANSPORT)) and bool(_CONSEQUENCES.search(str(error)))


@dataclass(frozen=True, slots=True)
class Outcome:
    """How all ranks ended, on this node or on all."""

    code: int
    """Exit code of the command, if it ended here."""
    failures: tuple[Failure, ...] = ()
    """Failures, the first one first; empty if all ranks succeeded."""
    final: bool = True
    """Whether a restart would not help, or is not wanted."""
    regroup: bool = False
    """Whether the ranks only stopped to let a node join."""


def judge(failures: Iterable[Failure], *, stopping: bool) -> Outcome:
    """The outcome of one life of all ranks of a node; `stopping` says whether they had been asked to stop."""
    ordered = order(failures)
    if not ordered:
        return Outcome(int(ExitCode.DONE))
    first = ordered[0]
    if stopping and (first.code == ExitCode.SAVED_REQUEUE or -first.code in STOPS):
        # Killed by the signal forwarded to it: it had not yet set its handler, and had nothing to save.
        return Outcome(int(ExitCode.SAVED_REQUEUE), ordered)
    return Outcome(first.exit_code, ordered, final=stopping or first.code in FINAL or first.hopeless)


def order(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """Sort by which failed first: causes before consequences, silent deaths before errors at about the same time."""
    return tuple(sorted(failures, key=lambda f: (f.consequence, not f.stacks, f.seconds, f.code > 0, f.rank)))


def tell(failures: Sequence[Failure]) -> list[str]:
    """The failures as lines to show, beginning with the first failure and its traceback."""
    lines: list[str] = []
    rest = list(failures)
    while rest:
        first = rest.pop(0)
        alike = [f for f in rest if f.text == first.text and f.code == first.code and not f.stacks and f.text]
        alike += [
            f for f in rest if first is failures[0] and f.consequence and not f.stacks and f not in alike
        ]
        rest = [f for f in rest if f not in alike]
        lines.append(f"rank {first.rank} {first.how}{':' if first.text or first.stacks else '.'}")
        lines += [part.rstrip("\n") for part in (first.text, first.stacks) if part]
        same = [f.rank for f in alike if not f.consequence]
        lost = [f.rank for f in alike if f.consequence]
        if same:
            lines.append(f"{_ranks(same)} ended the same way.")
        if lost:
            lines.append(f"{_ranks(lost)} then lost {'it' if not same else 'them'}.")
    return lines


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
