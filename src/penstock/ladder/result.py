"""The results of a climb as plain data: free of torch, and ready for JSON.

Every speed and ratio comes from one joint estimate over all rounds of the run (`ladder.statistics`). So the steps of
the path multiply to the total, and a figure is the same wherever it is shown.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.report.page import cell

Status = Literal[
    "baseline", "kept", "unproven", "not kept", "offered", "reported", "unsupported", "out of memory", "failed",
    "not run",
]  # fmt: skip
"""`kept`: part of the Plan with the same results, and faster beyond the noise. `unproven`: part of a Plan that is
faster as a whole, but the interval of its own gain includes 1. `not kept`: measured, and it does not pay. `offered`:
changes results and pays, and is part of the fastest Plan only. `reported`: measured for comparison, never part of a
Plan. All other statuses have a reason instead of a measurement."""

MEASURED: tuple[Status, ...] = ("baseline", "kept", "unproven", "not kept", "offered", "reported")

Results = Literal["same", "rounding", "other"]
"""Effect on results: `same` except for the order of sums; `rounding`, the same within the noise of seeds, as with mixed
precision and fp32 masters, which is measured; or `other` (a larger batch, no masters)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A ratio or a speed, with an interval that is valid whenever the measuring stops."""

    value: float
    low: float
    high: float
    rounds: int = 1
    """Rounds that measured it; for a ratio, rounds with both settings or linked to both through other settings."""

    @classmethod
    def exact(cls, value: float) -> Estimate:
        """An estimate that needs no measurement, such as the ratio of a setting to itself."""
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
    """Predicted gain over the setting that the rung builds on, in the unit of `Rung.compared_by`."""
    to_baseline: float
    corrected: float
    """`to_baseline`, corrected by earlier measurements of other settings."""
    memory_bytes: int | None = None
    mfu: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of one step, by part. Known for a model only, as are samples per second, memory and MFU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Equality:
    """Several processes compared with one that takes the same samples in the same order, from the same weights."""

    steps: int
    loss: float
    """Largest relative difference between the losses; infinite where exactly one of the two is not finite."""
    norm: float | None
    """Largest relative difference between the gradient norms, if these were recorded."""
    tolerance: float
    """Largest allowed difference between losses, for the Plan's computing type; ten times that for norms."""

    @property
    def holds(self) -> bool:
        """Whether both differences are allowed."""
        return self.loss <= self.tolerance and (self.norm is None or self.norm <= 10 * self.tolerance)


