"""Parts of several kernels: exact exponentials, rounding to a narrow dtype, and the number of warps per row."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
"""Whether Triton's interpreter runs these kernels. Its casts to bf16 truncate, so values are rounded to nearest even by
hand first; a GPU does so itself."""
_EVEN = tl.constexpr(12582912.0)  # 1.5 · 2²³: adding and subtracting it rounds to a whole number


@triton.jit
def whole(value):  # type: ignore[no-untyped-def]
    """The nearest whole number of an fp32 value below 2²², ties to even."""
    return (value + _EVEN) - _EVEN


@triton.jit
def exponential(x):  # type: ignore[no-untyped-def]
    """e^x, exact to fp32's last bits, for x up to 88. A GPU's own is 2^(x · log2(e)), whose rounding error grows with
    x; here the exponent's remainder is at most half of log(2) (Cody & Waite, 1980)."""
    x = tl.where(x < -200.0, -200.0, x)  # keeps NaN
    power = whole(x * 1.4426950408889634)
    rest = (x - power * 0.693145751953125) - power * 1.428606765330187e-06
    return tl.exp2(power) * tl.exp2(rest * 1.4426950408889634)


@triton.jit  # type: ignore[untyped-decorator]
def narrow(value, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 values cast to `kind`, rounded to nearest even."""
    if INTERPRETED and kind == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        bits = tl.where(value == value, bits + 0x7FFF + ((bits >> 16) & 1), 0x7FC00000)
        return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return value.to(kind)


def power_above(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << max(0, number - 1).bit_length()


def tile_of(columns: int, most: int = 2048) -> tuple[int, int, int]:
    """A tile's rows, its columns (a power of two), and its warps. A tile has whole rows; if they are short, several."""
    block = max(16, power_above(columns))
    rows = max(1, min(16, most // block))
    return rows, block, min(32, max(4, rows * block // 512))


def programs_for(device: torch.device, tiles: int, each: int = 4) -> int:
    """The number of programs that loop over the tiles: at most `each` per multiprocessor of a GPU."""
    if device.type != "cuda":
        return min(tiles, 3)
    return min(tiles, each * torch.cuda.get_device_properties(device).multi_processor_count)


def on(tensor: Tensor) -> Any:
    """The context in which kernels are launched on a tensor's device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
