"""Tasks that a model is trained for: one protocol for the training loop, evaluation and the ladder.

A new task is one file next to this one and a row of `penstock.config.tasks.TASKS`.
"""

from __future__ import annotations

import copy
import math
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from penstock.config.model import ModelConfig
from penstock.config.run import Augment, DataConfig
from penstock.data.loader import HostBatch, as_tensor
from penstock.data.source import Pixels, Source, Split
from penstock.tasks.class_counts import ClassCounts
from penstock.tasks.peers import Peers

Loss = Callable[[nn.Module, Any], Tensor | tuple[Tensor, Tensor | float]]
"""A function that runs the model on a batch, in any form, and returns its mean loss, 0-d: a `Task`, or a user's
function. A `Task` counts targets, and the loss of a step is the mean over all its targets. If a function returns only a
loss, the loss of a step is the mean of its micro-batches' means. It may return (sum, count) instead: the summed loss,
0-d, and the number of its targets, a number or 0-d."""
Prepare = Callable[[Any, torch.device], Any]
"""A function that turns data of a source (`penstock.data.loader.HostBatch`) into a batch on the device; never waits."""


class Fullness(NamedTuple):
    """Typical size of a source's batches."""

    model: ModelConfig
    """The model with the average length of samples, padding included."""
    real: float = 1.0
    """Share of an encoder's tokens that are not padding."""
    words: float = 1.0
    """Share of tokens that are targets of the loss."""


