"""Histogram of a model's gradient magnitudes by power of two, and the loss scale that follows from it.

Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2: gradients cluster near zero, below fp16's
range, and leave most of fp16's upper range empty. Multiplying the loss by a constant S moves all of them up; S must
keep the largest below 65,504, the largest fp16.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.config.convert import Headroom, require
from penstock.containers import replaced
from penstock.errors import ConfigError, NumericError
from penstock.precision.copies import is_half, own_buffers, plain
from penstock.precision.forward import precision_on, unwrapped
from penstock.precision.overflow import tensors_of
from penstock.precision.session import device_of

LARGEST = 65504.0
"""The largest finite fp16."""

LOW, HIGH = -149, 127
"""Exponents of the smallest and the largest magnitude of fp32, one bin each."""
_KEYS = HIGH - LOW + 3
"""Keys of a count: zeros, the exponents from `LOW` to `HIGH`, and values that are not finite."""
# Elements per chunk: bounds the temporaries, on a host to a size that fits its caches.
_AT_ONCE, _AT_ONCE_ON_HOST = 1 << 22, 1 << 17


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Number of values with magnitude in [2^e, 2^(e+1)), for each exponent e from `LOW` to `HIGH`."""

    counts: tuple[int, ...]
    zeros: int
    wrong: int
    """Infinite, or not a number."""
    largest: float
    """Largest finite magnitude."""

    @property
    def values(self) -> int:
        """Number of all values."""
        return sum(self.counts) + self.zeros + self.wrong

    def between(self, low: int, high: int) -> float:
        """Share of all values with a magnitude in [2^low, 2^high)."""
        inside = range(max(low, LOW) - LOW, min(high, HIGH + 1) - LOW)
        return sum(self.counts[place] for place in inside) / max(self.values, 1)

    def lost(self, scale: float = 1.0) -> float:
        """Share of all values that are not zero, but would be in fp16 after multiplication by a power of two."""
        return self.between(LOW, -25 - _exponent(scale))

    def denormal(self, scale: float = 1.0) -> float:
        """Share that fp16 would hold with fewer than 11 significant bits."""
        return self.between(-25 - _exponent(scale), -14 - _exponent(scale))

    def infinite(self, scale: float = 1.0) -> float:
        """Share of values that are not finite, or would not be in fp16; values in [65,504, 65,536) count as finite."""
        return self.between(16 - _exponent(scale), HIGH + 1) + self.wrong / max(self.values, 1)

    def __add__(self, other: Histogram) -> Histogram:
        return Histogram(
            counts=tuple(a + b for a, b in zip(self.counts, other.counts, strict=True)),
            zeros=self.zeros + other.zeros,
            wrong=self.wrong + other.wrong,
            largest=max(self.largest, other.largest),
        )

    def to_dict(self) -> dict[str, Any]:
        """The histogram for JSON: counts by exponent, empty bins left out."""
        counts = {str(LOW + place): count for place, count in enumerate(self.counts) if count}
        return {"zeros": self.zeros, "wrong": self.wrong, "largest": self.largest, "counts": counts}


class Meter:
    """Bins tensors on their device, without waiting for it, and sums counts there. Values are counted as fp32."""

    def __init__(self) -> None:
        self._counts: dict[torch.device, Tensor] = {}
        self._largest: dict[torch.device, Tensor] = {}

    @torch.no_grad()
    def add(self, tensor: Tensor) -> None:
        """Count a tensor's values."""
        tensor = tensor.detach()
        flat = (tensor.coalesce().values() if tensor.is_sparse else tensor).reshape(-1)
        if flat.device not in self._counts:
            self._counts[flat.device] = torch.zeros(_KEYS, dtype=torch.int64, device=flat.device)
            self._largest[flat.device] = torch.zeros((), device=flat.device)
        for chunk in torch.split(flat, _AT_ONCE_ON_HOST if _on_host(flat) else _AT_ONCE):
            if chunk.numel():
                self._add(chunk.float().abs())

    def _add(self, values: Tensor) -> None:
        finite = values.isfinite()
        values = values.where(finite, 0)
        exponents = torch.frexp(values).exponent - 1  # of values in [2^e, 2^(e+1))
        keys = (exponents - LOW + 1).where(values > 0, 0).where(finite, _KEYS - 1)
        counts, largest = self._counts[values.device], self._largest[values.device]
        if _on_host(values):
            counts += torch.bincount(keys, minlength=_KEYS)
        else:  # bincount would ask the device for the largest key
            counts.scatter_add_(0, keys.long(), counts.new_ones(()).expand(keys.shape))
        torch.maximum(largest, values.amax(), out=largest)

    def read(self) -> Histogram:
        """The counts so far. Waits for the devices."""
        total = torch.zeros(_KEYS, dtype=torch.int64)
        for counts in self._counts.values():
            total += counts.to("cpu")
        zeros, *bins, wrong = total.tolist()
        largest = max((largest.item() for largest in self._largest.values()), default=0.0)
        return Histogram(counts=tuple(bins), zeros=zeros, wrong=wrong, largest=largest)


