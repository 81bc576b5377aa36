"""Tasks that a model is trained for: one protocol, which the training loop, evaluation and the ladder know instead of
images.

A new task is one file beside this one and a line in `task_of`.
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
from penstock.data.loader import HostBatch
from penstock.data.source import Pixels, Source, Split
from penstock.tasks.class_counts import ClassCounts
from penstock.tasks.peers import Peers

Loss = Callable[[nn.Module, Any], Tensor | tuple[Tensor, Tensor | float]]
"""Runs the model on a batch, in whatever form the data come, and returns its mean loss, 0-d. A `Task` is one; so is a
function of the user's own. The loss of a step is then the mean over all its targets, which a `Task` counts. A function
that returns a loss alone counts nothing, and the loss of a step is the mean of its micro-batches' means. It may return
(sum, count) instead, the summed loss, 0-d, and the number of its targets, a number or 0-d."""
Prepare = Callable[[Any, torch.device], Any]
"""Makes of what a source has read (`penstock.data.loader.HostBatch`) the batch on the device. Waits for nothing."""


class Fullness(NamedTuple):
    """Typical size of a source's batches."""

    model: ModelConfig
    """The model with samples as long as they are on average, padding included."""
    real: float = 1.0
    """Share of an encoder's tokens that are no padding."""
    words: float = 1.0
    """Share of tokens whose words the loss asks for."""