class Task(ABC):
    """The form of a batch, the loss of a model's outputs for it, and how a model is evaluated. Batches have a length,
    in samples. Forward pass and loss are separate, so that they can run on different ranks."""

    unit: str
    """Name of a sample, in the plural."""
    size_setting: str
    """The setting that reduces the size of each sample."""
    augments: frozenset[str] = frozenset()
    """Fields of `recipe.augment` that the task supports."""
    compares: bool = False
    """Whether the loss compares samples with each other, across all ranks."""
    peers: Peers = Peers()
    """Ranks whose samples are compared with this rank's."""
    means: tuple[str, ...] = ("loss",)
    """Names of the metrics, if each is one of `tally`'s sums divided by the number of samples."""
    shown: tuple[str, ...] = ("loss {loss:.4f}",)
    """Parts of `describe`, each with metrics by name; parts with missing metrics are left out."""
    ranked_by: tuple[str, ...] = ("loss",)
    """Metrics by which evaluations are compared, in order of priority: higher is better, for losses lower."""
    losses: tuple[str, ...] = ()
    """Names of the losses, if there are several. Then `loss` returns the mean of each, (H,), `targets` the number of
    targets of each, (H,), and the loss of a step is the sum of the means."""
    teacher: Callable[[Task, nn.Module, Any], Tensor] | None = None
    """Computes the loss of a training step instead of `loss`; see `penstock.tasks.teacher`."""

    # -- data

    @abstractmethod
    def open(self, data: DataConfig, model: ModelConfig, split: Split) -> Source:
        """Open the samples of a split, in the form that the model needs. Raises ConfigError and DataError."""

    @abstractmethod
    def fit(self, model: ModelConfig, source: Source) -> ModelConfig:
        """The model, adapted to the data. Raises ConfigError if it contradicts the data."""

    @abstractmethod
    def prepare(
        self, source: Source, model: ModelConfig, *, augment: Augment | None = None, seed: int = 0
    ) -> Prepare:
        """The function by which a Loader makes batches: without `augment` as in evaluation."""

    @abstractmethod
    def blank(self, model: ModelConfig, device: torch.device) -> tuple[Any, ...]:
        """Arguments of the model for one blank sample, for a rank that must take part without samples."""

    def fullness(self, source: Source, model: ModelConfig, batch: int) -> Fullness:
        """Typical size of batches of `batch` samples, for predictions."""
        return Fullness(model)

    # -- training

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        """The model's arguments for a batch: its `inputs`."""
        return batch.inputs  # type: ignore[no-any-return]

    @abstractmethod
    def loss(self, outputs: Any, batch: Any) -> Tensor:
        """Mean loss of the model's outputs over the batch's `targets`, 0-d; 0 where there is none."""

    def targets(self, batch: Any) -> Tensor | float:
        """The number of targets over which `loss` averages: a number, or 0-d on the device. It is the batch's weight in
        the loss of a step. Needs no forward pass and does not wait; by default the number of samples."""
        return len(batch)

    def counted(self, batch: Any) -> Tensor | None:
        """Whether `loss` counts each sample of a batch, (B,), for tasks whose outputs are classes; None: all count."""
        return None

    def taught_by(self, teacher: Callable[[Task, nn.Module, Any], Tensor]) -> Self:
        """A copy of the task with a teacher, which evaluations do not use."""
        return self.changed(teacher=teacher)

    def among(self, peers: Peers) -> Self:
        """A copy of the task for a rank with these peers."""
        return self.changed(peers=peers)

    def changed(self, **attributes: Any) -> Self:
        """A copy of the task with other values of these attributes."""
        task = copy.copy(self)
        vars(task).update(attributes)
        return task

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Forward pass and loss in one, 0-d, including the teacher's part if there is one."""
        losses = self.separate(model, batch)
        return losses.sum() if losses.dim() else losses

    def separate(self, model: nn.Module, batch: Any) -> Tensor:
        """The same as `__call__`, but with `losses` it returns the losses separately, (H,)."""
        if self.teacher is not None:
            return self.teacher(self, model, batch)
        return self.loss(model(*self.inputs(batch)), batch)

    def tokens(self, batch: Any) -> int:
        """Tokens of a batch that are not padding, to report tokens per second; 0 if samples are not text."""
        return 0

    # -- evaluation

    def tally(self, outputs: Any, batch: Any) -> Tensor:
        """The batch's contribution to the sums behind the metrics: (K,) float64, on the device, K the same for all
        batches of a split. By default the sum of losses, for a loss that is the mean over samples."""
        return self.loss(outputs, batch).double()[None] * len(batch)

    def assess(self, model: nn.Module, batch: Any) -> Tensor:
        """Forward pass and tally in one, in evaluation mode; tasks that generate text do so here."""
        return self.tally(model(*self.inputs(batch)), batch)

    def accompany(self, model: nn.Module, blank: tuple[Any, ...]) -> None:
        """The forward passes of `assess` on a blank sample, for a rank without samples whose model is sharded."""
        model(*blank)

    def metrics(self, samples: int, sums: Sequence[float]) -> dict[str, float]:
        """Metrics by name, for `samples` samples with these sums."""
        return dict(zip(self.means, (total / samples for total in sums), strict=True))

    def class_counts(self, sums: Sequence[float]) -> ClassCounts | None:
        """Counts by class in these sums; None for tasks without classes."""
        return None

    def merit(self, metrics: Mapping[str, float]) -> tuple[float, ...]:
        """The merit of an evaluation, for comparison: larger is better."""
        values = [
            -metrics[name] if name == "loss" else metrics[name] for name in self.ranked_by if name in metrics
        ]
        return tuple(-math.inf if math.isnan(value) else value for value in values)

    def describe(self, metrics: Mapping[str, float | None]) -> str:
        """Metrics as text for people. None stands for a value that is not finite."""
        values = {name: _NotFinite() if value is None else value for name, value in metrics.items()}
        names = [{name for _, name, _, _ in string.Formatter().parse(part) if name} for part in self.shown]
        return "  ".join(
            part.format_map(values) for part, of in zip(self.shown, names) if of <= values.keys()
        )

    @abstractmethod
    def describe_model(self, model: ModelConfig) -> str:
        """The model's outputs, in a few words."""

    def sample(self, model: nn.Module, source: Source, device: torch.device) -> str:
        """A few lines that show people the model's output for a sample; empty if there is nothing to show. The model is
        in evaluation mode and without gradients; ranks that share its weights must all call this."""
        return ""

    def pictures(self, source: Source) -> list[Pixels]:
        """Some samples of a split as images (H, W, C), for people; empty for tasks without images."""
        return []

    def answers(self, model: nn.Module, source: Source, device: torch.device) -> list[SampleAnswer]:
        """The model's answers to the samples of `pictures`; called like `sample`."""
        return []


class SampleAnswer(NamedTuple):
    """A model's answer to one sample."""

    true: str
    answer: str
    probability: float


class _NotFinite:
    """A value that is not finite, in any format."""

    def __format__(self, form: str) -> str:
        return "not finite"


def samples_over(source: Source, count: int) -> HostBatch:
    """Evenly spaced samples of a split, as a Loader would read them."""
    return read_samples(source, np.unique(np.linspace(0, len(source) - 1, count).astype(np.int64)))


def read_samples(source: Source, numbers: NDArray[np.int64]) -> HostBatch:
    """Samples of a split, as a Loader would read them."""
    read = np.empty(len(numbers), source.sample)
    reading = source.read_into(numbers, read)
    return HostBatch(as_tensor(read), reading.ids, numbers, reading.bad)


def mean_loss(loss: Loss, model: nn.Module, batch: Any) -> Tensor:
    """The mean loss of one batch, for a loss function of either form."""
    value = loss(model, batch)
    mean: Tensor = value[0] / value[1] if isinstance(value, tuple) else value
    return mean


def plain(value: float | None, form: str) -> str:
    """A metric as text for people; None stands for a value that is not finite."""
    return format(_NotFinite() if value is None else value, form)
