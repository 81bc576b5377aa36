"""A model as contenders: builds it under each setting, and measures its time, memory and losses.

Each process has a `Bench` that holds its models, each built under one Setting, side by side. A contender of several
processes has a model on the bench of each: see `team`.
"""

from __future__ import annotations

import gc
import math
import os
import sys
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from penstock.build import Built
from penstock.config.machine import Link, Machine
from penstock.ladder.contender import Contenders, LossRun, Timing
from penstock.ladder.result import Forecast
from penstock.ladder.rung import Setting
from penstock.ladder.settings import LadderConfig
from penstock.ladder.subject import Subject, close
from penstock.ladder.team import Team
from penstock.parallel.agree import average, slowest
from penstock.planner.prediction import Prediction, predict_workload
from penstock.probe.rates import measure_link, wait
from penstock.process import set_host_memory
from penstock.step.memory import step_with_memory

WARM_UP_STEPS = 3
LONG_WARM_UP = 4.0
"""After this many seconds two warm-up steps are enough, if nothing was compiled."""
MEMORY_SHARE = 0.5
"""Share of a CPU's memory that idle contenders may fill."""
RECOMPILE_LIMIT = 256
"""Contenders share the code of their blocks, and each adds its own compiled form to that code's cache."""


@dataclass(slots=True)
class Warm:
    """One setting, built and warm in this process."""

    setting: Setting
    device: torch.device
    built: Built
    micro_batches: list[Any]

    def step(self) -> None:
        """Run one optimizer step; on a GPU it may still be running when this returns."""
        self.built.step(self.micro_batches)


class Crew(Protocol):
    """The process or processes that measure."""

    life: int
    """Changes whenever the processes end, which loses everything that they held."""

    def ask(self, do: str, *arguments: Any) -> list[Any]:
        """Call the method `do` of each process's `Bench`; return the answers by rank."""


class Bench:
    """The ladder's work in one process: builds settings, keeps them, and measures them."""

    life = 0

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._warm: dict[Setting, Warm] = {}

    def ask(self, do: str, *arguments: Any) -> list[Any]:
        """Answer as a `Crew` of this process alone."""
        return [getattr(self, do)(*arguments)]

    def contend(self, setting: Setting, seed: int) -> tuple[float, float | None]:
        """Build, warm up and keep a setting. Returns a first estimate of the seconds of a step, and the seconds of
        compiling: how much longer the first steps took than later ones. None if nothing is compiled.
        """
        built = self.subject.build(setting, seed)
        micro_batches = self.subject.typical(setting, seed)
        contender = Warm(setting, self.subject.device, built, micro_batches)
        compiled = setting.plan.compile != "none"
        # Before the warm-up, whose first step would otherwise be an untimed one in which everything is compiled.
        set_host_memory(keep=setting.plan.host_memory == "keep")
        times: list[float] = []
        while len(times) < 2 or (len(times) < WARM_UP_STEPS and (compiled or sum(times) < LONG_WARM_UP)):
            times.append(_timed(contender, 1).wall)
        self._warm[setting] = contender
        *first, last = times
        return last, max(0.0, sum(first) - len(first) * last) if compiled else None

    def timed(self, setting: Setting, steps: int) -> Timing:
        """Time `steps` steps."""
        return _timed(self._warm[setting], steps)

    def memory(self, setting: Setting) -> int:
        """Peak bytes of tensors during one step, with weights and optimizer state."""
        warm = self._warm[setting]
        return step_with_memory(warm.built.step, warm.micro_batches)[1]

    def trained(self, setting: Setting, seed: int, steps: int) -> LossRun:
        """Train a separate model for `steps` optimizer steps, with the weights and the sample order of the seed."""
        run = self._loss_run(setting, seed, steps)
        release(self.subject.device, compiled=False)
        return run

    def _loss_run(self, setting: Setting, seed: int, steps: int) -> LossRun:
        built = self.subject.build(setting, seed)
        batches = self.subject.batches(setting, seed)
        try:
            torch.manual_seed(seed)  # for dropout, if there is any
            micro_batches = range(setting.plan.accumulate)
            results = [built.step([next(batches) for _ in micro_batches]) for _ in range(steps)]
            losses = average(torch.stack([result.loss for result in results]).float().cpu(), built.dims)
            norms = [result.grad_norm for result in results if result.grad_norm is not None]
            return LossRun(losses.tolist(), torch.stack(norms).float().cpu().tolist() if norms else [])
        finally:
            close(batches)

    def link(self) -> Link:
        """Measure the cost of collectives between the ranks."""
        return measure_link(self.subject.device)

    def drop(self, setting: Setting) -> None:
        """Drop a setting, and its compiled code too unless the remaining ones would then have to compile again."""
        self._warm.pop(setting, None)
        compiled_stay = any(setting.plan.compile != "none" for setting in self._warm)
        release(self.subject.device, compiled=setting.plan.compile != "none" and not compiled_stay)


