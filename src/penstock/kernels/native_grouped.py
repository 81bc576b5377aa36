"""Matrix products of sorted rows with the weights of their experts in C++, on CPUs with AVX-512, in fp32 and bf16.

The kernels and their formulas are in `native/grouped.cpp`; the reference multiplies one expert after the other. An
expert with few rows costs little more per row than an expert with many: its weights are read once, and rearranged while
they are multiplied. A row's result does not depend on the other rows, nor on the number of threads. Sums are in fp32.

Shapes: V rows, sorted by expert, E experts, K features in, N out. The rows of expert e end at ends[e].
"""

from __future__ import annotations

from ctypes import c_int64

import torch
from torch import Tensor

from penstock.cpu import this_cpu
from penstock.errors import ConfigError
from penstock.kernels.native import TYPES, address, direct, library, threads_for

_PRODUCTS_PER_ELEMENT = 128
"""This many multiplications take as long as a pass over one element."""


_MANY_ROWS = 1024
"""From this many bf16 rows per expert on average, torch's products, one expert after the other, are 5 to 8 % faster."""


def takes_grouped(x: Tensor, experts: int, inputs: int, outputs: int) -> bool:
    """Whether to use these kernels for rows like x and weights (experts, outputs, inputs), forward and backward: if
    they support the inputs and beat torch, which they do not in bf16 with AMX. They are compiled at first use."""
    cpu = this_cpu()
    if x.device.type != "cpu" or cpu.isa != "AVX512" or x.dtype not in TYPES or not inputs or not outputs:
        return False
    if x.dtype == torch.bfloat16:
        slower = not cpu.bf16_pairs or cpu.amx or len(x) >= _MANY_ROWS * experts
        if slower or inputs % 2 or outputs % 2:
            return False
    return library("grouped") is not None


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Each row of x (V, K) times the weight of its expert, (E, N, K) of any strides: (V, N), zero past the last end.

    ends: (E,) int32. Raises ConfigError if they decrease or exceed the number of rows.
    """
    if direct(x):
        return _multiply(x, weight, ends)
    return torch.ops.penstock.native_grouped(x, weight, ends)  # type: ignore[no-any-return]


def grouped_outer(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """The sum over each expert's rows of the outer products of grad (V, N) and x (V, K): (E, N, K).

    ends: (E,) int32. Raises ConfigError if they decrease or exceed the number of rows.
    """
    if direct(x):
        return _multiply_outer(grad, x, ends)
    return torch.ops.penstock.native_grouped_outer(grad, x, ends)  # type: ignore[no-any-return]


def _multiply(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    experts, outputs, inputs = weight.shape
    x = _readable(x)
    weight = weight if 1 in weight.stride()[1:] else weight.contiguous()
    y = x.new_empty(len(x), outputs)
    sizes, strides = (c_int64 * 4)(len(x), outputs, inputs, experts), (c_int64 * 3)(*weight.stride())
    ends = ends.to(torch.int32).contiguous()
    kernels = library("grouped")
    assert kernels is not None
    done = kernels.penstock_grouped(
        TYPES[x.dtype], sizes, address(x), c_int64(x.stride(0)), address(weight), strides, address(ends), address(y),
        threads_for(len(x) * outputs * inputs // _PRODUCTS_PER_ELEMENT),
    )  # fmt: skip
    return y if done else _refuse(ends, len(x))


def _multiply_outer(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    grad, x, ends = _readable(grad), _readable(x), ends.to(torch.int32).contiguous()
    out = x.new_empty(len(ends), grad.shape[1], x.shape[1])
    sizes = (c_int64 * 4)(len(x), grad.shape[1], x.shape[1], len(ends))
    kernels = library("grouped")
    assert kernels is not None
    done = kernels.penstock_grouped_outer(
        TYPES[x.dtype], sizes, address(grad), c_int64(grad.stride(0)), address(x), c_int64(x.stride(0)), address(ends),
        address(out), threads_for(max(out.numel(), len(x) * out[0].numel() // _PRODUCTS_PER_ELEMENT)),
    )  # fmt: skip
    return out if done else _refuse(ends, len(x))


def _readable(x: Tensor) -> Tensor:
    """x (V, F) with adjacent features in a row, and an even stride between rows."""
    return x if x.stride(1) == 1 and x.stride(0) % 2 == 0 else x.contiguous()


def _refuse(ends: Tensor, rows: int) -> Tensor:
    raise ConfigError(
        f"A grouped product needs the end of each expert's rows, in ascending order and up to {rows}, but has "
        f"{ends.tolist()}; pass the cumulative counts of rows."
    )


_operator = torch.library.custom_op("penstock::native_grouped", _multiply, mutates_args=())
_outer_operator = torch.library.custom_op("penstock::native_grouped_outer", _multiply_outer, mutates_args=())


@_operator.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@_outer_operator.register_fake
def _(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], grad.shape[1], x.shape[1])
