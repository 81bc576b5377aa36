"""The outcome of tuning a script, as plain data. Free of torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from penstock.ladder.result import Estimate, Nearest, Status
from penstock.tune.facts import Facts


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneStep:
    """One rung, applied to the script under the settings that had proved faster before."""

    name: str
    title: str
    status: Status
    reason: str = ""
    line: str = ""
    """All settings that it was measured under, as a Plan's line."""
    before: str = ""
    """The settings that it was put on top of."""
    ratio: Estimate | None = None
    """Speed against these."""
    to_baseline: Estimate | None = None
    """Speed against the script as it is."""
    predicted: float | None = None
    """The planner's speed of this rung alone against the script as it is; none of a model that it cannot follow, and
    where what a rung leaves out is not known."""
    memory_bytes: int | None = None
    """Peak bytes on a GPU."""
    compile_seconds: float | None = None
    """Seconds that the first steps took longer than later ones, where anything was compiled."""
    loss_difference: float | None = None
    """The loss of the same steps, less that of the script as it is on the same seed."""
    allowed_difference: float | None = None
    """The part of that which chance and the rounding of its type explain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneReport:
    """The fastest settings for a script, and each that was tried."""

    script: str
    facts: Facts
    step_seconds: float
    """Seconds of a step of the script as it is."""
    floor: float
    """Ratio, less one, by which two processes of the script as it is may differ."""
    steps: tuple[TuneStep, ...]
    """Rungs of the fastest line in the order in which they were taken, and then the others."""
    line: str
    """The fastest settings with the same results; empty where nothing is faster beyond the noise."""
    speedup: Estimate
    command: str
    """The command that runs the script under them."""
    fastest: tuple[str, Estimate, str] | None = None
    """Line, speed and command of settings that are faster still and change results."""
    nearest: Nearest | None = None
    """The most promising settings where nothing is faster beyond the noise."""
    losses: tuple[float, ...] = ()
    """The script's loss on each seed, over the steps that were compared."""
    machine: dict[str, Any] = dataclasses.field(default_factory=dict)
    wall_seconds: float = 0.0
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        return dataclasses.asdict(self)
