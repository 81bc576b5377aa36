"""Judges failures: which rank failed first, the exit code of the run, and whether a restart can help."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.errors import ExitCode
from penstock.launch.signals import STOPS

FINAL = frozenset(
    {
        ExitCode.CONFIG,
        ExitCode.ENVIRONMENT,
        ExitCode.DATA,
        ExitCode.CHECKPOINT,
        ExitCode.NUMERIC,
        ExitCode.OUT_OF_MEMORY,
        ExitCode.SAVED_REQUEUE,
        126,
        127,
        ExitCode.INTERRUPTED,
    }
)
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
    """Traceback or message, if any."""
    consequence: bool = False
    """Whether it only failed because another rank did."""
    seconds: float = 0.0
    """`time.time()` of the failure."""
    stacks: str = ""
    """Stacks of a rank that hangs, which show where it waits."""
    hopeless: bool = False
    """Whether its program cannot run at all: a package is missing, or a file is not valid Python."""

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
