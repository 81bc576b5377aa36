"""The gradients of a model: how large they are over some batches, and which of them fp16 would lose, layer by layer."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.precision.follower import tensors_of
from penstock.precision.forward import unwrapped
from penstock.precision.histogram import GradientHistogram, Histogram, Meter
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

Kind = Literal["activations", "weights"]
Note = Callable[[str, Kind, Tensor], None]
"""Is told a gradient, with its layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGradients:
    """The gradients of one layer's outputs, or of its weights, as fp16 would hold them. Shares are of all values."""

    layer: str
    kind: Kind
    values: int
    zero: float
    """Share that is zero in fp32 already."""
    lost: float
    """Share that is not zero, but would be in fp16 without a loss scale."""
    lost_scaled: float
    """The same at the loss scale that the report compares with."""
    infinite: float
    """Share that would be infinite, or is not a number, in fp16 without a loss scale."""
    infinite_scaled: float
    """The same at the report's loss scale."""
    largest: float
    """Largest finite magnitude, without loss scale."""


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
    meters: dict[Kind, Meter] = {"activations": Meter(), "weights": Meter()}
    count = 0
    for batch in batches:
        given = moved(batch, device_of([bare]))
        pass_in_fp32(bare, given, loss, lambda _, kind, gradient: meters[kind].add(gradient))
        count += 1
        if between is not None:
            between(batch)
    if not count:
        raise ConfigError("There is no batch to measure gradients on; give at least one.")
    return GradientHistogram(
        activations=meters["activations"].read(), weights=meters["weights"].read(), batches=count
    )


def pass_in_fp32(model: nn.Module, batch: Any, loss: Loss | None, note: Note) -> Tensor:
    """A forward and a backward pass without loss scale; returns the loss, and tells `note` of each gradient."""
    model = in_fp32(model)
    device = device_of([model])
    with undisturbed(model), torch.autocast(device.type, enabled=False), torch.enable_grad():
        with _watched(model, note):
            value = checked((loss or default_loss)(model, batch))
            found = gradients(model, value)
        for name, gradient in found:
            if gradient is not None:
                note(name.rpartition(".")[0] or type(model).__name__, "weights", gradient)
    return value.detach()


@contextmanager
def _watched(model: nn.Module, note: Note) -> Iterator[None]:
    """Inside, `note` is told each gradient of a layer's output that a backward pass computes.

    Layers are modules without children and those with parameters of their own; a tensor that passes through
    several (Identity, a container's result) counts once, for the first.
    """
    seen: dict[int, weakref.ref[Tensor]] = {}

    def hook(name: str) -> Any:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            for tensor in tensors_of(args):
                seen[id(tensor)] = weakref.ref(tensor)
            for tensor in tensors_of(output):
                known = seen.get(id(tensor))
                if tensor.requires_grad and not (known is not None and known() is tensor):
                    seen[id(tensor)] = weakref.ref(tensor)
                    tensor.register_hook(lambda g: note(name, "activations", g))  # type: ignore[no-untyped-call]

        return look

    handles = [
        module.register_forward_hook(hook(name or type(model).__name__))
        for name, module in model.named_modules()
        if next(module.children(), None) is None or next(module.parameters(recurse=False), None) is not None
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def layer_gradients(layer: str, kind: Kind, found: Histogram, scale: float) -> LayerGradients:
    """What a histogram says of a layer, at a loss scale that is a power of two."""
    return LayerGradients(
        layer=layer, kind=kind, values=found.values, zero=found.zeros / max(found.values, 1),
        lost=found.lost(), lost_scaled=found.lost(scale),
        infinite=found.infinite(), infinite_scaled=found.infinite(scale), largest=found.largest,
    )  # fmt: skip


def together(layers: tuple[LayerGradients, ...], kind: Kind) -> LayerGradients | None:
    """All layers of a kind as one; None where there are none."""
    chosen = [layer for layer in layers if layer.kind == kind]
    values = sum(layer.values for layer in chosen)
    if not values:
        return None

    shares = {
        name: math.fsum(getattr(layer, name) * layer.values for layer in chosen) / values
        for name in ("zero", "lost", "lost_scaled", "infinite", "infinite_scaled")
    }
    largest = max(layer.largest for layer in chosen)
    return LayerGradients(layer="all layers", kind=kind, values=values, largest=largest, **shares)
