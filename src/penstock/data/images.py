"""Batches of images for a model: on the device, resized or cropped, augmented and normalised there."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.config.run import Augment
from penstock.data.augment import augment_batch, center_batch
from penstock.data.loader import HostBatch, Loader
from penstock.data.resample import to_device
from penstock.data.source import ImageSource
from penstock.data.transform import apply
from penstock.errors import ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Batch:
    """The input of a training step.

    images (B, C, H, W) float32 on the device, in [-1, 1]; a source with marked regions has the marks as its last
    channel. targets (B,) int64, or (B, classes) float32 where labels are mixed or smoothed; ids (B,) sample numbers on
    the host.
    """

    images: Tensor
    targets: Tensor
    ids: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ids)


class PrepareImages:
    """Makes batches of the samples of a source, for models that take square images and distinguish classes. Without
    `augment` the centre is cropped. Raises ConfigError where the source has more classes."""

    def __init__(
        self, source: ImageSource, *, image_size: int, classes: int, augment: Augment | None = None, seed: int = 0
    ) -> None:  # fmt: skip
        if len(source.classes) > classes:
            raise ConfigError(
                f"{source.name} has {len(source.classes)} classes, but the model has only {classes}; "
                f"set model.classes to {len(source.classes)}."
            )
        if source.size < image_size and not source.scalable:
            words = "%s stores images of %d pixels, fewer than the %d of the model: they are enlarged."
            log.warning(words, source.name, source.size, image_size)
        self.source, self.image_size, self.classes = source, image_size, classes
        self.augment, self.seed = augment, seed

    def __call__(self, host: HostBatch, device: torch.device) -> Batch:
        """Copy to the device and augment there, on the current stream, waiting for nothing."""
        images = host.samples.to(device, non_blocking=True)
        targets = to_device(self.source.labels[host.ids], device)
        if self.augment is None:
            images = center_batch(images, image_size=self.image_size, crop_share=self.source.crop_share)
        else:
            images, targets = augment_batch(
                images, targets, self.augment, image_size=self.image_size, classes=self.classes, seed=self.seed,
                positions=host.positions,
            )  # fmt: skip
        if self.source.transform is not None:
            images, targets = apply(self.source.transform, images, targets, training=self.augment is not None)
        return Batch(images, targets, host.ids)


def image_loader(
    source: ImageSource, *, image_size: int, classes: int, augment: Augment | None = None, seed: int = 0, **options: Any
) -> Loader:  # fmt: skip
    """A Loader of images, prepared by `PrepareImages`; `options` go to `Loader`."""
    prepare = PrepareImages(source, image_size=image_size, classes=classes, augment=augment, seed=seed)
    return Loader(source, prepare, seed=seed, **options)