class ModelContender:
    """One setting, built and warm in each process of a crew."""

    def __init__(self, crew: Crew, setting: Setting, seed: int) -> None:
        self._crew, self.setting = crew, setting
        answers = crew.ask("contend", setting, seed)
        self._life = crew.life
        self.step_seconds: float = max(step for step, _ in answers)
        """Seconds of a step of the slowest process, as last measured."""
        self.compile_seconds = max((spent for _, spent in answers if spent is not None), default=None)

    @property
    def alive(self) -> bool:
        """Whether the processes that hold it still run."""
        return self._crew.life == self._life

    def timed(self, least_seconds: float) -> Timing:
        """One timing of at least `least_seconds`: wall time of the slowest process, processor time of all."""
        steps = max(1, math.ceil(least_seconds / max(self.step_seconds, 1e-9)))
        timings = self._crew.ask("timed", self.setting, steps)
        self.step_seconds = max(timing.wall for timing in timings)
        return Timing(self.step_seconds, sum(timing.processor or 0.0 for timing in timings))

    def memory(self) -> list[int]:
        """Peak bytes of one step, by rank."""
        return self._crew.ask("memory", self.setting)

    def close(self) -> None:
        """Drop it in all processes."""
        if self.alive:
            self._crew.ask("drop", self.setting)


def _timed(contender: Warm, steps: int) -> Timing:
    """Time `steps` steps; with several ranks every rank returns the wall time of the slowest."""
    device, dims = contender.device, contender.built.dims
    if set_host_memory(keep=contender.setting.plan.host_memory == "keep"):
        contender.step()  # this untimed step refills the allocator, or empties it, after a change of the memory's form
    wait(device)
    slowest(0.0, dims)  # a barrier: all ranks begin together
    busy, start = time.process_time(), time.perf_counter()
    for _ in range(steps):
        contender.step()
    wait(device)
    wall, busy = time.perf_counter() - start, time.process_time() - busy
    return Timing(slowest(wall / steps, dims), busy / steps)


def release(device: torch.device, *, compiled: bool) -> None:
    """Free the memory of dropped contenders, and with `compiled` all compiled code."""
    if compiled:
        torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def side_by_side() -> Iterator[None]:
    """Let many compiled contenders live at once, each compiled for its own shapes instead of for dynamic ones."""
    from torch.compiler import config

    limits = {"recompile_limit": RECOMPILE_LIMIT, "accumulated_recompile_limit": 4 * RECOMPILE_LIMIT}
    with config.patch(**limits, automatic_dynamic_shapes=False):  # type: ignore[attr-defined]
        yield


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


def rank_machine(machine: Machine, ranks: int, link: Link) -> Machine:
    """The part of this machine that each of `ranks` processes has, as a Machine: ranks on one CPU share its rates, and
    `link` is the measured cost of their collectives."""
    linked = replace(machine.linked(link, ranks), devices_per_node=max(ranks, machine.devices_per_node))
    if machine.device != "cpu":
        return linked
    return replace(
        linked,
        peak_flops={name: rate / ranks for name, rate in machine.peak_flops.items()},
        achievable_flops={name: rate / ranks for name, rate in machine.achievable_flops.items()},
        memory_bytes=machine.memory_bytes / ranks, memory_bytes_per_second=machine.memory_bytes_per_second / ranks,
        gemm=tuple(replace(s, flops_per_second=s.flops_per_second / ranks) for s in machine.gemm),
        kernels=tuple(replace(s, per_second=s.per_second / ranks) for s in machine.kernels),
    )  # fmt: skip
