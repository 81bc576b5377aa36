"""Losses: how much chance alone changes them, and whether a setting's loss stays within that. Free of torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from penstock.config.numerics import numerics_of
from penstock.config.plan import Plan
from penstock.ladder.arena import Arena
from penstock.ladder.contender import LossRun
from penstock.ladder.result import Equality, Noise, RungResult, Status
from penstock.ladder.rung import Rung, Setting
from penstock.ladder.statistics import Verdict

TOLERANCES = {"fp32": 1e-5, "bf16": 1.6e-2, "fp16": 1e-3}
"""Allowed relative difference between the losses of several processes and of one, by computing type: ranks add up
gradients in another order. For half types it is torch's own tolerance; for fp32 it allows for losses after some steps,
where 3e-7 was measured."""
DEVIATIONS = 2.0
"""A setting counts as giving the same results if its loss is within this many standard deviations over seeds."""
NO_GAIN: dict[Verdict, str] = {
    "slower": "slower", "same": "no difference", "open": "no clear gain", "faster": "",
}  # fmt: skip
"""Reason why a rung with this verdict is not kept."""
UNPROVEN = "part of the Plan, though its own gain is within the noise"
WORTH = "its step is within the noise, but the Plan is surely slower without it"


def judged(result: RungResult, rung: Rung, verdict: Verdict) -> tuple[Status, str]:
    """The status, and its reason, of a rung that was measured on top of the best setting."""
    if not rung.carried:
        return "reported", "measured for comparison, not built upon"
    if any(not math.isfinite(loss) for loss in result.losses):
        return "not kept", "its loss became infinite or NaN"
    if result.equality is not None and not result.equality.holds:
        return "not kept", "its results differ from those of one process"
    change, allowed = result.loss_difference, result.allowed_difference
    if rung.results == "rounding" and change is not None and allowed is not None and abs(change) > allowed:
        return "not kept", "its loss differs by more than seeds and rounding explain"
    if verdict != "faster":
        return "not kept", NO_GAIN[verdict]
    return ("kept" if rung.searched else "offered"), ""


def tail_mean(curve: Sequence[float]) -> float:
    """Mean over the last quarter: the loss of a single step mostly depends on its samples."""
    tail = curve[-max(1, len(curve) // 4) :]
    return sum(tail) / len(tail)


def equality(plan: Plan, ranks: LossRun, alone: LossRun) -> Equality:
    """Losses and gradient norms of several processes under `plan`, compared with those of one process."""
    return Equality(
        steps=len(ranks.losses), loss=_largest_difference(ranks.losses, alone.losses),
        norm=_largest_difference(ranks.norms, alone.norms) if ranks.norms and alone.norms else None,
        tolerance=TOLERANCES[numerics_of(plan).compute],
    )  # fmt: skip


def _largest_difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    """Largest relative difference; infinite where only one value is finite (a loss scale may skip a step in both)."""
    worst = 0.0
    for a, b in zip(losses, expected, strict=True):
        if math.isfinite(a) != math.isfinite(b):
            return math.inf
        if math.isfinite(a):
            worst = max(worst, abs(a - b) / max(abs(b), 1e-12))
    return worst


SHARE = 0.15
"""Share of the budget that loss runs may take before rungs that change results are tried."""
LEAST_STEPS = 8
"""Loss runs of fewer steps say nothing and are left out."""


class Losses:
    """The losses of one climb: from loss runs made when first needed, or from the steps that were timed."""

    def __init__(self, arena: Arena, steps: int, seed: int, seeds: int, budget: float) -> None:
        self.arena, self.seed = arena, seed
        self.steps = steps
        self.notes: list[str] = []
        self._seeds, self._budget = seeds, budget
        self._noise: Noise | None = None
        self._grow = not arena.contenders.loss_runs
        """Whether losses come from timed steps, so that curves grow with every turn."""
        self._curves: dict[Setting, tuple[float, ...]] = {}

    @property
    def noise(self) -> Noise | None:
        """The baseline's loss under several seeds; None if no losses are compared."""
        if self.steps and (self._noise is None or self._grow):
            self._fit()
        if self.steps and (self._noise is None or self._grow):
            seeds = range(self.seed, self.seed + self._seeds + 1)
            curves = [self.arena.trained(self.arena.baseline, seed, self.steps).losses for seed in seeds]
            length = min(map(len, curves))
            if self._grow and length < LEAST_STEPS:
                return None
            self._curves[self.arena.baseline] = tuple(curves[0])
            self._noise = noise_of(seeds, [curve[:length] for curve in curves])
        return self._noise

    @property
    def noise_if_run(self) -> Noise | None:
        """`noise` if it has been measured; measures nothing."""
        return self._noise

    def curve(self, setting: Setting) -> tuple[float, ...]:
        """Losses of a setting, step by step; empty if no losses are compared, or if the baseline's are not finite."""
        if self.noise is None or not all(map(math.isfinite, self.noise.curves[0])):
            return ()
        if setting not in self._curves or self._grow:
            self._curves[setting] = tuple(self.arena.trained(setting, self.seed, self.steps).losses)
        return self._curves[setting]

    def known(self, setting: Setting) -> tuple[float, ...]:
        """Losses of a setting that are already measured; empty if none are."""
        return self._curves.get(setting, ())

    def difference(self, setting: Setting) -> float | None:
        """Loss minus the baseline's, from the same weights and samples; None if it was not run."""
        noise = self._noise_beside(setting)
        if noise is None:
            return None
        return tail_mean(self.known(setting)[: len(noise.curves[0])]) - noise.losses[0]

    def steps_to_loss(self, setting: Setting) -> int | None:
        """Steps until the loss, as a mean over a quarter of the run, falls to the baseline's final loss; None if it was
        not run or stays above."""
        curve, width = self.known(setting), max(1, self.steps // 4)
        if self._noise is None or self._grow:
            return None
        ends = range(width, len(curve) + 1)
        return next(
            (end for end in ends if sum(curve[end - width : end]) / width <= self._noise.losses[0]), None
        )

    def allowed(self, setting: Setting) -> float | None:
        """Largest loss difference that chance explains; for timed steps also the rounding of the type."""
        noise = self._noise_beside(setting)
        if noise is None:
            return None
        rounding = TOLERANCES[numerics_of(setting.plan).compute] if self._grow else 0.0
        return max(DEVIATIONS * noise.deviation, rounding * abs(noise.losses[0]))

    def _noise_beside(self, setting: Setting) -> Noise | None:
        """The baseline's losses over as many steps as the setting has, if the baseline has enough."""
        curve, noise = self.known(setting), self._noise
        if noise is None or len(curve) >= len(noise.curves[0]):
            return noise if curve else None
        if len(curve) < LEAST_STEPS:
            return None
        return noise_of(noise.seeds, [seed_curve[: len(curve)] for seed_curve in noise.curves])

    def within_noise(self, setting: Setting) -> bool | None:
        """Whether chance explains the loss difference; None if it was not run."""
        change, allowed = self.difference(setting), self.allowed(setting)
        return None if change is None or allowed is None else abs(change) <= allowed  # False for NaN

    def seconds(self, setting: Setting) -> float:
        """Seconds that the loss run of a setting takes; 0 if it was already run."""
        if setting in self._curves or self._grow:
            return 0.0
        return self.steps * self.arena.step_seconds.get(setting, 0.0)

    def _fit(self) -> None:
        """Shorten all loss runs equally, so that they fit into their share of the budget."""
        if self._grow:
            return
        step = self.arena.step_seconds[self.arena.baseline]
        affordable = int(SHARE * self._budget / ((self._seeds + 3) * step))
        if affordable < self.steps:
            wished, self.steps = self.steps, affordable if affordable >= LEAST_STEPS else 0
            length = f"to {self.steps} steps" if self.steps else "to none"
            self.notes.append(f"The budget shortened loss runs from {wished} steps {length}.")


def noise_of(seeds: Sequence[int], curves: Sequence[Sequence[float]]) -> Noise:
    """Mean final losses of these curves of the baseline, and how much they differ between seeds."""
    last = tuple(tail_mean(curve) for curve in curves)
    return Noise(
        seeds=tuple(seeds), losses=last, curves=tuple(map(tuple, curves)), deviation=statistics.stdev(last)
    )
