"""The contenders of a climb, one for each setting, and the object that builds them. Free of torch.

`ladder.measure` builds settings of a model, in this process or on ranks that it starts; `tune.script` runs a script
under each setting, in a process of its own. Rounds, noise, verdicts, losses and report are the same for both.
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
    """Processor time of all threads of all its processes; None if unknown."""


@dataclass(frozen=True, slots=True)
class LossRun:
    """Result of a few training steps: losses over all ranks, and gradient norms if they were recorded."""

    losses: list[float]
    norms: list[float]


class ContenderEnded(PenstockError):
    """A contender has ended, and cannot take the steps that were requested."""

    def __init__(self, status: str, why: str) -> None:
        """`status` is one that a report knows; any other counts as a failure. `why` is the reason."""
        super().__init__(why)
        self.status, self.why = status, why


class Contender(Protocol):
    """One setting, built and warm."""

    step_seconds: float
    """Seconds of a step of the slowest process, as last measured."""
    compile_seconds: float | None
    """Extra seconds of the first steps over later ones; None if nothing was compiled."""

    @property
    def alive(self) -> bool:
        """Whether the processes that hold it still run."""

    def timed(self, least_seconds: float) -> Timing:
        """One timing of at least `least_seconds`."""

    def memory(self) -> list[int]:
        """Peak bytes of one step, by rank; an empty list if unknown."""

    def close(self) -> None:
        """Release everything that it holds."""


class Contenders(ABC):
    """Builds the contenders of a climb, and knows the work of one step of each."""

    title: str
    unit: str
    """Name of samples: images, samples, or steps."""
    first: Setting
    """The baseline."""
    shares_gpu = False
    """Whether all contenders share the memory of one GPU."""
    control_rounds: int
    control_share: float
    """Rounds of the baseline against itself, and the share of the budget that they may take."""
    most_rounds: int
    """Rounds after which a race ends, decided or not."""
    loss_runs: bool
    """Whether losses come from separate loss runs; otherwise from the steps that were timed."""
    shorter: str
    """Advice in words on how to make steps shorter, for when too few fit into the budget."""

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
        """The planner's forecast for a setting, relative to `before` and to the baseline; None without a planner.
        `corrected` is a better estimate of the speed relative to the baseline."""

    @abstractmethod
    def train_command(self, setting: Setting) -> str:
        """The command, or the Python call, that trains with a setting."""

    @abstractmethod
    def end(self) -> None:
        """End all processes."""

    def room(self, setting: Setting) -> int:
        """Number of contenders like this one that fit into memory, at least two."""
        return sys.maxsize

    def form(self, setting: Setting) -> Hashable:
        """How the allocator treats freed memory, if settings share a process; changing this costs an untimed step."""
        return None

    def slower(self, setting: Setting, before: Setting) -> float:
        """Expected time of a step of a setting, as a multiple of a step of `before`."""
        return 1.0

    def samples(self, setting: Setting) -> float:
        """Samples of one optimizer step over all processes, counted in samples of the baseline."""
        return 1.0

    def model_flops(self, setting: Setting) -> int | None:
        """FLOPs of one optimizer step over all processes; None if unknown."""
        return None
