"""The data on which compression runs a model, by the model's task: batches for calibration, and a score in points."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from torch import nn

from penstock.boundary.hub import local_weights
from penstock.compress.calibrate import Batches
from penstock.config.run import DataConfig
from penstock.config.tasks import TaskName
from penstock.data import Loader
from penstock.models.convert.pretrained import read_config
from penstock.tasks import task_of
from penstock.train.evaluate import evaluate

_SHARES = ("exact_match", "top1", "spearman", "accuracy", "recall_at_1")
"""Metrics that are shares; the score is the first of these that a task has."""
_BATCH = 32


@dataclass(frozen=True, slots=True)
class QuantiseData:
    """The data on which a model is run while it is quantised."""

    batches: Callable[[], Batches]
    """Makes the calibration batches, as arguments of the model: the same ones each time."""
    score: Callable[[nn.Module], float] | None = None
    """Evaluates a model, in points: higher is better."""
    timed: int | None = None
    """Samples of the pass that `QuantiseOptions.speed` must make faster; None: a batch's."""


def task_data(
    model: str | Path, data: DataConfig, *, task: TaskName = "auto", samples: int = 256, batch: int = _BATCH
) -> QuantiseData:
    """Batches of `samples` samples of the training split, and the score on the whole validation split, for the model in
    a folder.

    Points are 100 times the share of correct samples. If a task counts no such share, they are −100 times the mean loss
    in nats: then a point is 1 % of perplexity.

    Raises ConfigError for a task or data that do not fit the model, and DataError for data that cannot be read.
    """
    folder = local_weights(model)
    config = read_config(folder)
    chosen = task_of(config, task, init_from=str(folder))
    train, validation = (chosen.open(data, config, split) for split in ("train", "val"))
    config = chosen.fit(config, train)
    size = min(batch, samples, len(train))

    def batches() -> Iterator[tuple[Any, ...]]:
        with Loader(train, chosen.prepare(train, config), batch=size, workers=data.workers) as loader:
            for samples_of_batch in islice(loader, -(-samples // size)):
                yield chosen.inputs(samples_of_batch)

    def score(module: nn.Module) -> float:
        prepare = chosen.prepare(validation, config)
        with Loader(validation, prepare, batch=batch, workers=data.workers, endless=False) as loader:
            return points(evaluate(chosen, module, loader).metrics)

    return QuantiseData(batches, score)


def points(metrics: Any) -> float:
    """The score of an evaluation: see `task_data`."""
    share = next((metrics[name] for name in _SHARES if name in metrics), None)
    return float(-100 * metrics["loss"] if share is None else 100 * share)
