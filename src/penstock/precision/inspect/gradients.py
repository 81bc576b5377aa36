"""Which gradients fp16 would turn to zero or to infinity, layer by layer, at two loss scales."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from penstock.precision.autograd_nodes import tensors_of
from penstock.precision.histogram import INFINITE_FROM, ZERO_UP_TO

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
    """The same at the report's loss scale."""
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


class Tally:
    """Counts on the device; `read` brings all of them over at once."""

    def __init__(self, scale: float) -> None:
        self._scale = scale
        self._counts: dict[tuple[str, Kind], Tensor] = {}
        """values, zeros, lost, lost scaled, infinite, infinite scaled: (6,) int64."""
        self._largest: dict[tuple[str, Kind], Tensor] = {}

    @torch.no_grad()
    def add(self, layer: str, kind: Kind, gradient: Tensor) -> None:
        """Count a gradient that a backward pass in fp32 computed, without loss scale. Waits for nothing."""
        values = gradient.detach()
        values = (values.coalesce().values() if values.is_sparse else values).abs()
        some = values > 0
        finite = values.isfinite()
        counted = [
            torch.full((), values.numel(), dtype=torch.int64, device=values.device),
            (values == 0).sum(),
        ]
        scales = (1.0, self._scale)
        counted += [(some & (values <= ZERO_UP_TO / scale)).sum() for scale in scales]
        counted += [(~finite | (values >= INFINITE_FROM / scale)).sum() for scale in scales]
        counts = torch.stack(counted)
        largest = values.where(finite, 0.0).amax() if values.numel() else values.new_zeros(())
        key = (layer, kind)
        if key in self._counts:
            counts = counts + self._counts[key]
            largest = torch.maximum(largest, self._largest[key])
        self._counts[key], self._largest[key] = counts, largest

    def read(self) -> tuple[LayerGradients, ...]:
        """One entry per layer and kind, in the order in which gradients came. Waits for the device."""
        if not self._counts:
            return ()
        counts = torch.stack([value.to("cpu") for value in self._counts.values()]).tolist()
        largest = torch.stack([value.to("cpu", torch.float64) for value in self._largest.values()]).tolist()
        found = []
        for (layer, kind), (values, *numbers), most in zip(self._counts, counts, largest):
            zero, lost, lost_scaled, infinite, infinite_scaled = (n / max(values, 1) for n in numbers)
            found.append(
                LayerGradients(
                    layer=layer, kind=kind, values=values, zero=zero, lost=lost, lost_scaled=lost_scaled,
                    infinite=infinite, infinite_scaled=infinite_scaled, largest=most,
                )
            )  # fmt: skip
        return tuple(found)


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