def _on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientHistogram:
    """The gradients of a model over some batches, in fp32 and without loss scale."""

    activations: Histogram
    """Gradients with respect to each layer's output: the paper's figure 3."""
    weights: Histogram
    """Gradients with respect to each weight."""
    batches: int

    @property
    def all(self) -> Histogram:
        """Both histograms together: all gradients that pass through fp16."""
        return self.activations + self.weights

    def to_dict(self) -> dict[str, Any]:
        """The histograms for JSON."""
        return {
            "batches": self.batches,
            "activations": self.activations.to_dict(),
            "weights": self.weights.to_dict(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """A constant loss scale, and its effect on the gradients it was derived from. Shares are of all values."""

    scale: float
    """A power of two."""
    largest: float
    """The largest gradient, without loss scale."""
    headroom: float
    """Factor by which gradients may at least grow before they overflow."""
    lost_before: float
    """Share that fp16 turns to zero without loss scale."""
    lost: float
    """Share that fp16 turns to zero with this loss scale."""
    denormal_before: float
    """Share held with reduced precision without loss scale."""
    denormal: float

    @property
    def saved(self) -> float:
        """Share of gradients that the scale keeps from becoming zero."""
        return self.lost_before - self.lost


def recommend(histogram: Histogram | GradientHistogram, *, headroom: float = 2.0) -> Recommendation:
    """The largest power of two S with S · largest · headroom ≤ 65,504 (Micikevicius et al. 2018, section 3.2).

    Other batches can have larger gradients than the measured ones: `headroom` is the factor by which they may grow.

    Raises:
        ConfigError: the head-room is below 1.
        NumericError: a gradient is not finite, so that no scale helps, or all are zero.
    """
    require("headroom", headroom, Headroom)
    values = histogram.all if isinstance(histogram, GradientHistogram) else histogram
    if values.wrong:
        raise NumericError(
            f"{values.wrong:,} of {values.values:,} gradients are infinite or not a number in fp32 already, which no "
            "loss scale can change; penstock.precision.OverflowTrace finds the layer (docs/how-to/loss-scale.md)."
        )
    if not values.largest:
        raise NumericError("All gradients are zero: there is nothing to choose a loss scale by.")
    scale = power_of_two(LARGEST / (values.largest * headroom))
    return Recommendation(
        scale=scale, largest=values.largest, headroom=headroom,
        lost_before=values.lost(), lost=values.lost(scale),
        denormal_before=values.denormal(), denormal=values.denormal(scale),
    )  # fmt: skip


def power_of_two(value: float) -> float:
    """The largest power of two that does not exceed `value`, which is above 0."""
    return math.ldexp(0.5, math.frexp(value)[1])


def _exponent(scale: float) -> int:
    mantissa, exponent = math.frexp(scale)
    if mantissa != 0.5:
        raise ConfigError(
            f"A histogram by powers of two can be read at loss scales such as 1024, not at {scale:g}."
        )
    return exponent - 1


# -- measures the gradients of a model on its batches, in fp32, by passes that leave nothing behind


Loss = Callable[[nn.Module, Any], Tensor]
"""Runs the model on a batch and returns a 0-d loss."""


def gradient_histogram(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Loss,
    *,
    between: Callable[[Any], object] | None = None,
) -> GradientHistogram:
    """Measure the gradients of a model on batches, in fp32, leaving weights, gradients, buffers and generators alone.

    `loss(model, batch)` returns a scalar. Accelerated models are measured as if they were not. `between(batch)` is
    called after each batch: with a training step there, the histogram covers training and not only the first weights,
    as in the paper.

    Raises:
        ConfigError: there is no batch, no scalar loss, or nothing to train.
    """
    bare = unwrapped(model)
    device = device_of([bare])
    activations, weights = Meter(), Meter()
    count = 0
    for batch in batches:
        placed = replaced(batch, lambda tensor: tensor.to(device))
        passed = _in_fp32(bare)
        with _undisturbed(passed), torch.autocast(device.type, enabled=False), torch.enable_grad():
            with _watched(passed, activations):
                of_weights = _gradients(passed, _checked(loss(passed, placed)))
            for gradient in of_weights:
                if gradient is not None:
                    weights.add(gradient)
        count += 1
        if between is not None:
            between(batch)
    if not count:
        raise ConfigError("There is no batch to measure gradients on; give at least one.")
    return GradientHistogram(activations=activations.read(), weights=weights.read(), batches=count)


@contextmanager
def _watched(model: nn.Module, meter: Meter) -> Iterator[None]:
    """Context in which `meter` counts each layer output's gradient in backward passes.

    Layers are modules without children or with parameters of their own; a tensor that is the output of several
    (Identity, a container's result) counts once, for the first.
    """
    seen: dict[int, weakref.ref[Tensor]] = {}

    def look(module: nn.Module, args: Any, output: Any) -> None:
        for tensor in tensors_of(args):
            seen[id(tensor)] = weakref.ref(tensor)
        for tensor in tensors_of(output):
            before = seen.get(id(tensor))
            if tensor.requires_grad and not (before is not None and before() is tensor):
                seen[id(tensor)] = weakref.ref(tensor)
                tensor.register_hook(meter.add)  # type: ignore[no-untyped-call]

    with ExitStack() as hooks:
        for module in model.modules():
            leaf = next(module.children(), None) is None
            if leaf or next(module.parameters(recurse=False), None) is not None:
                hooks.enter_context(module.register_forward_hook(look))
        yield


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Context that restores buffers and random generators at its end; compiled parts run eagerly, for hooks.

    It does not restore gradients; `_gradients` does not change them.
    """
    accelerators = {p.device for p in model.parameters() if p.device.type != "cpu"}
    kind = next((device.type for device in accelerators), "cuda")
    buffers = [
        (module, key, value, value.detach().clone())
        for module in model.modules()
        for key, value in own_buffers(module)
    ]
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=list(accelerators), device_type=kind))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            yield
        finally:
            with torch.no_grad():
                for module, key, value, kept in buffers:
                    setattr(module, key, value)
                    value.copy_(kept)


def _in_fp32(model: nn.Module) -> nn.Module:
    """The model computing in fp32 throughout: itself if it does so already, else a copy that shares its fp32 weights
    and has master weights, or widened half weights, in place of the others.
    """
    if any(precision_on(module) for module in model.modules()):
        model = plain(model)
    if any(map(is_half, (*model.parameters(), *model.buffers()))):
        model = copy.deepcopy(model).float()
    return model


def _gradients(model: nn.Module, loss: Tensor) -> Sequence[Tensor | None]:
    """The gradient of each trained parameter. `.grad` does not change, and no hook that steps an optimizer runs."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained or not loss.requires_grad:
        raise ConfigError(
            "No gradient flows from this loss to a parameter: all are frozen, or the loss was computed without "
            "gradients. Give a model with parameters that require gradients, and a loss that depends on them."
        )
    return torch.autograd.grad(loss, trained, allow_unused=True)


def _checked(loss: Any) -> Tensor:
    """The loss as a 0-d tensor. Raises ConfigError for anything else."""
    if not isinstance(loss, Tensor) or loss.ndim != 0 or not loss.is_floating_point():
        kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigError(f"loss(model, batch) returned {kind}, but must return a scalar tensor.")
    return loss