@dataclass(frozen=True, slots=True, kw_only=True)
class RungResult:
    """One rung: its prediction, its measurements and its status."""

    name: str
    title: str
    why: str
    status: Status
    reason: str = ""
    """Reason why there is no measurement, or why it was not kept."""
    plan: str = ""
    """The Plan it was measured under, as a line: the path up to this rung, or the best Plan with this rung added."""
    model: dict[str, Any] = field(default_factory=dict)
    """Fields of the model and the data that differ from the baseline's."""
    results: Results = "same"
    compared_by: str = "samples"
    forecast: Forecast | None = None
    samples_per_second: Estimate | None = None
    model_flops_per_second: Estimate | None = None
    to_previous: Estimate | None = None
    """Speed relative to the setting before: the rung below on the path, or the Plan that this rung was added to. The
    steps of the path multiply to the last one's `to_baseline`."""
    to_baseline: Estimate | None = None
    worth: Estimate | None = None
    """Speed of the best Plan relative to the same Plan without this rung; for kept rungs only."""
    processor_to_baseline: Estimate | None = None
    """`to_baseline` in processor time, which other programs on the machine disturb less; on a CPU only."""
    interleaved: bool = True
    """False if memory could not hold both contenders at once, so that they were timed one after the other."""
    memory_bytes: int | None = None
    """Peak bytes of the process with the highest peak."""
    memory_by_rank: tuple[int, ...] = ()
    """Peak bytes of each process, if there are several."""
    equality: Equality | None = None
    """Whether the rung's several processes compute the same as one process."""
    compile_seconds: float | None = None
    losses: tuple[float, ...] = ()
    loss: float | None = None
    """Mean over the last quarter of the loss run; loss runs are made if results may change."""
    loss_difference: float | None = None
    """`loss` minus the baseline's, from the same weights and the same order of samples."""
    allowed_difference: float | None = None
    """Largest loss difference that is explained by chance and, for a script, by the rounding of its type."""
    steps_to_loss: int | None = None
    """Steps of the loss run until its loss falls to the baseline's final loss; None if it stays above."""
    seconds_to_loss: float | None = None
    """The time that these steps take."""

    @property
    def measured(self) -> bool:
        """Whether it was measured."""
        return self.status in MEASURED


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A whole setting that the search measured."""

    plan: str
    model: dict[str, Any]
    predicted: float
    """Speed relative to the baseline, predicted by the planner alone."""
    corrected: float
    """`predicted`, corrected by the measurements made before the setting was built."""
    to_baseline: Estimate
    compile_seconds: float | None
    build_seconds: float
    """Seconds from the start of building to the end of warming up, including compiling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """The baseline built twice: whatever differs between the two is noise."""

    ratio: Estimate
    processor_ratio: Estimate | None
    """Ratio in processor time; on a CPU only."""
    floor: float
    """The noise floor: two settings are called different only if the interval of their ratio is outside 1 ± this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """How much the baseline's loss changes from seed to seed; each seed draws new weights and a new sample order."""

    seeds: tuple[int, ...]
    losses: tuple[float, ...]
    """Mean over the last quarter of each seed's loss run."""
    curves: tuple[tuple[float, ...], ...]
    deviation: float
    """Standard deviation of `losses`, as of a sample (n - 1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A Plan that the ladder recommends at its end."""

    plan: str
    """The Plan as a line."""
    model: dict[str, Any]
    """Fields of the model and the data that it changes."""
    rungs: tuple[str, ...]
    """Names of the rungs that it consists of, in the order of the path."""
    train_command: str
    """The command that trains with it, or the Python call for a user's own model."""
    speedup: Estimate
    """Speed relative to the baseline."""
    samples_per_second: Estimate | None
    """None if not even the baseline took a step."""
    predicted: float | None
    """`speedup` as the planner alone predicts it; None for a script with operators that the planner does not know."""
    memory_bytes: int | None
    loss_difference: float | None
    """The loss minus the baseline's; None if no losses were run."""
    within_noise: bool | None
    """Whether `loss_difference` is at most two standard deviations over seeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest:
    """The most promising Plan of a climb that found none faster than the baseline beyond the noise."""

    plan: str
    ratio: Estimate
    """Speed relative to the baseline; its interval includes 1, or is below it."""
    budget: float | None
    """Seconds after which a climb should distinguish this gain from none; None if that would take unreasonably long."""

    @property
    def width(self) -> float:
        """Least gain, as a ratio minus one, with which a Plan would have been found faster than the baseline."""
        return self.ratio.high / self.ratio.value - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderReport:
    """A whole climb."""

    title: str
    """Name of the model that was climbed with."""
    unit: str
    """Name of samples: images, or samples."""
    rungs: tuple[RungResult, ...]
    """The baseline first, then the kept rungs in the order of the path, then the others in the order of the ladder."""
    same_results: Chosen
    """The fastest Plan with the same results."""
    fastest: Chosen | None
    """The fastest Plan of all, if one that changes results is faster than `same_results`."""
    control: Control | None
    """The baseline against itself; None if only the baseline was measured, or if steps are too long for this."""
    tried: tuple[Tried, ...]
    """Every setting that was measured with one process, the fastest first."""
    candidates: int
    """Number of combinations of rungs that keep results, illegal ones included."""
    noise: Noise | None
    batch: int | None
    """Samples in a micro-batch of the baseline; None for a script, which has its own."""
    rounds: int
    """Least number of rounds before a difference under 5 % is believed."""
    loss_steps: int
    machine: dict[str, Any]
    """The Machine that predictions were made with."""
    environment: dict[str, Any]
    """Machine and software of the measurement; see `penstock.report.record`."""
    command: str
    """The command that repeats this climb."""
    wall_seconds: float
    others_busy: float | None = None
    """Cores that other processes kept busy on average during the climb; None if unknown."""
    procs: int = 1
    """Number of processes for the rungs with several, or of a script's ranks."""
    script: dict[str, Any] | None = None
    """Facts about the script that was tuned; None for a model."""
    nearest: Nearest | None = None
    """The Plan that came closest, if none is faster than the baseline beyond the noise."""
    notes: tuple[str, ...] = ()

    @property
    def same(self) -> Chosen:
        """The former name of `same_results`."""
        return self.same_results

    @property
    def baseline(self) -> RungResult:
        """The rung that everything is compared with."""
        return self.rungs[0]

    @property
    def best(self) -> RungResult:
        """The last rung of the path, whose Plan is the best with the same results; the baseline if nothing paid."""
        return [self.baseline, *(rung for rung in self.rungs if rung.name in self.same_results.rungs)][-1]

    @property
    def speedup(self) -> float:
        """Speed of the best Plan with the same results, relative to the baseline."""
        return self.same_results.speedup.value

    @property
    def plan(self) -> str:
        """The best Plan with the same results, as a line."""
        return self.same_results.plan

    @property
    def train_command(self) -> str:
        """The command that trains with it."""
        return self.same_results.train_command

    def _repr_html_(self) -> str:
        """HTML for a notebook: the same figures as the page."""
        return cell(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values, None for numbers that are infinite or NaN. `same_results` is named `same`;
        `speedup`, `plan` and `train_command` are repeated from it."""
        values = dataclasses.asdict(self)
        values["same"] = values.pop("same_results")
        values |= {"speedup": self.speedup, "plan": self.plan, "train_command": self.train_command}
        written: dict[str, Any] = json.loads(json.dumps(values), parse_constant=lambda infinite_or_nan: None)
        return written


Phase = Literal["baseline", "search", "losses", "top", "path", "apart", "race"]
"""`search`: settings are built and the slow ones dropped. `top`: each optimisation is removed from the best Plan, and
each that it lacks is added. `path`: the rungs from the baseline to it. `apart`: rungs that change results. `race`: the
first and the last setting once more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Current activity of a climb, reported before it begins."""

    phase: Phase
    doing: Literal["building", "compiling", "timing", "training", "weighing"]
    subject: str
    """The rung's title, or the Plan's line."""
    plans: tuple[str, ...]
    """Lines of the Plans that take part."""
    expected_seconds: float
    """Expected seconds of this one activity; 0 if unknown."""
    spent: float
    """Seconds since the climb's start."""
    budget: float
    """Seconds that the whole climb may take."""
    standings: tuple[tuple[str, Estimate], ...]
    """Plans measured so far with their speed relative to the baseline, the fastest first."""

    @property
    def what(self) -> str:
        """The former name of `subject`."""
        return self.subject
