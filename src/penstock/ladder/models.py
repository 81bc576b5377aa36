"""A model as contenders: each setting is built in this process, or on several ranks for the rungs that need them."""

from __future__ import annotations

import os
import sys
from collections.abc import Hashable

from penstock.config.machine import Machine
from penstock.ladder.contender import Contenders, LossRun
from penstock.ladder.forecast import rank_machine
from penstock.ladder.measure import Bench, Crew, ModelContender
from penstock.ladder.result import Forecast
from penstock.ladder.rung import Setting
from penstock.ladder.settings import LadderConfig
from penstock.ladder.subject import Subject
from penstock.ladder.team import Team
from penstock.planner.prediction import Prediction, predict_workload

MEMORY_SHARE = 0.5
"""Share of a CPU's memory that idle contenders may fill."""


class Models(Contenders):
    """`Contenders` for settings of a subject's model."""

    control_rounds, control_share = 10, 0.06
    most_rounds = 30
    loss_runs = True
    shorter = "and so do shorter steps (--batch, --model.sequence)"

    def __init__(self, subject: Subject, machine: Machine, config: LadderConfig) -> None:
        self.subject, self.machine, self.seed = subject, machine, config.seed
        self.bench, self.team = Bench(subject), Team(subject, config)
        self.title, self.unit, self.first = subject.title, subject.unit, subject.first
        self.shares_gpu = subject.device.type == "cuda"

    def contend(self, setting: Setting) -> ModelContender:
        return ModelContender(self._crew(setting), setting, self.seed)

    def room(self, setting: Setting) -> int:
        """Number of contenders that fit, at least two on a CPU; unlimited on a GPU, which raises when it is full."""
        if self.subject.device.type != "cpu":
            return sys.maxsize
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return max(2, int(MEMORY_SHARE * memory / (16.0 * self.subject.workload(setting).parameters)))

    def form(self, setting: Setting) -> Hashable:
        return setting.plan.host_memory

    def trained(self, setting: Setting, seed: int, steps: int) -> LossRun:
        losses: LossRun = self._crew(setting).ask("trained", setting, seed, steps)[0]
        return losses

    def samples(self, setting: Setting) -> float:
        return self.subject.samples(setting)

    def model_flops(self, setting: Setting) -> int:
        return self.subject.model_flops(setting)

    def train_command(self, setting: Setting) -> str:
        return self.subject.train_command(setting)

    def end(self) -> None:
        self.team.end()

    def _crew(self, setting: Setting) -> Crew:
        return self.team if setting.plan.gpus > 1 else self.bench

    def predict(self, setting: Setting) -> Prediction:
        """The planner's prediction for a setting."""
        work, machine = self.subject.workload(setting), self.machine
        if setting.plan.gpus > 1:
            machine = rank_machine(machine, setting.plan.gpus, self.team.link())
        return predict_workload(work, machine, setting.plan)

    def slower(self, setting: Setting, before: Setting) -> float:
        return self.predict(setting).iteration_seconds / self.predict(before).iteration_seconds

    def forecast(
        self, setting: Setting, before: Setting, by: str = "samples", corrected: float | None = None
    ) -> Forecast:
        predicted, previous, first = (self.predict(s) for s in (setting, before, self.first))

        def rate(prediction: Prediction, of: Setting) -> float:
            flops = prediction.model_flops_per_second_per_gpu * prediction.gpus
            return flops if by == "flops" else prediction.samples_per_second * self.subject.worth(of)

        to_baseline = rate(predicted, setting) / rate(first, self.first)
        return Forecast(
            samples_per_second=predicted.samples_per_second * self.subject.worth(setting),
            to_previous=rate(predicted, setting) / rate(previous, before), to_baseline=to_baseline,
            corrected=to_baseline if corrected is None else corrected, memory_bytes=predicted.memory_bytes,
            mfu=predicted.mfu, seconds=predicted.seconds,
        )  # fmt: skip
