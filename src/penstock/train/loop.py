"""A training run from the first step, or from wherever it was stopped, to the exported weights.

Read from `train` down: `_Run.__init__` builds everything in the order in which later parts need earlier ones, `_Run.go`
is the loop. Between two logs the host never waits for the device: losses and gradient norms gather in a buffer on
it, step times in events, and one transfer reads them all.
"""

from __future__ import annotations

import logging
import math
import shutil
import signal
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from penstock import checkpoint
from penstock.build import build
from penstock.checkpoint import BackgroundSaver, Snapshot, Stored
from penstock.config.load import dump_toml, from_dict, to_dict
from penstock.config.machine import Machine
from penstock.config.run import Augment, RunConfig
from penstock.data import Loader, Source
from penstock.errors import PenstockError, SavedRequeue
from penstock.launch.heartbeat import beat, beating
from penstock.models import ViT
from penstock.models.convert import load_weights, save_pretrained
from penstock.optim import learning_rate, set_learning_rate
from penstock.parallel import ParallelDims, joined, local_device, whole_state
from penstock.parallel.agree import Ballot, average, main_first, together
from penstock.planner import Prediction, predict
from penstock.probe import resolve_device
from penstock.tasks import task_of
from penstock.train.display import Display, Silent
from penstock.train.evaluate import Evaluation, evaluate
from penstock.train.lock import RunLock
from penstock.train.lost import naming_overflow, require_scale
from penstock.train.memory import memory_advice
from penstock.train.metrics import (
    Meter,
    MetricsFile,
    StepTimer,
    TensorBoard,
    peak_memory,
    resident_memory,
    used_memory,
)
from penstock.train.prepare import (
    as_many_ranks_as_there_are,
    machine_of,
    set_aside,
)
from penstock.train.schedule import Schedule
from penstock.train.signals import StopRequest
from penstock.train.state import changes, own_random, random_states, restore_random, seed_random
from penstock.train.watch import Watch
from penstock.train.window import Window, require_finite

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What a finished run leaves."""

    steps: int
    resumed_at: int
    """The step this call went on from; 0 for a new run."""
    loss: float
    """Mean training loss of the last logged steps."""
    evaluation: Evaluation
    """On the validation split at the end, of the EMA weights where there are any."""
    output: Path
    export: Path
    """Hugging Face folder of the final weights: what was evaluated."""
    metrics: Path


def train(
    config: RunConfig, *, resume: bool = True, tensorboard: bool = False, display: Display | None = None
) -> TrainResult:
    """Train as `config` says, going on from the newest checkpoint in `config.output` that can be trusted.

    With `resume` false, what an earlier run left there is set aside under another name and the run starts anew.

    Under a launcher (`torchrun`) each of its processes calls this alike and is one rank of the Plan; rank 0 alone
    writes, and all return the same.

    Raises:
        ConfigError: the configuration cannot be, or is not the one that the checkpoint was made with.
        CheckpointError: there are checkpoints and none can be trusted.
        NumericError: a loss or weight is not finite.
        OutOfMemory: the device's memory did not suffice.
        SavedRequeue: SIGTERM or SIGUSR1 came; the state is saved.
        EnvironmentProblem: the output directory is in use, the disk is full, or there is no such device.
    """
    # Before ranks are counted or devices asked for: no number of either would let these settings run.
    config.plan.refuse_unrunnable()
    task_of(config.model)
    output, device = Path(config.output), local_device(resolve_device(config.device))
    config = as_many_ranks_as_there_are(config)
    with (
        joined(config.plan, device) as dims,
        _held(output, dims) as lock,
        StopRequest() as stop,
        memory_advice(config.plan),
        own_random(device),
    ):
        shown = display if display and dims.main else Silent()
        run = _Run(config, output, device, dims, resume=resume, tensorboard=tensorboard, display=shown)
        try:
            return run.go(lock, stop)
        finally:
            run.close()


@contextmanager
def _held(output: Path, dims: ParallelDims) -> Iterator[RunLock]:
    """Inside, rank 0 holds the output folder; where it cannot, all ranks raise."""
    with ExitStack() as stack:
        output.mkdir(parents=True, exist_ok=True)
        lock = RunLock(output)

        def hold() -> None:
            stack.enter_context(lock)

        main_first(hold, dims)
        yield lock


class _Run:
    """One life of a run: from being built, or rebuilt, to its end or its being stopped."""

    def __init__(
        self,
        config: RunConfig,
        output: Path,
        device: torch.device,
        dims: ParallelDims,
        *,
        resume: bool,
        tensorboard: bool,
        display: Display,
    ) -> None:
        self.output = output
        self.folder = output / "checkpoints"
        self.display = display
        self.device = device
        self.dims = dims
        self.ballot = Ballot(dims)
        # Measured by one: ranks that measure at the same time disturb each other, and would predict differently.
        machine = main_first(lambda: to_dict(machine_of(config, device)), dims)
        self.machine = from_dict(Machine, machine, origin="the machine of rank 0")
        self.task = task_of(config.model)
        train_source = self.task.open(config.data, config.model, "train")
        self.val_source = self.task.open(config.data, config.model, "val")
        self.config = config = replace(config, model=self.task.fit(config.model, train_source))
        config.plan.validate(config.model, self.machine)
        self.schedule = Schedule.of(config, len(train_source))
        learning_rate(0, config.recipe, self.schedule.total)  # refuses a warm-up that does not fit
        self.prediction = predict(config.model, self.machine, config.plan)
        self.meter = Meter.of(self.prediction, self.machine)

        snapshot = self._find_snapshot(resume)
        if dims.main:
            (output / "run.toml").write_text(dump_toml(config), encoding="utf-8")
        self.resumed_at = self.step = snapshot.step if snapshot else 0
        self.saved_at = self.step
        self.evaluated_at = 0
        self.evaluation: Evaluation | None = None
        self.loss = math.nan

        self.saver = BackgroundSaver(self.folder, keep=config.keep) if config.save_in_background else None
        seed_random(config.seed, dims.rank)
        self.memory_before = resident_memory()
        self.built = build(
            config.model,
            config.plan,
            device=device,
            recipe=config.recipe,
            seed=config.seed,
            machine=self.machine,
            dims=dims,
            loss=self.task,
        )
        self.loader = self._loader(train_source, augment=config.recipe.augment)
        shared = None if dims.alone else lambda value: average(value, dims)
        self.watch = Watch(config.recipe, self.built.optimizer, device, average=shared, told=dims.main)
        if self.watch.guard is not None:
            self.built.step.skips = self.watch.guard.judge
        if snapshot:
            self._restore(snapshot)
        elif config.init_from:
            self._start_from(config.init_from)

        self.batches: list[Any] = []
        """Those of the latest step."""
        self.window = Window(config.log_every, device, lambda values: average(values, dims))
        self.timer = StepTimer(device)
        self.step_seconds: list[float] = []
        self.waits: list[float] = []
        self.waited = 0.0
        self.metrics = MetricsFile(output / "metrics.jsonl")
        if dims.main:
            self.metrics.rewind(self.step if snapshot else -1, again=self._told_again())
        self.board: TensorBoard | None = None
        if tensorboard and dims.main:
            self.board = TensorBoard(output / "tensorboard", resumed_at=self.step)

    def go(self, lock: RunLock, stop: StopRequest) -> TrainResult:
        """Train to the end, or until asked to stop."""
        try:
            self._announce()
            if self.resumed_at and self._evaluation_is_due():
                self._evaluate()
            while self.step < self.schedule.total:
                if not len(self.window):
                    self._open_window()
                self._train_step()
                lock.touch()
                beat(self.step)
                if self.schedule.logs(self.step):
                    self._log()
                self._stop_if_asked(stop)
                if self._evaluation_is_due():
                    self._evaluate()
                if self.schedule.saves(self.step):
                    self._save()
                self._stop_if_asked(stop)
            return self._finish()
        finally:
            self.display.end()

    def _stop_if_asked(self, stop: StopRequest) -> None:
        """Save and raise, unless the run is at its end anyway. An evaluation that is due is left to the next life.

        Ranks hear of a signal at different times, or not at all: they act one step later, when all know.
        """
        asked = signal.Signals(heard) if (heard := self.ballot.turn(stop.signal or 0)) else None
        if asked is None or self.step == self.schedule.total:
            return
        if len(self.window):
            self._log()
        self._save(stopping=True)
        raise SavedRequeue(
            f"Stopped by {asked.name} after step {self.step}, which is saved in {self.folder}. "
            f"The same command goes on from there."
        )

    def _told_again(self) -> set[str]:
        """Events that this life will record at the very step it goes on from."""
        return {"resume", "prediction"} | ({"evaluation"} if self._evaluation_is_due() else set())

    def _evaluation_is_due(self) -> bool:
        return self.schedule.evaluates(self.step) and self.evaluated_at != self.step

    def close(self) -> None:
        """End threads, processes and files. A save in flight is let finish; its failure is in the log."""
        if self.saver:
            with suppress(PenstockError, RuntimeError):
                self.saver.close()
        self.loader.close()
        self.metrics.close()
        if self.board:
            self.board.close()

    def _loader(self, source: Source, *, augment: Augment | None = None, endless: bool = True) -> Loader:
        """This rank's batches of a split: endless for training, else one pass."""
        seed = self.config.seed if endless else 0
        return Loader(
            source,
            self.task.prepare(source, self.config.model, augment=augment, seed=seed),
            batch=self.config.plan.micro_batch,
            seed=seed,
            device=self.device,
            workers=self.config.data.workers,
            rank=self.dims.data_rank,
            world=self.dims.data_world,
            endless=endless,
        )

    def _open_window(self) -> None:
        self.waited = self.loader.wait_seconds
        self.timer.start()

    def _train_step(self) -> None:
        """One optimizer step. Nothing here waits for the device."""
        recipe = self.config.recipe
        set_learning_rate(self.built.optimizer, learning_rate(self.step, recipe, self.schedule.total))
        self.batches = [next(self.loader) for _ in range(self.config.plan.accumulate)]
        result = self.built.step(self.batches)
        self.window.add(result.loss, result.grad_norm)
        self.step += 1
        self.timer.lap()

    def _log(self) -> None:
        """Fetch and record the window: the one place at which the host waits for the device."""
        with naming_overflow(self.built.step, self.batches):
            require_scale(self.built.scaler, self.step)
            read = self.window.read(self.step, guarded=self.watch.guard is not None)
            found = self.watch.see(self.step, read.losses)
        seconds = self.timer.read()
        waited = self.loader.wait_seconds - self.waited
        self.step_seconds += seconds
        self.waits.append(waited)
        self.loss = statistics.fmean([loss for loss in read.losses if math.isfinite(loss)] or [self.loss])
        self._record(
            "steps",
            epoch=self.schedule.epoch(self.step),
            loss=self.loss,
            losses=read.losses,
            grad_norm=read.grad_norm,
            lr=learning_rate(self.step - 1, self.config.recipe, self.schedule.total),
            **self.meter.speed(seconds, waited),
            memory_bytes=peak_memory(self.device),
            **found,
        )
        if self.watch.leaps:
            self._rewind(self.watch.leaps)

    def _rewind(self, leaps: list[int]) -> None:
        """Become what the newest checkpoint holds, but go on with the samples after the leap."""
        self._settle_saves()
        snapshot = checkpoint.find(self.folder)
        if snapshot is None:
            if self.dims.main:
                _log.warning("There is no checkpoint yet to go back to; the run goes on.")
            return
        number = self.watch.count_rewind()
        self.step = self.saved_at = snapshot.step
        self._restore(snapshot, rewinding=True)
        self.evaluated_at = self.evaluated_at if self.evaluated_at <= self.step else 0
        if self.dims.main:
            self.metrics.rewind(self.step, again=self._told_again())
        self._record("rewind", leaps=leaps, number=number)

    def _record(self, event: str, **values: Any) -> None:
        if not self.dims.main:
            return
        record = {"event": event, "step": self.step, **values}
        self.metrics.write(record)
        self.display.show(record)
        if self.board:
            self.board.write(record)

    def _announce(self) -> None:
        """Say what runs and what was predicted of it, before the first step."""
        self.display.begin(self.schedule.total, self.step, self.task)
        self._record(
            "resume" if self.resumed_at else "start",
            plan=self.config.plan.line(),
            machine=self.machine.name,
            device=str(self.device),
            peak=self.meter.peak,
            parameters=sum(parameter.numel() for parameter in self.built.model.parameters()),
            model=self.task.describe_model(self.config.model),
            unit=self.task.unit,
            data=self.config.data.source,
            samples=self.schedule.samples,
            batch=self.schedule.batch,
            total=self.schedule.total,
            output=str(self.output),
        )
        self._record("prediction", **_of_prediction(self.prediction))

    def _evaluate(self) -> None:
        """Evaluate on the whole validation split: the EMA weights where there are any, else the weights."""
        started = time.perf_counter()
        task, model, dims = self.task, self.built.model, self.dims
        loader = self._loader(self.val_source, endless=False)
        rounds = math.ceil(len(self.val_source) / (loader.batch * dims.data_world))
        blank = task.blank(self.config.model, self.device)
        with loader, self._final_weights():
            batches = beating(loader, self.step)
            self.evaluation = evaluate(task, model, batches, dims=dims, rounds=rounds, blank=blank)
        self.evaluated_at = self.step
        self._record(
            "evaluation",
            epoch=self.schedule.epoch(self.step),
            **self.evaluation.record(),
            ema=self.config.recipe.ema_decay is not None,
            seconds=time.perf_counter() - started,
        )

    @contextmanager
    def _final_weights(self) -> Iterator[None]:
        """Inside, the model is as it will be used: in evaluation mode, with the EMA weights where there are any."""
        averages = self.built.ema.swapped() if self.built.ema else nullcontext()
        with self.built.inference(), averages:
            yield

    def _start_from(self, path: str) -> None:
        loaded = load_weights(self.built.model, path, new_head=True)
        if self.built.ema:
            self.built.ema.load_state_dict(dict(self.built.model.named_parameters()))
        _log.warning("Starting from %s: %s", path, loaded)

    def _find_snapshot(self, resume: bool) -> Stored | None:
        """The checkpoint to go on from, which all ranks have verified together; none of its tensors is read yet."""

        def all_aside() -> None:
            for name in ("checkpoints", "metrics.jsonl", "tensorboard", "export"):
                set_aside(self.output / name)

        if not resume:
            main_first(all_aside, self.dims)
            return None
        checkpoint.clean(self.folder)
        snapshot = checkpoint.find(self.folder)
        if snapshot is None:
            return None
        # Read as a configuration first: a setting that is newer than the checkpoint had its default then.
        stored = from_dict(RunConfig, snapshot.config, origin=f"the checkpoint of step {snapshot.step}")
        for change in changes(to_dict(stored), to_dict(self.config)):
            if self.dims.main:
                _log.warning("Resuming with a change: %s Results are no longer bit for bit the same.", change)
        return snapshot

    def _save(self, *, stopping: bool = False) -> None:
        """Commit everything that the future of the run depends on; unless `stopping`, only where it looks sound."""
        last = stopping or self.step == self.schedule.total
        if last:
            self._settle_saves()
        if self.saved_at == self.step:
            return
        if self.watch.looks_before_saving and len(self.window):
            before = self.step
            self._log()
            if self.step != before:
                return
        if not stopping and self.step < self.schedule.total and self.watch.unsettled():
            return
        beat(self.step)
        started = time.perf_counter()
        together(lambda: require_finite(self.built.model, self.step), self.dims)
        weights = {"weights": self.built.model.state_dict()}
        if self.built.ema is not None:
            weights["ema"] = self.built.ema.state_dict()
        snapshot = Snapshot(
            step=self.step,
            weights=weights,
            state={
                "optimizer": checkpoint.by_name(self.built.optimizer.state_dict()),
                "scaler": self.built.scaler.state_dict() if self.built.scaler else None,
                "watch": self.watch.state_dict(),
                "loader": self.loader.state_dict(),
                "random": random_states(self.device, self.dims),
                "progress": {
                    "loss": self.loss,
                    "evaluated_at": self.evaluated_at,
                    "evaluation": self.evaluation.record() if self.evaluation else None,
                },
            },
            config=to_dict(self.config),
            plan=self.config.plan.line(),
        )
        if self.saver and not last:
            self.saver.start(snapshot)
        else:
            checkpoint.save(self.folder, snapshot, keep=self.config.keep)
        path = self.folder / f"step-{self.step}"
        self.saved_at = self.step
        beat(self.step)
        self._record("checkpoint", path=str(path), seconds=time.perf_counter() - started)

    def _settle_saves(self) -> None:
        """Wait for a save in flight; raises what it failed with."""
        if self.saver:
            self.saver.wait()

    def _restore(self, stored: Stored, *, rewinding: bool = False) -> None:
        """Become what `_save` saw, but for the stream of samples when `rewinding`; the random generators last, for
        building has drawn from them. Each rank reads what it holds, whatever number of ranks saved it.
        """
        model, optimizer = self.built.model, self.built.optimizer
        snapshot = stored.load(dict(model.named_parameters()), rank=self.dims.rank, world=self.dims.size)
        model.load_state_dict(snapshot.weights["weights"])
        if self.built.ema is not None:
            self.built.ema.load_state_dict(snapshot.weights["ema"])
        optimizer.load_state_dict(checkpoint.by_index(snapshot.state["optimizer"], optimizer.state_dict()))
        if self.built.scaler:
            self.built.scaler.load_state_dict(snapshot.state["scaler"])
        if "watch" in snapshot.state:  # earlier versions wrote none
            self.watch.load_state_dict(snapshot.state["watch"], rewinding=rewinding)
        if not rewinding:
            self.loader.load_state_dict(snapshot.state["loader"])
        progress = snapshot.state["progress"]
        self.loss = progress["loss"]
        self.evaluated_at = progress["evaluated_at"]
        self.evaluation = Evaluation.of_record(progress["evaluation"]) if progress["evaluation"] else None
        restore_random(
            snapshot.state["random"], self.device, self.dims, seed=self.config.seed, step=self.step
        )

    def _finish(self) -> TrainResult:
        """Export what was evaluated, and set what was predicted beside what was measured."""
        assert self.evaluation is not None  # the last step evaluates before it saves
        export = self.output / "export"
        partial = self.output / "export.tmp"

        model = self.built.model
        with self._final_weights():
            weights = whole_state(model, self.dims)

        def write() -> None:
            shutil.rmtree(partial, ignore_errors=True)
            assert isinstance(model, ViT)
            save_pretrained(model, partial, weights=weights)
            set_aside(export)
            partial.rename(export)

        main_first(write, self.dims)
        if self.step_seconds:
            # The first steps compile, allocate and choose kernels.
            settled = self.step_seconds[min(5, len(self.step_seconds) // 2) :]
            share = sum(settled) / sum(self.step_seconds)
            measured = self.meter.speed(settled, sum(self.waits) * share)
            self._record(
                "summary",
                predicted=_of_prediction(self.prediction),
                measured=measured | used_memory(self.device, before=self.memory_before),
            )
        return TrainResult(
            steps=self.step,
            resumed_at=self.resumed_at,
            loss=self.loss,
            evaluation=self.evaluation,
            output=self.output,
            export=export,
            metrics=self.output / "metrics.jsonl",
        )


def _of_prediction(prediction: Prediction) -> dict[str, float]:
    names = ("iteration_seconds", "samples_per_second", "memory_bytes", "mfu", "hfu")
    return {name: getattr(prediction, name) for name in names}
