"""The results of a climb as plain data: free of torch, and ready for JSON.

Every speed and ratio is of one joint estimate over all rounds of the run (`ladder.statistics`), so that the steps of
the path multiply to the total, and a figure is the same wherever it is shown.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.report.page import cell

Status = Literal[
    "baseline", "kept", "unproven", "not kept", "offered", "reported", "unsupported", "out of memory", "failed",
    "not run",
]  # fmt: skip
"""`kept`: part of the Plan with the same results, and faster beyond the noise. `unproven`: part of a Plan that is
faster as a whole, while the interval of its own gain holds 1. `not kept`: measured, and it does not pay. `offered`: it
changes results and pays, and is part of the fastest Plan only. `reported`: measured, and no Plan takes it by its
nature. The others have no measurement, and a reason."""

MEASURED: tuple[Status, ...] = ("baseline", "kept", "unproven", "not kept", "offered", "reported")

Results = Literal["same", "rounding", "other"]
"""Effect on results: `same` but for the order of sums; the same within the noise of seeds, as with mixed precision and
fp32 masters (`rounding`), which is measured; or `other` (a larger batch, no masters)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A ratio or a speed, with an interval that holds at whatever round the measuring stopped."""

    value: float
    low: float
    high: float
    rounds: int = 1
    """Rounds that were measured of it; of a ratio, those in which both took turns or were tied by others."""

    @classmethod
    def exact(cls, value: float) -> Estimate:
        """An estimate that needs no measuring, as the ratio of a setting to itself."""
        return cls(value=value, low=value, high=value)

    def times(self, factor: float) -> Estimate:
        """The estimate in another unit."""
        return dataclasses.replace(
            self, value=self.value * factor, low=self.low * factor, high=self.high * factor
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The planner's prediction for a rung, made before it was measured."""

    samples_per_second: float | None = None
    to_previous: float
    """Predicted gain over the setting that the rung builds on, in what the rung is compared by."""
    to_baseline: float
    corrected: float
    """`to_baseline`, corrected by what had been measured of other settings before."""
    memory_bytes: int | None = None
    mfu: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of one step, by part; this and the others are known of a model only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Equality:
    """Several processes against one that takes the same samples in the same order, from the same weights."""

    steps: int
    loss: float
    """Largest relative difference of the losses; infinite where one of the two is no finite number."""
    norm: float | None
    """Largest relative difference of the gradients' norms, where these were taken."""
    tolerance: float
    """Largest difference allowed for losses, for the type that the plan computes in; for norms ten times that."""

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
    """The Plan it was measured under, as a line: up to here on the path, or the best Plan with this rung added."""
    model: dict[str, Any] = field(default_factory=dict)
    """Fields of the model and the data that differ from the baseline's."""
    results: Results = "same"
    compared_by: str = "samples"
    forecast: Forecast | None = None
    samples_per_second: Estimate | None = None
    model_flops_per_second: Estimate | None = None
    to_previous: Estimate | None = None
    """Speed against the setting before: the rung below on the path, or the Plan that this rung was put on top of. The
    steps of the path multiply to the last one's `to_baseline`."""
    to_baseline: Estimate | None = None
    worth: Estimate | None = None
    """Speed of the best Plan against the same without this rung: what it is worth in the end. Of kept rungs."""
    processor_to_baseline: Estimate | None = None
    """`to_baseline` in processor time, which others on the machine change less; on a CPU only."""
    interleaved: bool = True
    """False where memory did not hold both contenders at once, so that they were timed one after the other."""
    memory_bytes: int | None = None
    """Peak bytes of the fullest process."""
    memory_by_rank: tuple[int, ...] = ()
    """Peak bytes of each process, where there are several."""
    equality: Equality | None = None
    """Whether a rung's several processes compute what one does."""
    compile_seconds: float | None = None
    losses: tuple[float, ...] = ()
    loss: float | None = None
    """Mean over the last quarter of the loss run; loss runs are made where results may change."""
    loss_difference: float | None = None
    """`loss` less the baseline's, from the same weights and the same order of samples."""
    allowed_difference: float | None = None
    """Largest loss difference that chance and, of a script, the rounding of its type explain."""
    steps_to_loss: int | None = None
    """Steps of the loss run until its loss is down to the baseline's at the end; None where it stays above."""
    seconds_to_loss: float | None = None
    """The time that these steps take."""

    @property
    def measured(self) -> bool:
        """Whether there are figures."""
        return self.status in MEASURED


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A whole setting that the search measured."""

    plan: str
    model: dict[str, Any]
    predicted: float
    """Speed to the baseline's by the planner alone."""
    corrected: float
    """`predicted`, corrected by what had been measured before the setting was built."""
    to_baseline: Estimate
    compile_seconds: float | None
    build_seconds: float
    """Seconds from the start of building to the end of warming up, compiling included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """The baseline built twice: whatever differs between the two is noise."""

    ratio: Estimate
    processor_ratio: Estimate | None
    """Ratio in processor time; on a CPU only."""
    floor: float
    """The noise floor: two settings are called different only if the interval of their ratio leaves 1 ± this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """How much the baseline's loss changes from seed to seed: weights and order of samples both drawn again."""

    seeds: tuple[int, ...]
    losses: tuple[float, ...]
    """Mean over the last quarter of each seed's loss run."""
    curves: tuple[tuple[float, ...], ...]
    deviation: float
    """Standard deviation of `losses`, of a sample (n - 1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A Plan that the ladder ends with."""

    plan: str
    """The Plan as a line."""
    model: dict[str, Any]
    """Fields of the model and the data that it changes."""
    rungs: tuple[str, ...]
    """Names of the rungs that it consists of, in the order of the path."""
    train_command: str
    """The command that trains with it, or the Python call for a model of one's own."""
    speedup: Estimate
    """Speed over the baseline's."""
    samples_per_second: Estimate | None
    """None where not even the baseline took a step."""
    predicted: float | None
    """`speedup` as the planner alone predicts it; None of a script with operators that it does not know."""
    memory_bytes: int | None
    loss_difference: float | None
    """The loss less the baseline's; none where no losses were run."""
    within_noise: bool | None
    """Whether that is at most two standard deviations over seeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest:
    """The most promising Plan of a climb that found none to be faster than the baseline beyond the noise."""

    plan: str
    ratio: Estimate
    """Speed over the baseline's; its interval holds 1, or lies below."""
    budget: float | None
    """Seconds after which a climb should tell this gain from none; None where no reasonable time does."""

    @property
    def width(self) -> float:
        """Gain that a Plan must have had to be told from the baseline, as a ratio less one."""
        return self.ratio.high / self.ratio.value - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderReport:
    """A whole climb."""

    title: str
    """The model that was climbed with."""
    unit: str
    """Name of samples: images, or samples."""
    rungs: tuple[RungResult, ...]
    """The baseline first, then what is kept, in the order of the path, then the others in the order of the ladder."""
    same: Chosen
    """The fastest Plan with the same results."""
    fastest: Chosen | None
    """The fastest Plan of all, where one that changes results is faster."""
    control: Control | None
    """The baseline against itself; None where only it was measured, or where steps are too long for this."""
    tried: tuple[Tried, ...]
    """Every setting that was measured with one process, the fastest first."""
    candidates: int
    """Combinations of rungs that keep results, those that are not legal among them."""
    noise: Noise | None
    batch: int | None
    """Samples of a micro-batch of the baseline; None of a script, which has its own."""
    rounds: int
    """The least rounds before a difference under 5 % is believed."""
    loss_steps: int
    machine: dict[str, Any]
    """The Machine that predictions were made with."""
    environment: dict[str, Any]
    """Machine and software of the measurement; see `penstock.report.record`."""
    command: str
    """The command that makes this report again."""
    wall_seconds: float
    others_busy: float | None = None
    """Cores that other processes kept busy on average while this measured; none where it cannot be known."""
    procs: int = 1
    """Processes that rungs of several had, or ranks of a script."""
    script: dict[str, Any] | None = None
    """Facts about the script that was tuned; None of a model."""
    nearest: Nearest | None = None
    """The Plan that came closest, where none is faster than the baseline beyond the noise."""
    notes: tuple[str, ...] = ()

    @property
    def baseline(self) -> RungResult:
        """The rung that everything is compared with."""
        return self.rungs[0]

    @property
    def best(self) -> RungResult:
        """The last rung of the path, whose Plan is the best with the same results; the baseline if nothing paid."""
        return [self.baseline, *(rung for rung in self.rungs if rung.name in self.same.rungs)][-1]

    @property
    def speedup(self) -> float:
        """Speed of the best Plan with the same results over the baseline's."""
        return self.same.speedup.value

    @property
    def plan(self) -> str:
        """The best Plan with the same results, as a line."""
        return self.same.plan

    @property
    def train_command(self) -> str:
        """The command that trains with it."""
        return self.same.train_command

    def _repr_html_(self) -> str:
        """HTML for a notebook: the same figures as the page."""
        return cell(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values; `speedup`, `plan` and `train_command` are those of `same`."""
        values = dataclasses.asdict(self)
        return values | {"speedup": self.speedup, "plan": self.plan, "train_command": self.train_command}


Phase = Literal["baseline", "search", "losses", "top", "path", "apart", "race"]
"""`search`: settings are built and the slow ones dropped. `top`: each optimisation is taken away from the best Plan,
and each that it lacks is put on. `path`: the rungs from the baseline to it. `apart`: what changes results. `race`:
first and last once more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Current activity of a climb, reported before it begins."""

    phase: Phase
    doing: Literal["building", "compiling", "timing", "training", "weighing"]
    what: str
    """The subject in words: the rung's title, or the Plan's line."""
    plans: tuple[str, ...]
    """Lines of the Plans that take part."""
    expected_seconds: float
    """How long this one thing should take; 0 where nobody knows."""
    spent: float
    """Seconds since the start."""
    budget: float
    """Seconds that the whole may take."""
    standings: tuple[tuple[str, Estimate], ...]
    """Plans measured so far with their speed to the baseline's, the fastest first."""
