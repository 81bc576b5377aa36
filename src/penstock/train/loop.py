"""A training run from the first step, or from wherever it was stopped, to the exported weights.

Read from `train` down: `_Run.__init__` builds everything, and `_Run.go` is the loop. Between two logs the host never
waits for the device: losses and gradient norms are collected in a buffer on the device, step times in events, and one
transfer reads them all.
"""

from __future__ import annotations

import logging
import math
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from penstock import checkpoint
from penstock.boundary.files import explained
from penstock.build import build
from penstock.checkpoint import Checkpoint
from penstock.checkpoint.coordinator import main_first
from penstock.config.machine import Machine
from penstock.config.recipes import require_startable
from penstock.config.rules import require
from penstock.config.run import Augment, RunConfig
from penstock.data import Loader, Source
from penstock.errors import CheckpointError, ConfigError, NoValidation
from penstock.launch import ELASTIC
from penstock.launch.heartbeat import beat, beating
from penstock.launch.signals import Requests
from penstock.optim import learning_rate, set_learning_rate
from penstock.parallel import ParallelDims, joined, local_device
from penstock.parallel.agree import Ballot
from penstock.planner import Prediction, predict
from penstock.planner.ideal import least_of_step
from penstock.probe import resolve_device
from penstock.probe.rates import measure_link
from penstock.tasks import Task, task_of
from penstock.tasks.task import Fullness
from penstock.train import prepare
from penstock.train.advice import memory_advice, naming_overflow, require_scale
from penstock.train.callbacks import Callback
from penstock.train.card import card
from penstock.train.evaluate import Evaluation, evaluate
from penstock.train.evaluation_page import PICTURES, write_pictures
from penstock.train.lock import RunLock
from penstock.train.loss_monitor import LossMonitor, PendingSteps
from penstock.train.meters import HeadMeter, MemoryMeter, Speedometer
from penstock.train.metrics import Records
from penstock.train.profile import StepProfiler
from penstock.train.resume import (
    Saves,
    export,
    find_checkpoint,
    hold_output,
    requests_to_stop,
    require_no_stop,
    restore_newest,
    stopped,
)
from penstock.train.run_state import RunState, own_random, seed_random

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """Result of a finished run."""

    steps: int
    resumed_at: int
    """The step from which this call resumed; 0 for a new run."""
    loss: float
    """Mean training loss of the last logged steps."""
    evaluation: Evaluation | None
    """Evaluation of the exported weights, on the validation split; None without such a split."""
    exported: int
    """The step whose weights are exported: the best by evaluation, or the last."""
    output: Path
    export: Path
    """Hugging Face folder with the exported weights: the averages of `recipe.ema_decay`, if there are any."""
    metrics: Path
    classes: int | None = None
    """Number of classes of the model's head; None without a head for classes."""


def train(
    config: RunConfig, *, resume: bool = True, callbacks: Sequence[Callback] = (), profile: bool = False
) -> TrainResult:
    """Train as `config` says, from the newest valid checkpoint in `config.output` if there is one.

    With `resume` false, the files of an earlier run there are renamed, and the run starts from the beginning.
    `callbacks` are called with each event (see `Callback`). With `profile`, a few of the first steps are profiled into
    `config.output`/profile.

    Under a launcher (`torchrun`) all its processes make the same call, and each is one rank of the Plan; only rank 0
    writes, and all return the same.

    Raises:
        ConfigError: the configuration is invalid, or is not the configuration of the run in the checkpoint.
        CheckpointError: there are checkpoints, but none is valid.
        NumericError: a loss or weight is not finite.
        OutOfMemory: the device's memory did not suffice.
        SavedRequeue: SIGTERM or SIGUSR1 was received; the state is saved, if a step was done.
        EnvironmentProblem: the output directory is in use, the disk is full, or there is no such device.
    """
    # Before ranks and devices are looked for: these settings would be invalid with any number of them.
    require_startable(config, elastic=ELASTIC in os.environ)
    task = task_of(config.model, config.task, init_from=config.reads_like)
    output, device = Path(config.output), local_device(resolve_device(config.device))
    config = prepare.fit_to_started_ranks(config)
    with (
        requests_to_stop() as stop,
        joined(config.plan, device, timeout=config.wait_seconds) as dims,
        hold_output(output, stop, dims) as lock,
        memory_advice(config.plan, task, config.model),
        own_random(device),
    ):
        require_no_stop(stop, dims)
        records = Records(output, callbacks, main=dims.main)
        run = _Run(config, device, dims, records, resume=resume, profile=profile)
        try:
            require_no_stop(stop, dims)
            return run.go(lock, stop)
        except OSError as problem:
            if (user_error := explained(problem)) is None:
                raise
            raise user_error from problem
        finally:
            run.close()


