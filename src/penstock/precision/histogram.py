"""How large a model's gradients are, by power of two, and the loss scale that follows from it.

Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2: gradients cluster near zero, where fp16 has no
numbers, and leave most of fp16's upper range empty. Multiplying the loss by a constant S moves all of them up; S must
keep the largest below 65,504, the largest fp16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError, NumericError

LARGEST = 65504.0
"""The largest finite fp16."""
SMALLEST_NORMAL = 2.0**-14
"""Below it fp16 has fewer and fewer significant bits."""
SMALLEST = 2.0**-24
"""The smallest fp16 above zero."""
ZERO_UP_TO = 2.0**-25
"""What is no larger is rounded to zero: to nearest, and the half-way case to even."""
INFINITE_FROM = 65520.0
"""What is not smaller is rounded to infinity: the half-way case between 65,504 and 65,536, to even."""

LOW, HIGH = -149, 127
"""Exponents of the smallest and the largest magnitude of fp32, one bin each."""
_ZERO, _WRONG = (
    HIGH - LOW + 1,
    HIGH - LOW + 2,
)  # places of the two further counts: zeros, and infinite or not a number
_PLACES = _WRONG + 1
_AT_ONCE = 1 << 22  # elements: bounds what the 8-byte indices take


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """How many values lie in [2^e, 2^(e+1)) in magnitude, for each exponent e from `LOW` to `HIGH`."""

    counts: tuple[int, ...]
    zeros: int
    wrong: int
    """Infinite, or not a number."""
    largest: float
    """Largest finite magnitude."""

    @property
    def values(self) -> int:
        """How many there are in all."""
        return sum(self.counts) + self.zeros + self.wrong

    def between(self, low: int, high: int) -> float:
        """Share of all values with a magnitude in [2^low, 2^high)."""
        inside = range(max(low, LOW) - LOW, min(high, HIGH + 1) - LOW)
        return sum(self.counts[place] for place in inside) / max(self.values, 1)

    def lost(self, scale: float = 1.0) -> float:
        """Share of all values that are not zero, but in fp16 would be, times a power of two."""
        return self.between(LOW, -25 - _exponent(scale))

    def denormal(self, scale: float = 1.0) -> float:
        """Share that fp16 would hold with fewer than 11 significant bits."""
        return self.between(-25 - _exponent(scale), -14 - _exponent(scale))

    def infinite(self, scale: float = 1.0) -> float:
        """Share that is not finite, or would not be in fp16; values in [65,504, 65,536) count as finite."""
        return self.between(16 - _exponent(scale), HIGH + 1) + self.wrong / max(self.values, 1)

    def __add__(self, other: Histogram) -> Histogram:
        return Histogram(
            counts=tuple(a + b for a, b in zip(self.counts, other.counts, strict=True)),
            zeros=self.zeros + other.zeros,
            wrong=self.wrong + other.wrong,
            largest=max(self.largest, other.largest),
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON: counts by exponent, empty bins left out."""
        counts = {str(LOW + place): count for place, count in enumerate(self.counts) if count}
        return {"zeros": self.zeros, "wrong": self.wrong, "largest": self.largest, "counts": counts}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Histogram:
        """What `to_dict` gave."""
        counts = stored["counts"]
        return cls(
            counts=tuple(counts.get(str(exponent), 0) for exponent in range(LOW, HIGH + 1)),
            zeros=stored["zeros"],
            wrong=stored["wrong"],
            largest=stored["largest"],
        )


