"""`penstock ladder`'s climb as the planner predicts it for any machine; nothing is built or measured. Free of torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from penstock.config.machine import Machine
from penstock.config.model import ModelConfig, title
from penstock.config.plan import Plan
from penstock.errors import ConfigError, OutOfMemory
from penstock.ladder.rung import Rung, Setting, Situation
from penstock.ladder.rungs import all_rungs
from penstock.planner.prediction import Prediction, predict

LEAST_GAIN = 1.005
"""Least speedup for which a rung is kept."""
LARGEST_BATCH = 256
"""Largest default batch of the baseline, in samples per device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedRung:
    """One rung of a predicted climb."""

    name: str
    title: str
    change: str
    """Changes that the rung makes, in words of a Plan or a model."""
    prediction: Prediction
    to_previous: float
    """Speedup over the setting before: in samples per second, or in FLOP/s if the rung changes the sample itself."""
    to_baseline: float
    kept: bool = False
    """Whether later rungs build on it. Rungs that change results are each tried on top of the best, and not kept."""
    share: float = 0.0
    """Share of the total gain, in logarithms; 0 for a rung that is not kept."""


def predicted_climb(
    model: ModelConfig, machine: Machine, *, gpus: int = 1, global_batch: int | None = None
) -> list[PredictedRung]:
    """The baseline, the rungs that keep results and pay, in the order of climbing, and what each rung that changes
    results would add to all of them. Of rungs that exclude each other the fastest is kept.

    `global_batch` is the baseline's; by default the largest power of two that fits, up to `LARGEST_BATCH` per device.
    Raises ConfigError for a batch that `gpus` devices cannot divide, and OutOfMemory if the baseline does not fit.
    """
    climb = _PredictedClimb(model, machine, gpus, global_batch)
    choices: dict[str, list[Rung]] = {}
    for rung in all_rungs():
        if rung.searched or rung.twin:
            choices.setdefault(rung.alternatives, []).append(rung)
    for rungs in choices.values():
        climb.choose(rungs)
    others = [climb.on_top(rung) for rung in all_rungs() if not (rung.searched or rung.twin)]
    climb.rungs += [predicted for _, predicted in filter(None, others)]
    whole = math.log(climb.prediction.samples_per_second / climb.rungs[0].prediction.samples_per_second)
    return [
        replace(r, share=math.log(r.to_previous) / whole if whole and r.kept else 0.0) for r in climb.rungs
    ]


class _PredictedClimb:
    """The setting reached so far, and how rungs are applied to it."""

    def __init__(self, model: ModelConfig, machine: Machine, gpus: int, global_batch: int | None) -> None:
        self.machine = machine
        self.setting = Setting(model=model, plan=_baseline(model, machine, gpus, global_batch))
        self.prediction = predict(model, machine, self.setting.plan)
        # A machine that Penstock cannot run on is planned by the rules of GPUs.
        ruled_by = machine if machine.device != "other" else replace(machine, device="cuda")
        self.situation = Situation(
            machine=ruled_by, micro_batch=self.setting.plan.micro_batch, procs=gpus,
            holds=lambda setting: predict(setting.model or model, machine, setting.plan).fits,
        )  # fmt: skip
        first = PredictedRung(
            name="baseline", title=f"baseline {self.prediction.peak_name}", change=self.setting.plan.line(),
            prediction=self.prediction, to_previous=1.0, to_baseline=1.0,
        )  # fmt: skip
        self.rungs = [first]

    def choose(self, rungs: list[Rung]) -> None:
        """Keep the fastest of rungs that exclude each other, if it pays."""
        steps = [
            (setting, step)
            for setting, step in filter(None, map(self.on_top, rungs))
            if step.prediction.fits and step.to_previous >= LEAST_GAIN
        ]
        if steps:
            self.setting, best = max(steps, key=lambda pair: pair[1].to_previous)
            self.prediction = best.prediction
            self.rungs.append(replace(best, kept=True))

    def on_top(self, rung: Rung) -> tuple[Setting, PredictedRung] | None:
        """A rung on top of the setting reached, as predicted; None if it cannot be applied or changes nothing."""
        if rung.refusal(self.setting, self.situation) is not None:
            return None
        setting = rung.apply(self.setting, self.situation)
        assert setting.model is not None
        if setting == self.setting:
            return None
        try:
            prediction = predict(setting.model, self.machine, setting.plan)
        except ConfigError:
            return None
        speed, first = _speed(rung, prediction), self.rungs[0].prediction
        step = PredictedRung(
            name=rung.name, title=rung.title, change=_change(self.setting, setting), prediction=prediction,
            to_previous=speed / _speed(rung, self.prediction), to_baseline=speed / _speed(rung, first),
        )  # fmt: skip
        return setting, step


def _speed(rung: Rung, one: Prediction) -> float:
    if rung.compared_by == "flops":
        return one.model_flops_per_second_per_gpu * one.gpus
    return one.samples_per_second


def _baseline(model: ModelConfig, machine: Machine, gpus: int, global_batch: int | None) -> Plan:
    """The plain loop with a replica on each device, in fp32, or in autocast if the machine has no fp32."""
    if global_batch is not None and global_batch % gpus:
        raise ConfigError(
            f"{global_batch} samples a step cannot be shared evenly by {gpus} replicas; change one."
        )
    sizes = [LARGEST_BATCH >> n for n in range(LARGEST_BATCH.bit_length())]
    for size in sizes if global_batch is None else [global_batch // gpus]:
        plan = Plan(micro_batch=size, dp=gpus, precision="O0" if "fp32" in machine.peak_flops else "O1")
        if predict(model, machine, plan).fits:
            return plan
    raise OutOfMemory(
        f"The baseline of a ladder, {title(model)} with a replica on each {machine.name}, does not fit with "
        f"{size} samples a device. Climb with a smaller --global-batch or model, or plan without --ladder."
    )


def _change(before: Setting, after: Setting) -> str:
    """The differences between two settings, in words of a Plan, or of a model if that differs."""
    words = set(before.plan.line().split())
    changed = [word for word in after.plan.line().split() if word not in words]
    if after.model != before.model and after.model is not None:
        changed.append(title(after.model).partition("(")[2].rstrip(")") or title(after.model))
    return " ".join(changed)
