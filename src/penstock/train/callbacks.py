"""Callbacks during a run: a class with a method for each event, for your own code or for an experiment tracker."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
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
        """Called after a checkpoint: `path` is its folder, `seconds` its duration. A background save goes on."""

    def on_record(self, record: Record) -> None:
        """Called with every record, after the method for its event, and with those that have no such method."""

    def on_end(self) -> None:
        """The run has ended, for whatever reason; close open files and connections."""


_METHODS = {
    "start": "on_start", "resume": "on_start", "steps": "on_step", "evaluation": "on_evaluation",
    "checkpoint": "on_save",
}  # fmt: skip


def call_method(callback: Callback, record: Record) -> None:
    """Call the method for this record, if there is one, and `on_record`."""
    if (method := _METHODS.get(record["event"])) is not None:
        getattr(callback, method)(record)
    callback.on_record(record)


def numbers(record: Record) -> Iterator[tuple[str, float]]:
    """Every finite number of a record under the name `event/name`, as trackers expect it."""
    for name, value in record.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and name != "step" and math.isfinite(value):
            yield f"{record['event']}/{name}", value


_ID = "tracker.json"
"""File in the run's folder with the identity by which a tracker knows the run, so that a resumed run continues it."""


class _Tracker(Callback):
    """Passes every number on as `event/name`, with its step, to the method `log` of a subclass."""

    def log(self, values: dict[str, float], step: int) -> None:
        raise NotImplementedError

    def on_step(self, record: Record) -> None:
        self.log(dict(numbers(record)), record["step"])

    on_evaluation = on_step


class TensorBoard(_Tracker):
    """Event files in OUTPUT/tensorboard, written by tensorboardX."""

    def __init__(self) -> None:
        self._make = _import("tensorboardX", "track").SummaryWriter
        self._writer: Any = None

    def on_start(self, record: Record) -> None:
        # purge_step makes TensorBoard forget the steps that the run will repeat.
        purge = record["step"] + 1 if record["event"] == "resume" else None
        self._writer = self._make(str(own_file(record["output"], "tensorboard")), purge_step=purge)

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def on_end(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandB(_Tracker):
    """A run of Weights & Biases. Project, entity and mode are wandb's own settings (WANDB_PROJECT, WANDB_MODE=offline);
    the default project is `penstock`.
    """

    def __init__(self) -> None:
        self._wandb = _import("wandb", "wandb")
        self._run: Any = None

    def on_start(self, record: Record) -> None:
        output = Path(record["output"])
        identity = _identities(output).get("wandb")
        settings = self._wandb.Settings() if hasattr(self._wandb, "Settings") else None
        self._run = self._wandb.init(
            project=getattr(settings, "project", None) or "penstock", name=output.name, dir=str(output),
            id=identity, resume="allow" if identity else None, config=_facts(record),
        )  # fmt: skip
        _remember(output, "wandb", self._run.id)

    def log(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def on_end(self) -> None:
        if self._run is not None:
            self._run.finish()


class MLflow(_Tracker):
    """A run of MLflow. MLflow's own variables set its destination: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME."""

    def __init__(self) -> None:
        self._mlflow = _import("mlflow", "mlflow")
        self._started = False

    def on_start(self, record: Record) -> None:
        output = Path(record["output"])
        identity = _identities(output).get("mlflow")
        run = self._mlflow.start_run(run_id=identity, run_name=None if identity else output.name)
        self._started = True
        if not identity:
            self._mlflow.log_params(_facts(record))
        _remember(output, "mlflow", run.info.run_id)

    def log(self, values: dict[str, float], step: int) -> None:
        self._mlflow.log_metrics(values, step=step)

    def on_end(self) -> None:
        if self._started:
            self._mlflow.end_run()


TRACKERS: dict[str, Callable[[], Callback]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


def trackers(names: str) -> list[Callback]:
    """Trackers by name, separated by commas.

    Raises ConfigError for an unknown name, EnvironmentProblem if its package is missing.
    """
    chosen = []
    for name in filter(None, (part.strip() for part in names.split(","))):
        if name not in TRACKERS:
            raise ConfigError(
                f"There is no tracker {name!r}.{nearest(name, TRACKERS)} Give --track one of {', '.join(TRACKERS)}, or "
                f"several with commas between them."
            )
        chosen.append(TRACKERS[name]())
    return chosen


def _import(package: str, extra: str) -> Any:
    try:
        return import_module(package)
    except ImportError as error:
        raise EnvironmentProblem(
            f"--track needs the package {package}, which cannot be imported ({error}). Install it with: "
            f"pip install 'penstock[{extra}]', or leave --track out."
        ) from None


def _facts(record: Record) -> dict[str, Any]:
    """Facts about a run that a tracker lists in addition to its curves."""
    return {name: value for name, value in record.items() if name not in ("event", "step")}


def _identities(output: Path) -> dict[str, str]:
    """The identities by which trackers know the run in this folder, by tracker."""
    listed = read_tree(output / _ID, "The list of trackers") if (output / _ID).exists() else {}
    return {name: one for name, one in listed.items() if name in TRACKERS and isinstance(one, str) and one}


def _remember(output: Path, tracker: str, identity: str) -> None:
    identities = {**_identities(output), tracker: identity}
    write_file(own_file(output, _ID), [json.dumps(identities).encode()])
