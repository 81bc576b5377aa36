"""Every error a user can meet, and the exit code each ends a command with.

Codes are a contract with schedulers and scripts: 75 (`EX_TEMPFAIL`) asks Slurm and friends to requeue, 2 says
"fix the configuration", 5 says "no checkpoint can be trusted". Messages are whole sentences: what is wrong, where,
and what to do next.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum


class ExitCode(IntEnum):
    """What the process returns to the shell."""

    DONE = 0
    CONFIG = 2
    ENVIRONMENT = 3
    DATA = 4
    CHECKPOINT = 5
    NUMERIC = 6
    OUT_OF_MEMORY = 7
    HANG = 8
    SAVED_REQUEUE = 75


class PenstockError(Exception):
    """Base of all errors that are the user's to fix. `exit_code` is what the command line returns."""

    exit_code: ExitCode = ExitCode.CONFIG


class ConfigError(PenstockError):
    """A configuration that cannot be: unknown key, bad value, or a Plan that contradicts its model or machine.

    `problems` holds every problem found, so that all can be mended at once.
    """

    exit_code = ExitCode.CONFIG

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class EnvironmentProblem(PenstockError):
    """The machine or installation lacks something: a package, a device, a compiler. Says how to get it."""

    exit_code = ExitCode.ENVIRONMENT


class DataError(PenstockError):
    """A data set that cannot be read or breaks the chosen policy (for example more than 1 % bad images)."""

    exit_code = ExitCode.DATA


class CheckpointError(PenstockError):
    """No checkpoint that can be trusted: missing, truncated, or changed since it was written."""

    exit_code = ExitCode.CHECKPOINT


class NumericError(PenstockError):
    """Training left the finite numbers."""

    exit_code = ExitCode.NUMERIC


class OutOfMemory(PenstockError):
    """The device's memory did not suffice; says what would make it fit."""

    exit_code = ExitCode.OUT_OF_MEMORY


class HangError(PenstockError):
    """A process stopped making progress."""

    exit_code = ExitCode.HANG


class SavedRequeue(PenstockError):
    """The run was asked to stop, saved its state, and wants to be started again."""

    exit_code = ExitCode.SAVED_REQUEUE
