"""Matrix products with int8 weights, in C++ on CPUs with AVX512-VNNI: rounding, product, scales and bias in one pass.

The kernels and their formulas are in `native/integers.cpp`; the references are the forms of `penstock.products` without
these kernels. A row's result depends neither on the other rows, nor on their number, nor on the number of threads.

Shapes: M rows, K inputs, N outputs; weights in ⌈N / 64⌉ panels, (panels, ⌈K / each⌉, 64, each).
"""

from __future__ import annotations

from ctypes import POINTER, c_float, c_int, c_int64, c_void_p
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.cpu import this_cpu
from penstock.kernels.native import TYPES, library, threads_for, typed_kernel

_PANEL = 64
PRODUCTS_PER_ELEMENT = 256
"""This many multiplications take as long as a pass over one element."""
_GIVEN, _BY_SIZE, _BY_RANGE = range(3)
"""The kernel's codes for how rows are rounded."""
_Sizes = c_int64 * 3
_ARGUMENTS = {
    "penstock_int8_product": (
        c_int, POINTER(c_int64), c_void_p, c_int, c_float, *[c_void_p] * 7, c_int,
    ),
    "penstock_widened_product": (c_int, POINTER(c_int64), *[c_void_p] * 5, c_int),
}  # fmt: skip
InputScale = float | Literal["size", "range"]
"""How rows are rounded: with one scale, by each row's largest magnitude, or by its range."""
QUADS, PAIRS = 4, 2
"""Adjacent inputs of an output: in int8 products and in bf16 products."""


def multiplies_integers() -> bool:
    """Whether the kernel of int8 products is available; it is compiled at first use."""
    cpu = this_cpu()
    return cpu.isa == "AVX512" and cpu.vnni and library("integers") is not None


def widens_integers() -> bool:
    """Whether the kernel of bf16 products is available; it is compiled at first use."""
    return this_cpu().bf16_pairs and this_cpu().vnni and library("integers") is not None


def in_panels(numbers: Tensor, each: int) -> Tensor:
    """Arrange int8 numbers (N, K) in panels, padded with zeros."""
    outputs, inputs = numbers.shape
    padded = F.pad(numbers, (0, -inputs % each, 0, -outputs % _PANEL))
    return padded.view(-1, _PANEL, padded.shape[1] // each, each).transpose(1, 2).contiguous()


def out_of_panels(panels: Tensor, outputs: int, inputs: int) -> Tensor:
    """Undo `in_panels`: the numbers (N, K)."""
    rows = panels.transpose(1, 2).reshape(-1, panels.shape[1] * panels.shape[3])
    return rows[:outputs, :inputs].contiguous()


class PackedInt8:
    """An int8 weight in the layout of the int8 kernel."""

    def __init__(
        self, numbers: Tensor, scales: Tensor, bias: Tensor | None, factors: Tensor | None = None
    ) -> None:
        """numbers: int8 (N, K) from −127 to 127; scales, bias: fp32 (N,); factors: fp32 (K,), for the inputs before
        rounding."""
        self.factors = None if factors is None else factors.contiguous()
        self.shape = numbers.shape
        self.panels, self.scales, self.bias = in_panels(numbers, QUADS), scales.float().contiguous(), bias
        sums = numbers.sum(1)
        self.zeros, self.sums = (128 * sums).to(torch.int32), sums * self.scales
        self._scaled = 0.0, self.scales
        """The last input scale, and the scales of its products."""

    @property
    def numbers(self) -> Tensor:
        """The weight's numbers, int8 (N, K)."""
        return out_of_panels(self.panels, *self.shape)

    def scaled(self, scale: InputScale) -> tuple[int, float, Tensor]:
        """The kernel's code for the way of rounding, the inverse of a fixed scale, and the scales of products (N,)."""
        if not isinstance(scale, float):
            return _BY_RANGE if scale == "range" else _BY_SIZE, 0.0, self.scales
        last, scales = self._scaled
        if last != scale:
            scales = self.scales * scale
            self._scaled = scale, scales
        return _GIVEN, 1.0 / scale, scales

    def product(self, x: Tensor, scale: InputScale | Tensor) -> Tensor:
        """Rows (M, K), rounded to 8 bits and multiplied by the weight: (M, N) in the dtype of x.

        Rows are rounded with one scale, by their largest magnitudes (computed, or passed as fp32 (M, 1)), or by their
        ranges.
        """
        rows, (outputs, inputs) = _readable(x if self.factors is None else x * self.factors), self.shape
        y = rows.new_empty(rows.shape[0], outputs)
        sizes = scale.contiguous() if isinstance(scale, Tensor) else None
        scaling, inverse, scales = self.scaled("size" if isinstance(scale, Tensor) else scale)
        typed_kernel("integers", "penstock_int8_product", _ARGUMENTS)(
            TYPES[rows.dtype], _Sizes(rows.shape[0], inputs, outputs), rows.data_ptr(), scaling,
            inverse, None if sizes is None else sizes.data_ptr(), self.panels.data_ptr(), self.zeros.data_ptr(),
            scales.data_ptr(), self.sums.data_ptr(), None if self.bias is None else self.bias.data_ptr(), y.data_ptr(),
            threads_for(y.numel() * inputs // PRODUCTS_PER_ELEMENT),
        )  # fmt: skip
        return y.to(x.dtype)


def widened_product(x: Tensor, panels: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Rows (M, K), rounded to bf16, times int8 numbers in panels of `PAIRS`, with a scale and a bias per output, fp32
    (N,): (M, N) in the dtype of x."""
    rows = _readable(x)
    (count, inputs), outputs = rows.shape, scales.shape[0]
    y = rows.new_empty(count, outputs)
    typed_kernel("integers", "penstock_widened_product", _ARGUMENTS)(
        TYPES[rows.dtype], _Sizes(count, inputs, outputs), rows.data_ptr(), panels.data_ptr(), scales.data_ptr(),
        None if bias is None else bias.data_ptr(), y.data_ptr(),
        threads_for(y.numel() * inputs // PRODUCTS_PER_ELEMENT),
    )  # fmt: skip
    return y.to(x.dtype)


def _readable(x: Tensor) -> Tensor:
    """Contiguous rows in a dtype that the kernels read."""
    return (x if x.dtype in TYPES else x.float()).contiguous()
