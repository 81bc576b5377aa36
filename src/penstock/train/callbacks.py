"""Callbacks of your own during a run: a class with a method for each event."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

Record = Mapping[str, Any]
"""An event as it is written to `metrics.jsonl`: `event`, `step` and its numbers, by name."""


class Callback:
    """Override what you need, and pass an instance to `penstock.train.train(config, callbacks=[…])`.

    Each method gets the record that also goes to `metrics.jsonl`. They are called on rank 0 only, in the order of the
    list. An exception ends the run, after the files are closed. Nothing that a callback does may change the model: a
    run must come out the same with and without it.
    """

    def on_start(self, record: Record) -> None:
        """Called before the first step. `event` is `start` or `resume`; `output` is the run's folder, `total` its
        steps."""

    def on_step(self, record: Record) -> None:
        """Called after every `log_every` steps, which is when numbers come from the device: `loss` is their mean,
        `losses` holds each, `lr`, `grad_norm` and `samples_per_second` are those of the latest. With `log_every=1` it
        is called after each step, and the host waits for the device as often."""

    def on_evaluation(self, record: Record) -> None:
        """Called after an evaluation: the task's metrics by name, `samples` and `seconds`."""

    def on_save(self, record: Record) -> None:
        """Called after a checkpoint: `path` is its folder, `seconds` its duration. In the background, it is under
        way."""

    def on_record(self, record: Record) -> None:
        """Called with every record, after the method for its kind; also with those that no other method gets."""

    def on_end(self) -> None:
        """The run has ended, for whatever reason; close what is open."""


_METHODS = {
    "start": "on_start",
    "resume": "on_start",
    "steps": "on_step",
    "evaluation": "on_evaluation",
    "checkpoint": "on_save",
}


def call_method(callback: Callback, record: Record) -> None:
    """Call the method for this record, if there is one, and `on_record`."""
    if (method := _METHODS.get(record["event"])) is not None:
        getattr(callback, method)(record)
    callback.on_record(record)


def numbers(record: Record) -> Iterator[tuple[str, float]]:
    """Every finite number of a record under `event/name`, the form that trackers take."""
    for name, value in record.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and name != "step" and math.isfinite(value):
            yield f"{record['event']}/{name}", value
