"""What a failure means: who failed first, which exit code the run ends with, and whether starting again can help."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from penstock.errors import ExitCode

FINAL = frozenset(
    {
        ExitCode.CONFIG,
        ExitCode.ENVIRONMENT,
        ExitCode.DATA,
        ExitCode.CHECKPOINT,
        ExitCode.NUMERIC,
        ExitCode.OUT_OF_MEMORY,
        ExitCode.SAVED_REQUEUE,
        130,
    }
)
"""Exit codes that the same command would end with again, or that were wished for: nothing is started again."""
_SHELL_SIGNAL = 128
_STOPS = (signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True, slots=True)
class Failure:
    """How one rank ended, when not well."""

    rank: int
    code: int
    """Of the process: negative for the signal that killed it."""
    text: str = ""
    """Traceback or message, if it left one."""
    consequence: bool = False
    """Whether it only failed because another rank did."""
    seconds: float = 0.0
    """`time.time()` at which it failed."""
    stacks: str = ""
    """Of a hung rank: where it stands."""

    @property
    def exit_code(self) -> int:
        """As a shell gives it: 128 + the number of the signal that killed it."""
        return _SHELL_SIGNAL - self.code if self.code < 0 else self.code

    @property
    def how(self) -> str:
        """The end in words."""
        if self.stacks:
            return "hangs"
        if self.code < 0:
            return f"was killed by {_signal_name(-self.code)}"
        if self.code == ExitCode.SAVED_REQUEUE:
            return "saved its state and stopped"
        return f"ended with code {self.code}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How all ranks together ended, on this node or on all."""

    code: int
    """What the command would return if this were the end."""
    failures: tuple[Failure, ...] = ()
    """First failure first; empty when all ended well."""
    final: bool = True
    """Whether starting again would change nothing, or is not wanted."""
    regroup: bool = False
    """Whether the ranks only made room for a node that joins."""


def judge(failures: Iterable[Failure], *, stopping: bool) -> Outcome:
    """The outcome of one life of all ranks of a node; `stopping` says whether they had been asked to stop."""
    ordered = order(failures)
    if not ordered:
        return Outcome(int(ExitCode.DONE))
    first = ordered[0]
    if stopping and (first.code == ExitCode.SAVED_REQUEUE or -first.code in _STOPS):
        # Killed by the very signal it was forwarded: it had not yet come so far as to have anything to save.
        return Outcome(int(ExitCode.SAVED_REQUEUE), ordered)
    return Outcome(first.exit_code, ordered, final=stopping or first.code in FINAL)


def order(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """First failure first: causes before consequences, deaths without a word before errors at about the same time."""
    return tuple(sorted(failures, key=lambda f: (f.consequence, not f.stacks, f.seconds, f.code > 0, f.rank)))


def tell(failures: Sequence[Failure]) -> list[str]:
    """The failures as lines to show, the first with its traceback first."""
    told: list[str] = []
    left = list(failures)
    while left:
        first = left.pop(0)
        alike = [f for f in left if f.text == first.text and f.code == first.code and not f.stacks and f.text]
        alike += [
            f for f in left if first is failures[0] and f.consequence and not f.stacks and f not in alike
        ]
        left = [f for f in left if f not in alike]
        told.append(f"rank {first.rank} {first.how}{':' if first.text or first.stacks else '.'}")
        told += [part.rstrip("\n") for part in (first.text, first.stacks) if part]
        same = [f.rank for f in alike if not f.consequence]
        lost = [f.rank for f in alike if f.consequence]
        if same:
            told.append(f"{_ranks(same)} ended alike.")
        if lost:
            told.append(f"{_ranks(lost)} then lost {'it' if not same else 'them'}.")
    return told


def merge(mine: Outcome, theirs: Outcome | None) -> Outcome:
    """This node's outcome in the light of what another said first: its cause goes before our consequence."""
    if theirs is None:
        return mine
    only_lost = all(f.consequence for f in mine.failures)
    if only_lost or not mine.failures:
        return replace(theirs, failures=theirs.failures + mine.failures)
    return replace(mine, final=mine.final or theirs.final, failures=mine.failures + theirs.failures)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
