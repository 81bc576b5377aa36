"""Which gradients fp16 would turn to zero or to infinity, layer by layer, at two loss scales."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from penstock.precision.follower import tensors_of
from penstock.precision.histogram import Histogram

Kind = Literal["activations", "weights"]
Note = Callable[[str, Tensor], None]


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


@contextmanager
def watched(model: nn.Module, note: Note) -> Iterator[None]:
    """Inside, `note(layer, gradient)` is called for each gradient of a layer's output that a backward pass computes.

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
                    tensor.register_hook(lambda g: note(name, g))  # type: ignore[no-untyped-call]

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

    def share(name: str) -> float:
        return math.fsum(getattr(layer, name) * layer.values for layer in chosen) / values

    return LayerGradients(
        layer="all layers", kind=kind, values=values, zero=share("zero"), lost=share("lost"),
        lost_scaled=share("lost_scaled"), infinite=share("infinite"), infinite_scaled=share("infinite_scaled"),
        largest=max(layer.largest for layer in chosen),
    )  # fmt: skip
