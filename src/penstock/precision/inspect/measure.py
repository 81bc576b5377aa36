"""The gradients of a model over some batches, as histograms."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from penstock.errors import ConfigError
from penstock.precision.forward import unwrapped
from penstock.precision.histogram import GradientHistogram, Meter
from penstock.precision.inspect.gradients import watched
from penstock.precision.inspect.undisturbed import (
    Loss,
    checked,
    default_loss,
    gradients,
    in_fp32,
    moved,
    undisturbed,
)
from penstock.precision.session import device_of


def gradient_histogram(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    loss: Loss | None = None,
    between: Callable[[Any], None] | None = None,
) -> GradientHistogram:
    """Measure the gradients of a model on batches, in fp32, leaving weights, gradients, buffers and generators alone.

    `loss(model, batch)` returns a scalar; without it the model's own loss is taken, or the cross entropy of an (inputs,
    targets) pair. Accelerated models are measured as if they were not. `between(batch)` is called after each batch: a
    training step there lets the histogram cover training and not the first weights alone, as the paper's does.

    Raises:
        ConfigError: there is no batch, no loss, or nothing to train.
    """
    bare = unwrapped(model)
    activations, weights = Meter(), Meter()
    count = 0
    for batch in batches:
        with undisturbed(bare), in_fp32(bare), torch.enable_grad():
            with watched(bare, lambda _, gradient: activations.add(gradient)):
                value = checked((loss or default_loss)(bare, moved(batch, device_of([bare]))))
                found = gradients(bare, value)
            for _, gradient in found:
                if gradient is not None:
                    weights.add(gradient)
            del value, found
        count += 1
        if between is not None:
            between(batch)
    if not count:
        raise ConfigError("There is no batch to measure gradients on; give at least one.")
    return GradientHistogram(activations=activations.read(), weights=weights.read(), batches=count)