class Task(ABC):
    """How a batch looks, the loss of a model's outputs for it, and how a model is evaluated.

    Batches have a length, in samples. A forward pass and the loss are apart, so that they can run on different ranks.
    """

    unit: str
    """Name of a sample, in the plural."""
    size_setting: str
    """The setting that makes each sample smaller."""
    augments: frozenset[str] = frozenset()
    """Fields of `recipe.augment` that it knows."""
    compares: bool = False
    """Whether the loss compares samples with each other, those of all ranks."""
    peers: Peers = Peers()
    """Ranks whose samples are compared with this one's."""
    means: tuple[str, ...] = ("loss",)
    """Names of the metrics, where each is the mean over samples of one of `tally`'s sums."""
    shown: tuple[str, ...] = ("loss {loss:.4f}",)
    """Parts of `describe`, each with metrics by name; one whose metrics are not there is left out."""
    ranked_by: tuple[str, ...] = ("loss",)
    """Metrics by which evaluations are compared, the first before the others: more is better, of losses less."""
    losses: tuple[str, ...] = ()
    """Names of the losses that `loss` returns and `targets` counts, where these are several, (H,): each is a mean over
    its own targets, and the loss of a step their sum."""
    teacher: Callable[[Task, nn.Module, Any], Tensor] | None = None
    """Makes the loss of a training step in place of `loss`; see `penstock.tasks.teacher`."""

    # -- data

    @abstractmethod
    def open(self, data: DataConfig, model: ModelConfig, split: Split) -> Source:
        """The samples of a split, as the model takes them. Raises ConfigError and DataError."""

    @abstractmethod
    def fit(self, model: ModelConfig, source: Source) -> ModelConfig:
        """The model, with what follows from the data. Raises ConfigError where it contradicts the data."""

    @abstractmethod
    def prepare(
        self, source: Source, model: ModelConfig, *, augment: Augment | None = None, seed: int = 0
    ) -> Prepare:
        """How a Loader makes batches: without `augment` as evaluation takes them."""

    @abstractmethod
    def blank(self, model: ModelConfig, device: torch.device) -> tuple[Any, ...]:
        """Arguments of the model for one sample of nothing, for a rank that must take part without samples."""

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
        """How many targets `loss` is the mean over: a number, or 0-d on the device. Every batch counts for as much in
        the loss of a step. Known without a forward pass and without waiting for the device; here its samples."""
        return len(batch)

    def counted(self, batch: Any) -> Tensor | None:
        """Which samples of a batch `loss` counts, (B,), of tasks whose outputs are classes; None: all."""
        return None

    def taught_by(self, teacher: Callable[[Task, nn.Module, Any], Tensor]) -> Self:
        """A copy of the task with a teacher, which evaluations do without."""
        taught = copy.copy(self)
        taught.teacher = teacher
        return taught

    def among(self, peers: Peers) -> Self:
        """A copy of the task for a rank with these peers."""
        one = copy.copy(self)
        one.peers = peers
        return one

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Forward pass and loss in one, 0-d, of its teacher too if it has one."""
        losses = self.separate(model, batch)
        return losses.sum() if losses.dim() else losses

    def separate(self, model: nn.Module, batch: Any) -> Tensor:
        """`loss`, but with several losses one after the other, (H,), where there are `losses`."""
        if self.teacher is not None:
            return self.teacher(self, model, batch)
        return self.loss(model(*self.inputs(batch)), batch)

    def tokens(self, batch: Any) -> int:
        """Tokens of a batch that are no padding, for their number per second; 0 where samples are no text."""
        return 0

    # -- evaluation

    def tally(self, outputs: Any, batch: Any) -> Tensor:
        """The batch's contribution to the sums that metrics are made of: (K,) float64, on the device, K the same for
        all batches of a split. Here the sum of losses, for a loss that is the mean over samples."""
        return self.loss(outputs, batch).double()[None] * len(batch)

    def assess(self, model: nn.Module, batch: Any) -> Tensor:
        """Forward pass and tally in one, in evaluation mode; a task that generates does so here."""
        return self.tally(model(*self.inputs(batch)), batch)

    def accompany(self, model: nn.Module, blank: tuple[Any, ...]) -> None:
        """The forward passes of `assess` with nothing, for a rank without samples whose model is sharded."""
        model(*blank)

    def metrics(self, samples: int, sums: Sequence[float]) -> dict[str, float]:
        """Metrics by name, of `samples` samples with these sums."""
        return dict(zip(self.means, (total / samples for total in sums), strict=True))

    def class_counts(self, sums: Sequence[float]) -> ClassCounts | None:
        """Counts by class in these sums; None of tasks without classes."""
        return None

    def merit(self, metrics: Mapping[str, float]) -> tuple[float, ...]:
        """How good an evaluation is: the larger, the better."""
        values = [
            -metrics[name] if name == "loss" else metrics[name] for name in self.ranked_by if name in metrics
        ]
        return tuple(-math.inf if math.isnan(value) else value for value in values)

    def describe(self, metrics: Mapping[str, float | None]) -> str:
        """Metrics as people read them. None stands for a number that is not finite."""
        values = {name: _NotFinite() if value is None else value for name, value in metrics.items()}
        names = [{name for _, name, _, _ in string.Formatter().parse(part) if name} for part in self.shown]
        return "  ".join(
            part.format_map(values) for part, of in zip(self.shown, names) if of <= values.keys()
        )

    @abstractmethod
    def describe_model(self, model: ModelConfig) -> str:
        """The model's outputs, in a few words."""

    def sample(self, model: nn.Module, source: Source, device: torch.device) -> str:
        """A few lines that show what the model makes of a sample, for people; empty where there is nothing to show. The
        model is in evaluation mode and without gradients; ranks that share its weights must all call this.
        """
        return ""

    def pictures(self, source: Source) -> list[Pixels]:
        """Some samples of a split as images (H, W, C), for people; none of tasks without such."""
        return []

    def answers(self, model: nn.Module, source: Source, device: torch.device) -> list[SampleAnswer]:
        """The model's answers to the samples of `pictures`; called as `sample` is."""
        return []


class SampleAnswer(NamedTuple):
    """A model's answer to one sample."""

    true: str
    answer: str
    probability: float


class _NotFinite:
    """A number that is not finite, in any format."""

    def __format__(self, form: str) -> str:
        return "not finite"


def samples_over(source: Source, count: int) -> HostBatch:
    """Samples at even distances over a split, as a Loader would read them."""
    return read_samples(source, np.unique(np.linspace(0, len(source) - 1, count).astype(np.int64)))


def read_samples(source: Source, numbers: NDArray[np.int64]) -> HostBatch:
    """Samples of a split, as a Loader would read them."""
    read = np.empty(len(numbers), source.sample)
    reading = source.read_into(numbers, read)
    names = read.dtype.names
    samples: Any = (
        {name: torch.from_numpy(read[name].copy()) for name in names} if names else torch.from_numpy(read)
    )
    return HostBatch(samples, reading.ids, numbers, reading.bad)


def mean_loss(loss: Loss, model: nn.Module, batch: Any) -> Tensor:
    """The mean loss of one batch, whichever form the function has."""
    value = loss(model, batch)
    mean: Tensor = value[0] / value[1] if isinstance(value, tuple) else value
    return mean


def plain(value: float | None, form: str) -> str:
    """A metric as people read it; None is a number that is not finite."""
    return format(_NotFinite() if value is None else value, form)
