"""The results of a climb as plain data: free of torch, and ready for JSON."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal[
    "baseline", "kept", "not kept", "reported", "unsupported", "out of memory", "failed", "not run"
]
"""`kept`: it pays, and later rungs build on it. `not kept`: it was measured, and does not pay. `reported`: it was
measured, and no rung builds on it by its nature. The others have no measurement, and a reason."""

MEASURED: tuple[Status, ...] = ("baseline", "kept", "not kept", "reported")

PAYS_FROM = 1.01
"""A rung pays when the median of its ratios is at least this, and above 1 by `STANDARD_ERRORS`."""
STANDARD_ERRORS = 2.0
_ERROR_OF_MEDIAN = 0.93
"""Standard error of a median, in quartile distances over the root of the count, for normal noise: 1.2533 / 1.349."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median and quartiles over the interleaved rounds."""

    median: float
    low: float
    high: float
    count: int = 1

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value; quartiles are interpolated between order statistics."""
        if len(values) == 1:
            return cls(median=values[0], low=values[0], high=values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median=median, low=low, high=high, count=len(values))

    @property
    def error(self) -> float:
        """Standard error of the median, judged by the quartiles."""
        return _ERROR_OF_MEDIAN * (self.high - self.low) / math.sqrt(self.count)

    def pays(self) -> bool:
        """Whether ratios with this spread are a gain, by the rule of `PAYS_FROM`."""
        return self.median >= PAYS_FROM and self.median - 1.0 > STANDARD_ERRORS * self.error

    def undecided(self) -> bool:
        """Whether they would be a gain if only they scattered less: a case for more rounds."""
        return self.median >= PAYS_FROM and not self.pays()


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The planner's prediction for a rung, made before it was measured."""

    samples_per_second: float
    to_previous: float
    """Predicted gain over the setting that the rung builds on, in what the rung is compared by."""
    to_baseline: float
    memory_bytes: int
    mfu: float
    seconds: dict[str, float]
    """Of one step, by part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Equality:
    """Several processes against one that takes the same samples in the same order, from the same weights."""

    steps: int
    loss: float
    """Largest relative difference of the losses; infinite where one of the two is no finite number."""
    norm: float | None
    """The same of the gradients' norms, where these were taken."""
    tolerance: float
    """What is allowed of losses, for the type that the plan computes in; of norms ten times that."""

    @property
    def holds(self) -> bool:
        """Whether both are within what is allowed."""
        return self.loss <= self.tolerance and (self.norm is None or self.norm <= 10 * self.tolerance)


@dataclass(frozen=True, slots=True, kw_only=True)
class RungResult:
    """One rung: its prediction, its measurements and its status."""

    name: str
    title: str
    why: str
    status: Status
    reason: str = ""
    """Why there is no measurement, or why it was not kept."""
    plan: str = ""
    """The Plan it was measured under, as a line."""
    model: dict[str, Any] = field(default_factory=dict)
    """Fields of the model that differ from the baseline's."""
    changes_numerics: bool = False
    compared_by: str = "samples"
    forecast: Forecast | None = None
    samples_per_second: Spread | None = None
    model_flops_per_second: Spread | None = None
    baseline_samples_per_second: float | None = None
    """The baseline's median in the same rounds: a machine may have been quicker or slower by then."""
    to_previous: Spread | None = None
    """Median of the paired ratios to the best setting so far, in what the rung is compared by."""
    to_baseline: Spread | None = None
    interleaved: bool = True
    """False where memory did not hold both contenders at once, so that they were timed one after the other."""
    memory_bytes: int | None = None
    """Of the fullest process."""
    memory_by_rank: tuple[int, ...] = ()
    """The same of each process, where there are several."""
    equality: Equality | None = None
    """Of a rung of several processes: whether they compute what one does."""
    compile_seconds: float | None = None
    losses: tuple[float, ...] = ()
    loss: float | None = None
    """Mean over the last quarter of the loss run."""
    loss_difference: float | None = None
    """`loss` less the baseline's, from the same weights and the same order of samples."""
    wall_seconds: float = 0.0
    """Seconds that measuring it took in all."""

    @property
    def measured(self) -> bool:
        """Whether there are figures."""
        return self.status in MEASURED


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """How much the baseline's loss changes from seed to seed: weights and order of samples both drawn anew."""

    seeds: tuple[int, ...]
    losses: tuple[float, ...]
    """Mean over the last quarter of each seed's loss run."""
    curves: tuple[tuple[float, ...], ...]
    deviation: float
    """Standard deviation of `losses`, of a sample (n - 1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderReport:
    """A whole climb."""

    title: str
    """What was climbed with."""
    unit: str
    """What a sample is: images, or samples."""
    alone: bool
    rungs: tuple[RungResult, ...]
    """The baseline first."""
    noise: Noise | None
    plan: str
    """The best Plan, as a line."""
    model: dict[str, Any]
    """Fields of the model that the best setting changes."""
    train_command: str
    """The command that trains with the best setting, or the Python call for a model of one's own."""
    batch: int
    """Samples of a micro-batch of the baseline."""
    rounds: int
    loss_steps: int
    machine: dict[str, Any]
    """The Machine that predictions were made with."""
    environment: dict[str, Any]
    """Where it was measured; see `penstock.report.record`."""
    command: str
    """The command that makes this report again."""
    wall_seconds: float
    procs: int = 1
    """Processes that rungs of several had."""
    notes: tuple[str, ...] = ()

    @property
    def baseline(self) -> RungResult:
        """What everything is compared with."""
        return self.rungs[0]

    @property
    def best(self) -> RungResult:
        """The highest rung that was kept; alone, the one of the highest gain; the baseline if nothing paid."""
        kept = [rung for rung in self.rungs if rung.status == "kept" and rung.to_baseline is not None]
        if not kept:
            return self.baseline
        if self.alone:
            return max(kept, key=lambda rung: rung.to_baseline.median if rung.to_baseline else 0.0)
        return kept[-1]

    @property
    def speedup(self) -> float:
        """Of the best setting over the baseline, measured in interleaved rounds."""
        return self.best.to_baseline.median if self.best.to_baseline else 1.0

    def outside_noise(self) -> tuple[RungResult, ...]:
        """Kept rungs whose loss differs from the baseline's by more than two standard deviations over seeds."""
        if self.noise is None:
            return ()
        return tuple(
            rung
            for rung in self.rungs
            if rung.status == "kept"
            and rung.loss_difference is not None
            and abs(rung.loss_difference) > 2 * self.noise.deviation
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        values = dataclasses.asdict(self)
        values["speedup"] = self.speedup
        values["best"] = self.best.name
        return values
