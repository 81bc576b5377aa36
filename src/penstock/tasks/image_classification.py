"""Image classification: one class for each image."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.config.model import ModelConfig
from penstock.config.run import Augment, DataConfig
from penstock.config.tasks import require_vision
from penstock.data.images import PrepareImages
from penstock.data.open import open_source
from penstock.data.source import ImageSource, Pixels, Source, Split
from penstock.errors import ConfigError
from penstock.kernels.cross_entropy import IGNORED
from penstock.tasks.class_counts import ClassCounts, count_sums, read_counts
from penstock.tasks.task import Prepare, SampleAnswer, Task, samples_over

_log = logging.getLogger(__name__)

FEW_CLASSES = 10
"""Most classes for which top-5 is not informative."""
PICTURES = 8
"""Number of samples to show to people."""


class ImageClassification(Task):
    """Mean cross entropy of `model(images)`, (B, classes), against targets: (B,) int64 classes or (B, classes) shares.

    A batch has attributes `images` and `targets`, or is a pair of them, or a mapping with transformers' names
    `pixel_values` and `labels`. The model may return logits or an object with `logits`. The log-softmax is computed in
    fp32 under every Plan: over so few values half precision saves nothing.

    Metrics: `top1` and, for more than ten classes, `top5` are the shares in [0, 1] of samples whose class is the
    likeliest, or among the five likeliest; `loss` is the mean cross entropy in nats. Their targets are class numbers.
    """

    unit = "images"
    size_setting = "model.image_size"
    augments = frozenset(field.name for field in fields(Augment))
    ranked_by = ("top1", "loss")
    shown = ("top-1 {top1:.2%}", "top-5 {top5:.2%}", "loss {loss:.4f}")

    def open(self, data: DataConfig, model: ModelConfig, split: Split) -> Source:
        model = require_vision(model)
        return open_source(data, split=split, channels=model.channels, image_size=model.image_size)

    def fit(self, model: ModelConfig, source: Source) -> ModelConfig:
        """The model with the data's number of classes, if its own was left at the default; this is logged."""
        fitted: ModelConfig = fit_classes(require_vision(model), source)
        return fitted

    def prepare(
        self, source: Source, model: ModelConfig, *, augment: Augment | None = None, seed: int = 0
    ) -> Prepare:
        assert isinstance(source, ImageSource)
        model = require_vision(model)
        return PrepareImages(
            source, image_size=model.image_size, classes=model.classes, augment=augment, seed=seed
        )

    def blank(self, model: ModelConfig, device: torch.device) -> tuple[Any, ...]:
        return (torch.zeros(1, *model.graph.images.shape, device=device),)

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        return (_split(batch)[0],)

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        targets = _split(batch)[1]
        if targets.is_floating_point():
            return F.cross_entropy(_logits(outputs), targets.float())
        total = F.cross_entropy(_logits(outputs), targets, reduction="sum", ignore_index=IGNORED)
        return total / (targets != IGNORED).sum().clamp(min=1)

    def targets(self, batch: Any) -> Tensor | float:
        """Number of samples in the batch, except those with class −100."""
        counted = self.counted(batch)
        return len(_split(batch)[1]) if counted is None else counted.sum()

    def counted(self, batch: Any) -> Tensor | None:
        targets = _split(batch)[1]
        return None if targets.is_floating_point() else targets != IGNORED

    def tally(self, outputs: Any, batch: Any) -> Tensor:
        """Samples whose class is the likeliest, or among the five likeliest (two counts); the loss; counts by class."""
        logits, targets = _logits(outputs), _split(batch)[1]
        best = logits.topk(min(5, logits.shape[1]), dim=1).indices  # (B, 5)
        hits = best == targets[:, None]
        loss = F.cross_entropy(logits, targets, reduction="sum")
        sums = torch.stack([hits[:, 0].sum().double(), hits.sum().double(), loss.double()])
        return torch.cat([sums, count_sums(best[:, 0], targets, logits.shape[1])])

    def metrics(self, samples: int, sums: Sequence[float]) -> dict[str, float]:
        top1, top5, loss = (total / samples for total in sums[:3])
        many = len(read_counts(sums[3:]).true) > FEW_CLASSES
        return {"top1": top1, **({"top5": top5} if many else {}), "loss": loss}

    def class_counts(self, sums: Sequence[float]) -> ClassCounts:
        return read_counts(sums[3:])

    def pictures(self, source: Source) -> list[Pixels]:
        return list(samples_over(source, PICTURES).samples.numpy())

    def answers(self, model: Any, source: Source, device: torch.device) -> list[SampleAnswer]:
        assert isinstance(source, ImageSource)
        batch = self.prepare(source, model.config)(samples_over(source, PICTURES), device)
        best = torch.softmax(_logits(model(*self.inputs(batch))), dim=1).max(1)
        rows = zip(_split(batch)[1].tolist(), best.indices.tolist(), best.values.tolist(), strict=True)
        names = source.classes
        return [
            SampleAnswer(names[true], names[number] if number < len(names) else str(number), p)
            for true, number, p in rows
        ]

    def describe_model(self, model: ModelConfig) -> str:
        return f"{require_vision(model).classes} classes"


def fit_classes(model: Any, source: Source) -> Any:
    """The configuration of a model with the data's number of `classes`; see `ImageClassification.fit`."""
    assert isinstance(source, ImageSource)
    count = len(source.classes)
    if count == model.classes:
        return model
    if model.classes != type(model)().classes:
        raise ConfigError(
            f"model.classes is {model.classes}, but {source.name} has {count} classes. Set model.classes to {count}."
        )
    _log.warning("model.classes is set to %d, the number of classes of %s.", count, source.name)
    return replace(model, classes=count)


def _split(batch: Any) -> tuple[Tensor, Tensor]:
    """Images and targets of a batch in any of its forms."""
    if isinstance(batch, Mapping):
        return batch["pixel_values"], batch["labels"]
    if isinstance(batch, Sequence):
        images, targets = batch
        return images, targets
    return batch.images, batch.targets


def _logits(outputs: Any) -> Tensor:
    return (outputs if isinstance(outputs, Tensor) else outputs.logits).float()


classification_loss = ImageClassification()
"""The loss of image classification: `classification_loss(model, batch)`."""
