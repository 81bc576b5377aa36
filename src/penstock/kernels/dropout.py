"""Dropout (Srivastava et al., JMLR 2014) that draws 16 bits for each element.

On a CPU torch draws 32 bits per element, always in one thread, and saves the mask in the dtype of the input. Here
torch's generator draws a 64-bit key, and the bits of an element are a function of the key and its index
(`native/dropout.cpp`), so that all threads draw; the mask has one byte per element. Without a C++ compiler, 64 bits
from torch's generator decide for four elements, in one thread: with the same probability, but for other elements. Even
so, on two cores of an AMD EPYC forward and backward took 3.1 to 3.8 ns per element instead of torch's 6.5 to 8.1, and a
step of GPT-2 7 % less (benchmarks/dropout.py).

The probability is rounded to a multiple of 2⁻¹⁶, and kept elements are scaled by the exact inverse, so that the
expected output is the input. Other devices use torch's dropout, which is the reference.
"""

from __future__ import annotations

from ctypes import c_int64, c_uint32, c_uint64

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.kernels.native import address, library, threads_for

_LEVELS = 1 << 16
_LOWEST = -(1 << 15)
"""The lowest value of the 16 bits as a signed number."""


def dropout(
    x: Tensor, p: float, training: bool = True, *, generator: torch.Generator | None = None
) -> Tensor:
    """Each element is zero with probability `p`, and x / (1 − p) otherwise; `x` itself where not in training.

    Random numbers come from `generator`, by default torch's own. Raises ValueError for a `p` outside of 0 to 1.
    """
    if not training and 0 <= p <= 1:
        return x
    level = round(p * _LEVELS)
    # The meta device stands for a CPU: its mask has the size of a CPU's.
    if not training or x.device.type not in ("cpu", "meta") or not 0 < level < _LEVELS:
        return F.dropout(x, p, training)
    return torch.where(_drawn_for(x, level, generator), x, 0.0).mul_(_LEVELS / (_LEVELS - level))


def mask_of(x: Tensor, p: float) -> tuple[Tensor, float]:
    """Which elements dropout of `x` with probability `p` keeps (bool, shape of x), and the factor that scales them. On
    a CPU it draws the same elements as `dropout`."""
    level = round(p * _LEVELS)
    if x.device.type not in ("cpu", "meta"):
        return torch.rand(x.shape, device=x.device) >= level / _LEVELS, _LEVELS / max(1, _LEVELS - level)
    if not 0 < level < _LEVELS:
        return torch.full(x.shape, level == 0, dtype=torch.bool, device=x.device), 1.0
    return _drawn_for(x, level), _LEVELS / (_LEVELS - level)


def _drawn_for(x: Tensor, level: int, generator: torch.Generator | None = None) -> Tensor:
    if generator is not None or x.device.type == "meta":
        return _kept(x.shape, level, x.device, generator)
    return torch.ops.penstock.kept(x.shape, level)  # type: ignore[no-any-return]


class Dropout(nn.Dropout):
    """`dropout` as a module."""

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.p, self.training)


def _kept(
    shape: torch.Size, level: int, device: torch.device, generator: torch.Generator | None = None
) -> Tensor:
    """Which elements are kept; each is dropped with probability `level` / 2¹⁶."""
    count = shape.numel()
    kernels = library("dropout") if device.type == "cpu" else None
    if kernels is not None:
        key = torch.empty((), dtype=torch.int64, device=device).random_(-(1 << 63), None, generator=generator)
        mask = torch.empty(shape, dtype=torch.bool, device=device)
        kernels.penstock_kept(
            address(mask), c_int64(count), c_uint64(int(key)), c_uint32(level), threads_for(count)
        )
        return mask
    bits = torch.empty(-(-count // 4), dtype=torch.int64, device=device)
    bits.random_(-(1 << 63), None, generator=generator)  # all 64 bits
    return (bits.view(torch.int16)[:count] >= level + _LOWEST).view(shape)


torch.library.define(
    "penstock::kept", "(SymInt[] shape, int level) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,)
)


@torch.library.impl("penstock::kept", "CompositeExplicitAutograd")
def _drawn(shape: list[int], level: int) -> Tensor:
    return _kept(torch.Size(shape), level, torch.device("cpu"))


@torch.library.register_fake("penstock::kept")  # type: ignore[untyped-decorator]
def _shape(shape: list[int], level: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bool)
