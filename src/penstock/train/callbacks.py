"""Callbacks during a run: a class with a method for each event, for your own code or for an experiment tracker."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from penstock.boundary.files import own_file
from penstock.boundary.trees import read_tree
from penstock.config.convert import nearest
from penstock.disk import write_file
from penstock.errors import ConfigError, EnvironmentProblem

Record = Mapping[str, Any]
"""An event as in `metrics.jsonl`: `event`, `step` and its numbers, by name."""


class Callback:
    """Override the methods you need, and pass an instance to `penstock.train.train(config, callbacks=[…])`.

    Each method gets the record that also goes to `metrics.jsonl`. They are called on rank 0 only, in the order of the
    list. An exception ends the run, after the files are closed. A callback must not change the model: a run must have
    the same results with and without it.
    """

    def on_start(self, record: Record) -> None:
        """Called before the first step. `event` is `start` or `resume`, `output` the folder, `total` its steps."""

    def on_step(self, record: Record) -> None:
        """Called after every `log_every` steps, when numbers are read from the device: `loss` is their mean, `losses`
        holds each; `lr`, `grad_norm` and `samples_per_second` are the latest. With `log_every=1` it is called after
        each step, and the host waits for the device just as often."""

    def on_evaluation(self, record: Record) -> None:
        """Called after an evaluation: the task's metrics by name, `samples` and `seconds`."""

    def on_save(self, record: Record) -> None:
        """Called after a checkpoint: `path` is its folder, `seconds` the time that the run waited for it. With
        `save_in_background` it may not be complete yet."""

    def on_record(self, record: Record) -> None:
        """Called with every record, of whatever event; after the method for its event, if there is one."""

    def on_end(self) -> None:
        """Called when the run has ended, for whatever reason; close open files and connections."""


_METHODS = {
    "start": "on_start", "resume": "on_start", "steps": "on_step", "evaluation": "on_evaluation",
    "checkpoint": "on_save",
}  # fmt: skip


def call_method(callback: Callback, record: Record) -> None:
    """Call the method for this record, if there is one, and `on_record`."""
    if (method := _METHODS.get(record["event"])) is not None:
        getattr(callback, method)(record)
    callback.on_record(record)


def is_number(value: Any) -> bool:
    """Whether a value of a record is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


_ID = "tracker.json"
"""File in the run's folder with each tracker's ID of the run, so that a resumed run continues it."""


TrackedRun = Iterator[tuple[Callable[[dict[str, float], int], None], str | None]]
"""Begins a run, or continues an earlier one, in a tracker, and ends it there. Yields a function that logs numbers by
name at a step, and the ID by which the tracker can continue the run, None if it needs none."""


class Tracker(Callback):
    """Passes every finite number of a run to a tracker, as `event/name` with its step."""

    def __init__(self, name: str, package: str, extra: str, begin: Callable[..., TrackedRun]) -> None:
        try:
            self._package = import_module(package)
        except ImportError as error:
            raise EnvironmentProblem(
                f"--track needs the package {package}, which cannot be imported ({error}). Install it with: "
                f"pip install 'penstock[{extra}]', or leave --track out."
            ) from None
        self._name, self._begin, self._ends = name, contextmanager(begin), ExitStack()

    def on_start(self, record: Record) -> None:
        output = Path(record["output"])
        stored = read_tree(output / _ID, "The list of trackers") if (output / _ID).exists() else {}
        known = {name: value for name, value in stored.items() if name in TRACKERS and isinstance(value, str)}
        facts = {name: value for name, value in record.items() if name not in ("event", "step")}
        begun = self._begin(self._package, record, facts, known.get(self._name) or None)
        self._log, identity = self._ends.enter_context(begun)
        if identity is not None:
            known[self._name] = identity
            write_file(own_file(output, _ID), [json.dumps(known).encode()])

    def on_step(self, record: Record) -> None:
        numbers = {name: value for name, value in record.items() if name != "step" and is_number(value)}
        self._log({f"{record['event']}/{name}": n for name, n in numbers.items()}, record["step"])

    on_evaluation = on_step

    def on_end(self) -> None:
        self._ends.close()


def _tensorboard(package: Any, record: Record, facts: Mapping[str, Any], identity: str | None) -> TrackedRun:
    """Event files in OUTPUT/tensorboard, written by tensorboardX."""
    # purge_step makes TensorBoard forget the steps that the run will repeat.
    purge = record["step"] + 1 if record["event"] == "resume" else None
    writer = package.SummaryWriter(str(own_file(record["output"], "tensorboard")), purge_step=purge)

    def log(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    with closing(writer):
        yield log, None


def _wandb(package: Any, record: Record, facts: Mapping[str, Any], identity: str | None) -> TrackedRun:
    """A run of Weights & Biases. Project, entity and mode are wandb's own settings (WANDB_PROJECT, WANDB_MODE=offline);
    the default project is `penstock`."""
    settings = package.Settings() if hasattr(package, "Settings") else None
    run = package.init(
        project=getattr(settings, "project", None) or "penstock", name=Path(record["output"]).name,
        dir=record["output"], id=identity, resume="allow" if identity else None, config=facts,
    )  # fmt: skip
    yield lambda values, step: run.log(values, step=step), run.id
    run.finish()


def _mlflow(package: Any, record: Record, facts: Mapping[str, Any], identity: str | None) -> TrackedRun:
    """A run of MLflow. MLflow's own variables set its destination: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME."""
    run = package.start_run(run_id=identity, run_name=None if identity else Path(record["output"]).name)
    try:
        if not identity:
            package.log_params(facts)
        yield lambda values, step: package.log_metrics(values, step=step), run.info.run_id
    finally:
        package.end_run()


TRACKERS: dict[str, tuple[str, str, Callable[..., TrackedRun]]] = {
    "tensorboard": ("tensorboardX", "track", _tensorboard), "wandb": ("wandb", "wandb", _wandb),
    "mlflow": ("mlflow", "mlflow", _mlflow),
}  # fmt: skip
"""For each tracker: its package, Penstock's extra that installs it, and a function that begins or continues a run."""


def trackers(names: str) -> list[Callback]:
    """The trackers in a list of names with commas between them. Raises ConfigError for an unknown name,
    EnvironmentProblem if its package is missing."""
    chosen = [name for part in names.split(",") if (name := part.strip())]
    for name in chosen:
        if name not in TRACKERS:
            raise ConfigError(
                f"There is no tracker {name!r}.{nearest(name, TRACKERS)} Give --track one of {', '.join(TRACKERS)}, or "
                f"several with commas between them."
            )
    return [Tracker(name, *TRACKERS[name]) for name in chosen]