class Meter:
    """Bins tensors on their device, without waiting for it, and sums up there."""

    def __init__(self) -> None:
        self._counts: dict[torch.device, Tensor] = {}
        self._largest: dict[torch.device, Tensor] = {}

    @torch.no_grad()
    def add(self, tensor: Tensor) -> None:
        """Count a tensor's values."""
        tensor = tensor.detach()
        flat = (tensor.coalesce().values() if tensor.is_sparse else tensor).reshape(-1)
        if flat.device not in self._counts:
            self._counts[flat.device] = torch.zeros(_PLACES, dtype=torch.int64, device=flat.device)
            self._largest[flat.device] = torch.zeros((), dtype=torch.float32, device=flat.device)
        for start in range(0, flat.numel(), _AT_ONCE):
            self._add(flat[start : start + _AT_ONCE].float().abs())

    def _add(self, values: Tensor) -> None:
        finite = values.isfinite()
        mantissa, exponent = torch.frexp(values)  # in [0.5, 1), or 0 for 0
        places = (exponent.to(torch.int64) - 1 - LOW).clamp_(0, HIGH - LOW)
        places = places.where(mantissa != 0, _ZERO).where(finite, _WRONG)
        counts, largest = self._counts[values.device], self._largest[values.device]
        if _on_host(values):
            counts += torch.bincount(places, minlength=_PLACES)
        else:  # bincount would ask the device for the largest place
            counts.scatter_add_(0, places, counts.new_ones(()).expand(places.shape))
        torch.maximum(largest, values.where(finite, 0.0).amax(), out=largest)

    def read(self) -> Histogram:
        """What was counted so far. Waits for the devices."""
        total = torch.zeros(_PLACES, dtype=torch.int64)
        most = 0.0
        for device, counts in self._counts.items():
            total += counts.to("cpu")
            most = max(most, self._largest[device].item())
        numbers = total.tolist()
        return Histogram(
            counts=tuple(numbers[:_ZERO]), zeros=numbers[_ZERO], wrong=numbers[_WRONG], largest=most
        )


def _on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientHistogram:
    """The gradients of a model over some batches, in fp32 and without loss scale."""

    activations: Histogram
    """Of the loss with respect to each layer's output: the paper's figure 3."""
    weights: Histogram
    """Of the loss with respect to each weight."""
    batches: int

    @property
    def all(self) -> Histogram:
        """Both: what passes through fp16."""
        return self.activations + self.weights

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "batches": self.batches,
            "activations": self.activations.to_dict(),
            "weights": self.weights.to_dict(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """A constant loss scale, and what it does to the gradients it was found on. Shares are of all values."""

    scale: float
    """A power of two."""
    largest: float
    """The largest gradient, without loss scale."""
    headroom: float
    """How much larger a gradient may still become before it overflows, at the least."""
    lost_before: float
    """Share that fp16 turns to zero without loss scale."""
    lost: float
    """Share that it turns to zero with this one."""
    denormal_before: float
    """Share held with reduced precision without loss scale."""
    denormal: float

    @property
    def saved(self) -> float:
        """Share that the scale keeps from becoming zero."""
        return self.lost_before - self.lost


def recommend(histogram: Histogram | GradientHistogram, *, headroom: float = 2.0) -> Recommendation:
    """The largest power of two S with S · largest · headroom ≤ 65,504 (Micikevicius et al. 2018, section 3.2).

    Gradients of other batches are larger than those that were measured: `headroom` is the factor they may grow by.

    Raises:
        ConfigError: the head-room is below 1.
        NumericError: a gradient is not finite, so that no scale helps, or all are zero.
    """
    if not headroom >= 1.0 or not math.isfinite(headroom):
        raise ConfigError(f"headroom is {headroom}, but must be a finite factor of at least 1.")
    found = histogram.all if isinstance(histogram, GradientHistogram) else histogram
    if found.wrong:
        raise NumericError(
            f"{found.wrong:,} of {found.values:,} gradients are infinite or not a number in fp32 already, which no "
            "loss scale mends; look for the layer with penstock.precision.report(model, batch, precision='O0')."
        )
    if not found.largest:
        raise NumericError("All gradients are zero: there is nothing to choose a loss scale by.")
    scale = power_of_two(LARGEST / (found.largest * headroom))
    return Recommendation(
        scale=scale, largest=found.largest, headroom=headroom,
        lost_before=found.lost(), lost=found.lost(scale),
        denormal_before=found.denormal(), denormal=found.denormal(scale),
    )  # fmt: skip


def power_of_two(value: float) -> float:
    """The largest power of two that is no larger; value is above 0."""
    return math.ldexp(0.5, math.frexp(value)[1])


def _exponent(scale: float) -> int:
    mantissa, exponent = math.frexp(scale)
    if mantissa != 0.5:
        raise ConfigError(
            f"A histogram by powers of two can be read at loss scales such as 1024, not at {scale:g}."
        )
    return exponent - 1
