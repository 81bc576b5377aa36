"""Contenders of a climb, each built under one setting, and whoever builds them. Free of torch.

A climb is over a model, in this process or on ranks that it starts (`models`), or over a script, in processes of its
own (`penstock.tune.script`). All else is the same: rounds, noise, verdicts, losses, the last race and the report.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

from penstock.errors import PenstockError
from penstock.ladder.result import Forecast
from penstock.ladder.rung import Setting


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds per step."""

    wall: float
    processor: float | None
    """Processor time of all threads of all its processes; None where nobody knows."""


@dataclass(frozen=True, slots=True)
class LossRun:
    """Result of some steps of training: losses over all ranks, and gradient norms where they were taken."""

    losses: list[float]
    norms: list[float]


class ContenderEnded(PenstockError):
    """A contender is over, though more steps were asked for."""

    def __init__(self, status: str, why: str) -> None:
        """`status` is that of the report, or why it ended early, which counts as a failure."""
        super().__init__(why)
        self.status, self.why = status, why


class Contender(Protocol):
    """One setting, built and warm."""

    step_seconds: float
    """As last measured, of the slowest process."""
    compile_seconds: float | None
    """Seconds that the first steps took longer than later ones, where anything was compiled."""

    @property
    def alive(self) -> bool:
        """Whether the processes that hold it are still there."""

    def timed(self, least_seconds: float) -> Timing:
        """One timing of at least `least_seconds`."""

    def memory(self) -> list[int]:
        """Peak bytes of one step, by rank; none where they are not known."""

    def close(self) -> None:
        """Let go of all that it holds."""


class Contenders(ABC):
    """Whoever builds the contenders of a climb, and knows what a step of each is worth."""

    title: str
    unit: str
    """Name of samples: images, samples, or steps."""
    first: Setting
    """The baseline."""
    shares_gpu = False
    """Whether all contenders have the memory of one GPU."""
    control_rounds: int
    control_share: float
    """Rounds of the baseline against itself, and the share of the budget that they may take."""
    most_rounds: int
    """Rounds after which a race ends, decided or not."""
    loss_runs: bool
    """Whether losses are those of runs for them alone; else of the steps that were timed."""
    shorter: str
    """How steps become shorter, in words, where too few fit into the budget."""

    @abstractmethod
    def contend(self, setting: Setting) -> Contender:
        """Build a setting. Raises whatever building raises."""

    @abstractmethod
    def trained(self, setting: Setting, seed: int, steps: int) -> LossRun:
        """Losses of the first steps from a seed."""

    @abstractmethod
    def forecast(
        self, setting: Setting, before: Setting, by: str = "samples", corrected: float | None = None
    ) -> Forecast | None:
        """The planner's forecast for a setting against the one before it and the baseline, if it has one; `corrected`
        is the better ratio to the baseline."""

    @abstractmethod
    def train_command(self, setting: Setting) -> str:
        """How to train with a setting."""

    @abstractmethod
    def end(self) -> None:
        """End all processes."""

    def room(self, setting: Setting) -> int:
        """How many contenders like this one fit into memory, at least two."""
        return sys.maxsize

    def form(self, setting: Setting) -> Hashable:
        """The form of host memory of the process that holds it, if several share one: a change of it costs a step."""
        return None

    def slower(self, setting: Setting, before: Setting) -> float:
        """How many times as long a step of a setting is expected to take."""
        return 1.0

    def samples(self, setting: Setting) -> float:
        """Samples of one optimizer step, over all processes, in samples of the baseline."""
        return 1.0

    def model_flops(self, setting: Setting) -> int | None:
        """FLOPs of one optimizer step over all processes, where they are known."""
        return None