class _Run:
    """A run from the time at which it is built, or restored, until it ends or is stopped."""

    config: RunConfig
    task: Task
    machine: Machine
    calendar: prepare.Calendar
    full: Fullness
    prediction: Prediction

    def __init__(
        self, config: RunConfig, device: torch.device, dims: ParallelDims, records: Records, *, resume: bool,
        profile: bool,
    ) -> None:  # fmt: skip
        self.output, self.device, self.dims, self.records = Path(config.output), device, dims, records
        self.again = "" if resume else " without --no-resume"
        self.ballot = Ballot(dims)

        train_source = self._open(config)
        config = self.config
        stored = find_checkpoint(config, dims, resume=resume)
        if not stored:
            prepare.require_start(config)
        self._predict(train_source)
        if dims.main:
            prepare.prepare_folder(self.output, config, train_source)
        self.saves = Saves(self.output / "checkpoints", config, dims)

        # The model, its samples, and the monitor of its losses.
        seed_random(config.seed, dims.random_rank)
        self.built = build(
            config.model, config.plan, device=device, recipe=config.recipe, loss=self.task, seed=config.seed,
            machine=self.machine, dims=dims,
        )  # fmt: skip
        assert isinstance(self.built.loss, Task)
        self.task = self.built.loss  # with the reference that evaluations compare the model with
        self.loader = self._loader(train_source, augment=config.recipe.augment)
        self.monitor = LossMonitor(config.recipe, self.built.optimizer, device, dims)
        self.built.step.skips = self.monitor.skipper
        total = self.calendar.total
        self.state = RunState(config, dims, self.built, self.loader, self.monitor, total=total)
        if stored:
            stored = restore_newest(self.state, stored)
            self.state.require_within(total)
        elif config.init_from:
            self.state.start_from(config.init_from)
        self.resumed_at = self.saves.newest_step = self.step
        self.batches: list[Any] = []
        """Batches of the latest step."""
        # Meters of the steps, which do not wait for the device.
        self.pending = PendingSteps(config.log_every, device, dims)
        self.speedometer = Speedometer(
            self.prediction, self.machine, device, lambda: self.loader.wait_seconds, self.full
        )
        self.memory = MemoryMeter(device)
        self.heads = HeadMeter(self.built.model, self.task, dims, device)
        least = partial(least_of_step, **self.work)
        self.profiler = StepProfiler(self.output, device, self._record, least, wanted=profile and dims.main)
        again = {"resume", "prediction", "patience", *self._due_again()}
        records.rewind(self.step if stored else -1, again=again)

    def _open(self, config: RunConfig) -> Source:
        """Open the training data, and set the sizes in `config` that follow from data and teacher."""
        config = prepare.with_teachers_vocabulary(config)
        self.task = task_of(config.model, config.task, init_from=config.reads_like)
        if self.dims.main:
            prepare.report_unused(config, self.task)
        train_source = self.task.open(config.data, config.model, "train")
        self.val_source = self._validation(config)
        self.data = train_source.title
        self.config = replace(config, model=self.task.fit(config.model, train_source))
        prepare.require_teacher(self.config, train_source)
        return train_source

    def _predict(self, train_source: Source) -> None:
        """Predict how long the run takes, and check that machine and schedule allow it. The machine is measured here,
        after data and weights were checked: an error in these needs no measurement."""
        config, device = self.config, self.device
        # By one rank: ranks that measure at the same time disturb each other, and would predict differently.
        self.machine = main_first(lambda: prepare.machine_of(config, device))
        if config.plan.gpus > 1 and device.type == "cpu" and config.machine is None:
            self.machine = self.machine.linked(measure_link(device), config.plan.gpus)
        require(config.plan, config.model, self.machine, run=True)
        self.calendar = prepare.Calendar(config, len(train_source))
        learning_rate(0, config.recipe, self.calendar.total)  # refuses a warm-up that does not fit
        self.full = self.task.fullness(train_source, config.model, config.plan.micro_batch)
        self.work: dict[str, Any] = {
            "model": self.full.model, "machine": self.machine, "plan": config.plan, "real": self.full.real,
            "words": self.full.words, "learns": prepare.learning_of(config),
        }  # fmt: skip
        """The work of a step: arguments of the planner's functions."""
        self.prediction = predict(**self.work)

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.state.step

    def go(self, lock: RunLock, stop: Requests) -> TrainResult:
        """Train to the end, or until asked to stop."""
        self._announce()
        if self.resumed_at and self._evaluation_is_due():
            self._evaluate()
        while self.step < self.calendar.total and not self.state.lost_patience:
            if not len(self.pending):
                self.speedometer.start()
            with self.profiler.step(last=self.step + 1 == self.calendar.total):
                self._train_step()
            lock.touch()
            beat(self.step)
            if self.calendar.logs(self.step):
                self._log()
            self._stop_if_asked(stop)
            better = self._evaluation_is_due() and self._evaluate() and self.config.export_best
            if self.calendar.saves(self.step) or better:
                self._save_in_time(better)
            self._stop_if_asked(stop)
        if self.step < self.calendar.total:
            self._save(stopping=True)
            self._record("patience", worse=self.state.worse, best_step=self.state.best_step)
        return self._finish()

    def close(self) -> None:
        """End threads, processes and files, each even if another one fails."""
        with closing(self.records), closing(self.loader), closing(self.saves):
            pass

    def _train_step(self) -> None:
        """One optimizer step. Nothing here waits for the device."""
        set_learning_rate(self.built.optimizer, self._rate(self.step))
        self.batches = [next(self.loader) for _ in range(self.config.plan.accumulate)]
        result = self.memory.step(self.built.step, self.batches)
        self.pending.add(result.loss, result.grad_norm)
        self.heads.add(result.parts)
        self.state.step += 1
        self.speedometer.lap(sum(self.task.tokens(batch) for batch in self.batches))

    def _rate(self, step: int) -> float:
        return learning_rate(step, self.config.recipe, self.calendar.total, self.state.began)

    def _log(self) -> None:
        """Fetch and record the pending steps: the one place at which the host waits for the device."""
        with naming_overflow(self.built.step, self.batches):
            require_scale(self.built.scaler, self.step)
            losses, grad_norm = self.pending.read(self.step, skipping=self.monitor.skipper is not None)
            observed = self.monitor.observe(self.step, losses)
        finite = [loss for loss in losses if math.isfinite(loss)]
        self.state.loss = statistics.fmean(finite or [self.state.loss])
        if self.state.loads:
            observed["expert_load"] = self.state.loads.close_window(self.step)
        if heads := self.heads.read():
            observed["heads"] = heads
        self._record(
            "steps", epoch=self.calendar.epoch(self.step), loss=self.state.loss, losses=losses,
            grad_norm=grad_norm, lr=self._rate(self.step - 1),
            **self.speedometer.read(), **self.memory.read(), **observed,
        )  # fmt: skip
        if self.monitor.rewind_because_of:
            self._rewind(self.monitor.rewind_because_of)

    def _rewind(self, spikes: list[int]) -> None:
        """Restore the newest checkpoint, but continue with the samples after the spike."""
        stored = self.saves.find()
        if stored is None:
            if self.dims.main:
                _log.warning("There is no checkpoint to go back to yet; the run continues.")
            return
        number = self.monitor.count_rewind()
        self.state.restore(stored, rewinding=True)
        self.saves.newest_step = self.step
        self.records.rewind(self.step, again=self._due_again())
        self._record("rewind", spikes=spikes, number=number)

    def _validation(self, config: RunConfig) -> Source | None:
        """The validation split; None, with a warning, if the data have none and cannot be split. Raises ConfigError if
        the end of the run depends on evaluations."""
        try:
            return self.task.open(config.data, config.model, "val")
        except NoValidation as problem:
            if config.recipe.patience:
                raise ConfigError(f"recipe.patience counts evaluations, but {problem}") from None
            if self.dims.main:
                _log.warning("%s The run is not evaluated.", problem)
            return None

    def _evaluate(self) -> bool:
        """Evaluate on the whole validation split: the EMA weights if there are any, else the weights. Returns whether
        it is the best evaluation so far."""
        started = time.perf_counter()
        task, model, dims, source = self.task, self.built.model, self.dims, self.val_source
        assert source is not None  # else no evaluation is due
        loader = self._loader(source, endless=False)
        rounds = math.ceil(len(source) / (loader.batch * dims.data_world))
        blank = task.blank(self.config.model, self.device)
        with loader, self.built.inference():
            batches = beating(loader, self.step)
            evaluation = evaluate(task, model, batches, dims=dims, rounds=rounds, blank=blank)
            with torch.no_grad():
                shown = task.sample(model, source, self.device)
                answers = task.answers(model, source, self.device)
        better = self.state.judge(evaluation, task.merit) and not self.monitor.unsettled()
        self._record(
            "evaluation", epoch=self.calendar.epoch(self.step), **evaluation.record(),
            ema=self.config.recipe.ema_decay is not None, seconds=time.perf_counter() - started,
            **({"sample": shown} if shown else {}), **({"answers": answers} if answers else {}),
            **({} if evaluation.counts is None else {"by_class": evaluation.counts.record()}),
        )  # fmt: skip
        if self.dims.main and answers and not (self.output / PICTURES).exists():
            write_pictures(task.pictures(source), self.output / PICTURES)
        return better

    def _evaluation_is_due(self) -> bool:
        due = self.val_source is not None and self.calendar.evaluates(self.step)
        return due and self.state.evaluated_at != self.step

    def _save_in_time(self, better: bool) -> None:
        """Save, unless a checkpoint was just written: then the state of a `better` step is kept in host memory."""
        if self.step == self.calendar.total or not self.saves.too_soon():
            self._save()
        elif better:
            self.saves.hold(self.state.snapshot())

    @property
    def _best_step(self) -> int:
        """The step to export, by the evaluations so far; 0 for the last step."""
        return self.state.best_step if self.config.export_best else 0

    def _save(self, *, stopping: bool = False) -> None:
        """Save a checkpoint; unless `stopping`, only if the latest steps were finite."""
        last = stopping or self.step == self.calendar.total
        if last:
            self.saves.wait()
        if self.saves.newest_step == self.step:
            return
        if self.monitor.policy == "rewind" and len(self.pending):
            before = self.step
            self._log()
            if self.step != before:
                return
        if not stopping and self.step < self.calendar.total and self.monitor.unsettled():
            return
        beat(self.step)
        started = time.perf_counter()
        path = self.saves.save(self.state.snapshot(), best=self._best_step, wait=last)
        self.state.loads.write(self.output)
        beat(self.step)
        self._record("checkpoint", path=str(path), seconds=time.perf_counter() - started)

    def _stop_if_asked(self, stop: Requests) -> None:
        """If asked to stop, save and raise, unless the run is at its end. A due evaluation is made when it resumes.

        Ranks receive a signal at different times, or not at all: they act one step later, when all know of it.
        """
        signal_number = self.ballot.turn(stop.signal or 0)
        if not signal_number or self.step == self.calendar.total:
            return
        if len(self.pending):
            self._log()
        self._save(stopping=True)
        where = f"step {self.step} of {self.calendar.total}, which is saved in {self.saves.folder}"
        raise stopped(signal_number, f"after {where}", f"goes on from there{self.again}")

    def _finish(self) -> TrainResult:
        """Export the evaluated weights, and record what was predicted and measured."""
        evaluation, step = self.state.evaluation, self.step
        if self._best_step not in (0, step) and (stored := self._find_best()) is not None:
            self.state.load_weights(stored)
            evaluation, step = self.state.best or evaluation, stored.step
        about = card(
            self.config, evaluation, steps=step, data=self.data,
            parameters=self.prediction.parameters, machine=self.machine.name,
        )  # fmt: skip
        with self.built.inference():
            folder = export(self.built.model, self.output, self.dims, self.config.recipe.lora, about)
        if speed := self.speedometer.whole_run():
            self._record(
                "summary", predicted=_prediction_values(self.prediction), measured=speed | self.memory.read()
            )
        return TrainResult(
            classes=None if (head := self.config.model.graph.classes) is None else head.classes,
            steps=self.step, resumed_at=self.resumed_at, loss=self.state.loss, evaluation=evaluation, exported=step,
            output=self.output, export=folder, metrics=self.records.path,
        )  # fmt: skip

    def _find_best(self) -> Checkpoint | None:
        """The checkpoint of the best evaluation; None, with a warning, if it cannot be read."""
        try:
            return checkpoint.open_together(self.saves.folder / f"step-{self._best_step}")
        except CheckpointError as problem:
            if self.dims.main:
                _log.warning("%s Its evaluation was the best; the last step is exported instead.", problem)
            return None

    def _loader(self, source: Source, *, augment: Augment | None = None, endless: bool = True) -> Loader:
        """This rank's batches of a split: endless for training, else one pass."""
        seed = self.config.seed if endless else 0
        return Loader(
            source, self.task.prepare(source, self.config.model, augment=augment, seed=seed),
            batch=self.config.plan.micro_batch, seed=seed, device=self.device, workers=self.config.data.workers,
            rank=self.dims.data_rank, world=self.dims.data_world, endless=endless,
            group=self.config.plan.global_batch,
        )  # fmt: skip

    def _record(self, event: str, **values: Any) -> None:
        self.records.write(event, self.step, **values)

    def _due_again(self) -> set[str]:
        """Events that will be recorded again at a step to which the run has returned."""
        return {"evaluation"} if self._evaluation_is_due() else set()

    def _announce(self) -> None:
        """Record the run's settings and its prediction, before the first step."""
        self._record(
            "resume" if self.resumed_at else "start", plan=self.config.plan.line(), machine=self.machine.name,
            device=str(self.device), peak=self.speedometer.peak, parameters=self.built.parameters,
            trained=round(self.work["learns"].parameters * self.built.parameters), log_every=self.config.log_every,
            model=self.task.describe_model(self.config.model), unit=self.task.unit, data=self.data,
            samples=self.calendar.samples, padding=self.loader.padding_share,
            unpacked_padding=self.loader.source.unpacked_padding, batch=self.calendar.batch,
            total=self.calendar.total, output=str(self.output),
            **({"classes": classes} if (classes := getattr(self.val_source, "classes", None)) else {}),
            **({"fused": dict(self.built.fused)} if self.config.plan.fuse else {}),
        )  # fmt: skip
        self._record("prediction", **_prediction_values(self.prediction))


def _prediction_values(prediction: Prediction) -> dict[str, float]:
    names = ("iteration_seconds", "samples_per_second", "memory_bytes", "mfu", "hfu")
    return {name: getattr(prediction, name) for name in names}
