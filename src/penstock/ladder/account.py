"""The figures of a climb's report: losses, forecasts and measurements of its settings. Free of torch.

Losses show how much chance alone changes them, and whether a setting's loss stays within that. Speeds come from the one
joint estimate over all rounds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from penstock.config.convert import plain
from penstock.config.numerics import numerics_of
from penstock.config.plan import Plan
from penstock.config.stack import Stack
from penstock.ladder.arena import Arena
from penstock.ladder.contender import LossRun
from penstock.ladder.result import Chosen, Equality, Estimate, Noise, RungResult, Status
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
        self.arena, self.steps, self.seed = arena, steps, seed
        self.notes: list[str] = []
        self.noise: Noise | None = None
        """The baseline's loss under several seeds; None until a setting is measured, and if no losses are compared."""
        self._seeds, self._budget = seeds, budget
        self._grow = not arena.contenders.loss_runs
        """Whether losses come from timed steps, so that curves grow with every turn."""
        self._curves: dict[Setting, tuple[float, ...]] = {}

    def measure(self, setting: Setting) -> None:
        """Measure the losses of a setting, and first those of the baseline under several seeds, unless they are known.
        Does nothing if no losses are compared, or if the baseline's are not finite."""
        if self._grow or self.noise is None:
            self._measure_noise()
        if self.noise is not None and (setting not in self._curves or self._grow):
            self._curves[setting] = tuple(self.arena.trained(setting, self.seed, self.steps).losses)

    def _measure_noise(self) -> None:
        if self.steps and not self._grow:
            self._shorten()
        if not self.steps:
            return
        seeds = range(self.seed, self.seed + self._seeds + 1)
        curves = [self.arena.trained(self.arena.baseline, seed, self.steps).losses for seed in seeds]
        length = min(map(len, curves))
        if not all(math.isfinite(loss) for curve in curves for loss in curve):
            self.noise, self.steps = None, 0
            self.notes.append("The baseline's loss became infinite or NaN, so that no losses were compared.")
        elif not self._grow or length >= LEAST_STEPS:
            self._curves[self.arena.baseline] = tuple(curves[0])
            self.noise = noise_of(seeds, [curve[:length] for curve in curves])

    def _shorten(self) -> None:
        """Shorten all loss runs equally, so that they fit into their share of the budget."""
        step = self.arena.step_seconds[self.arena.baseline]
        affordable = int(SHARE * self._budget / ((self._seeds + 3) * step))
        if affordable < self.steps:
            wished, self.steps = self.steps, affordable if affordable >= LEAST_STEPS else 0
            length = f"to {self.steps} steps" if self.steps else "to none"
            self.notes.append(f"The budget shortened loss runs from {wished} steps {length}.")

    def curve(self, setting: Setting) -> tuple[float, ...]:
        """Losses of a setting, step by step; empty if none were measured."""
        return self._curves.get(setting, ())

    def difference(self, setting: Setting) -> float | None:
        """Loss minus the baseline's, from the same weights and samples; None if it was not measured."""
        noise = self._noise_beside(setting)
        if noise is None:
            return None
        return tail_mean(self.curve(setting)[: len(noise.curves[0])]) - noise.losses[0]

    def steps_to_loss(self, setting: Setting) -> int | None:
        """Steps until the loss, as a mean over a quarter of the run, falls to the baseline's final loss; None if it was
        not measured or stays above."""
        curve, width = self.curve(setting), max(1, self.steps // 4)
        if self.noise is None or self._grow:
            return None
        ends = range(width, len(curve) + 1)
        return next(
            (end for end in ends if sum(curve[end - width : end]) / width <= self.noise.losses[0]), None
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
        curve, noise = self.curve(setting), self.noise
        if noise is None or len(curve) >= len(noise.curves[0]):
            return noise if curve else None
        if len(curve) < LEAST_STEPS:
            return None
        return noise_of(noise.seeds, [seed_curve[: len(curve)] for seed_curve in noise.curves])

    def within_noise(self, setting: Setting) -> bool | None:
        """Whether chance explains the loss difference; None if it was not measured."""
        change, allowed = self.difference(setting), self.allowed(setting)
        return None if change is None or allowed is None else abs(change) <= allowed  # False for NaN

    def seconds(self, setting: Setting) -> float:
        """Seconds that measuring the losses of a setting takes; 0 if they are known."""
        if setting in self._curves or self._grow:
            return 0.0
        return self.steps * self.arena.step_seconds.get(setting, 0.0)


def noise_of(seeds: Sequence[int], curves: Sequence[Sequence[float]]) -> Noise:
    """Mean final losses of these curves of the baseline, and how much they differ between seeds."""
    last = tuple(tail_mean(curve) for curve in curves)
    return Noise(
        seeds=tuple(seeds), losses=last, curves=tuple(map(tuple, curves)), deviation=statistics.stdev(last)
    )


class Account:
    """Forecasts and figures of the settings of one climb."""

    def __init__(self, arena: Arena, losses: Losses) -> None:
        self.arena, self.losses = arena, losses
        self.contenders = arena.contenders
        self.forecast = self.contenders.forecast
        self._memory: dict[Setting, list[int]] = {}

    @property
    def first(self) -> Setting:
        """The baseline."""
        return self.arena.baseline

    def weigh(self, setting: Setting) -> None:
        """Measure the memory of a setting, unless it has been measured."""
        if setting not in self._memory:
            self._memory[setting] = self.arena.memory(setting)

    def ratio(self, setting: Setting, over: Setting, by: str = "samples") -> Estimate | None:
        """Speed of a setting relative to `over`, in samples or in model FLOPs per second."""
        speed = self.arena.ratio(setting, over)
        if speed is None or by == "samples":
            return speed
        flops, base_flops = self._flops(setting), self._flops(over)
        assert flops is not None
        assert base_flops is not None
        return speed.times(flops / base_flops)

    def _flops(self, setting: Setting) -> float | None:
        """Model FLOPs per sample; None if they are not known."""
        flops = self.contenders.model_flops(setting)
        return None if flops is None else flops / self.contenders.samples(setting)

    def processor_ratio(self, setting: Setting, over: Setting) -> Estimate | None:
        """`ratio` measured in processor time; None for contenders on a GPU."""
        if self.contenders.shares_gpu:
            return None
        step_speed = self.arena.processor.joint().ratio(setting, over, self.arena.floor)
        return step_speed and step_speed.times(self.arena.work(setting, over))

    def rate(self, setting: Setting) -> Estimate | None:
        """Samples per second: the baseline's rate at the machine's usual pace, times the ratio to it."""
        speed = self.ratio(setting, self.first)
        step = self.arena.wall.joint().seconds(self.first)
        if math.isnan(step):  # no round fitted into the time: use the warm-up step
            step = self.arena.step_seconds.get(self.first, math.nan)
        if speed is None or math.isnan(step):
            return None
        return speed.times(self.contenders.samples(self.first) / step)

    def with_figures(self, result: RungResult, setting: Setting, before: Setting) -> RungResult:
        """`result` completed with every measurement of a setting, compared with `before`."""
        by, rate = result.compared_by, self.rate(setting)
        flops = self._flops(setting)
        memory = self._memory.get(setting, [])
        curve, steps = self.losses.curve(setting), self.losses.steps_to_loss(setting)
        step_seconds = self.contenders.samples(setting) / rate.value if rate else math.nan
        return replace(
            result, samples_per_second=rate, model_flops_per_second=rate.times(flops) if rate and flops else None,
            to_previous=self.ratio(setting, before, by), to_baseline=self.ratio(setting, self.first, by),
            processor_to_baseline=self.processor_ratio(setting, self.first),
            interleaved=setting not in self.arena.timed_alone, memory_bytes=max(memory, default=None),
            memory_by_rank=tuple(memory) if len(memory) > 1 else (),
            compile_seconds=self.arena.compile_seconds.get(setting), losses=curve,
            loss=tail_mean(curve) if curve else None, loss_difference=self.losses.difference(setting),
            allowed_difference=self.losses.allowed(setting), steps_to_loss=steps,
            seconds_to_loss=steps * step_seconds if steps and rate else None,
        )  # fmt: skip

    def result(self, rung: Rung, setting: Setting | None = None) -> RungResult:
        """A rung's result without figures yet; `setting` is the one it was applied in, if any."""
        return RungResult(
            name=rung.name, title=rung.title, why=rung.why, status="unsupported", plan=setting.words if setting else "",
            model=changes(self.first, setting) if setting else {}, results=rung.results, compared_by=rung.compared_by,
        )  # fmt: skip

    def chosen(self, setting: Setting, rungs: Sequence[str]) -> Chosen:
        """A Plan that the ladder recommends at its end."""
        speedup, rate = self.ratio(setting, self.first), self.rate(setting)
        assert speedup is not None
        memory, forecast = self._memory.get(setting), self.forecast(setting, self.first)
        return Chosen(
            plan=setting.words, model=changes(self.first, setting), rungs=tuple(rungs),
            train_command=self.contenders.train_command(setting), speedup=speedup, samples_per_second=rate,
            predicted=None if forecast is None else forecast.to_baseline, memory_bytes=max(memory) if memory else None,
            loss_difference=self.losses.difference(setting), within_noise=self.losses.within_noise(setting),
        )  # fmt: skip


def _values(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values of a model's fields; fields of its stacks get names with dots."""
    for field in fields(config):
        name, value = prefix + field.name, getattr(config, field.name)
        if isinstance(value, Stack):
            yield from _values(value, f"{name}.")
        else:
            yield name, plain(value)


def changes(first: Setting, setting: Setting) -> dict[str, Any]:
    """Fields of the model and of the data in which a setting differs from the first one."""
    changed: dict[str, Any] = {}
    if first.model is not None and setting.model is not None:
        before = dict(_values(first.model))
        changed = {name: value for name, value in _values(setting.model) if value != before.get(name)}
    if setting.by_length != first.by_length:
        changed["group_by_length"] = setting.by_length
    if setting.packed != first.packed:
        changed["packed"] = setting.packed
    return changed
