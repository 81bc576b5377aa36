"""The errors that users can meet, and the exit codes with which they end a command.

Schedulers and scripts rely on these codes: 75 (`EX_TEMPFAIL`) asks Slurm and similar programs to requeue, 2
means "fix the configuration", 5 means "no checkpoint can be trusted". Messages are whole sentences: what is
wrong, where, and what to do next.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of the process."""

    DONE = 0
    CONFIG = 2
    ENVIRONMENT = 3
    DATA = 4
    CHECKPOINT = 5
    NUMERIC = 6
    OUT_OF_MEMORY = 7
    HANG = 8
    NOTHING_APPLIED = 9
    SAVED_REQUEUE = 75
    INTERRUPTED = 130


class PenstockError(Exception):
    """Base of all errors that a user can fix. `exit_code` is what the command line returns."""

    exit_code: ExitCode = ExitCode.CONFIG


class ConfigError(PenstockError):
    """An invalid configuration: unknown key, bad value, or a Plan that contradicts its model or machine.

    `problems` holds every problem found, so that all can be fixed at once.
    """

    exit_code = ExitCode.CONFIG

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class EnvironmentProblem(PenstockError):
    """The machine or installation lacks something: a package, a device, a compiler. The message says how to
    get it."""

    exit_code = ExitCode.ENVIRONMENT


class DataError(PenstockError):
    """A data set that cannot be read or breaks the chosen policy (for example more than 1 % bad images)."""

    exit_code = ExitCode.DATA


class NoValidation(DataError):
    """Data are too few, or too alike, to set some apart for validation; they can still be used for training."""


class CheckpointError(PenstockError):
    """No checkpoint can be trusted: it is missing, truncated, or was changed after it was written."""

    exit_code = ExitCode.CHECKPOINT


class NumericError(PenstockError):
    """Training produced numbers that are not finite."""

    exit_code = ExitCode.NUMERIC


class OutOfMemory(PenstockError):
    """The device ran out of memory. The message says what would fit."""

    exit_code = ExitCode.OUT_OF_MEMORY


class Hang(PenstockError):
    """Another rank did not answer within the time limit. The message says where this rank waited."""

    exit_code = ExitCode.HANG


class SavedRequeue(PenstockError):
    """The run was asked to stop, saved its state, and should be started again."""

    exit_code = ExitCode.SAVED_REQUEUE


class SavedInterrupt(SavedRequeue):
    """The run was interrupted by Ctrl-C and saved its state. No scheduler is asked to start it again."""

    exit_code = ExitCode.INTERRUPTED


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether Python's or torch's allocator failed. torch's CPU allocator raises a plain RuntimeError."""
    names = {cls.__name__ for cls in type(error).__mro__}
    return not names.isdisjoint(_MEMORY_ERRORS) or "can't allocate memory" in str(error)


_MEMORY_ERRORS = ("MemoryError", "OutOfMemoryError", "OutOfMemory")
"""Errors of Python, torch and Penstock, by name, because nothing here imports torch."""
