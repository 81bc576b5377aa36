"""fp8 matrix products: dynamic scales, the rounding, and a linear layer's three products (Micikevicius et al., "FP8
Formats for Deep Learning", 2022, for the formats).

Shapes: M rows (tokens), K features in, N features out. x: (M, K), weight: (N, K), y: (M, N).

    y = x weightᵀ          summed over K
    dx = dy weight         summed over N
    dweight = dyᵀ x        summed over M

A tensor is stored as fp8(x · s) together with 1/s. `tensorwise` has one s per tensor, so each tensor is rounded once
and used in two products; gradients are e5m2, because they need its range. `rowwise` has one s per row along the summed
dimension, so each tensor is rounded separately for each of its two products; all are e4m3, whose extra bit pays off
once outliers affect only their own row, and every s is a power of two, which adds no rounding.

The reference is built in: with `emulate` the same numbers are multiplied in fp32, on any device.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.config.formats import PRODUCTS
from penstock.dtypes import DTYPES

Scaling = Literal["tensorwise", "rowwise"]
E4M3, E5M2 = DTYPES["fp8"], DTYPES["fp8_e5m2"]
LARGEST = {dtype: torch.finfo(dtype).max for dtype in (E4M3, E5M2)}
# Lower bound of the largest magnitude for a scale, so that scales, their inverses and products of two inverses are
# normal fp32 numbers. Tensors with smaller values are rounded more coarsely, down to zero.
_LEAST = 2.0**-50
_EXPONENT = 0x7F800000
# The hardware needs operands whose sizes are multiples of this.
MULTIPLE, _ = PRODUCTS["fp8"].multiple


def scale_of(x: Tensor, dtype: torch.dtype, dim: int | None = None, *, power_of_two: bool = False) -> Tensor:
    """The fp32 factor that scales the largest magnitude of `x` to the largest value of an fp8 type.

    0-d for the whole tensor; with `dim`, one per slice along it, and the dimension stays with size 1. With
    `power_of_two` it is rounded down to a power of two, so that scaling is exact.
    """
    largest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = scale_to(largest, dtype)
    return (scale.view(torch.int32) & _EXPONENT).view(torch.float32) if power_of_two else scale


def scale_to(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The fp32 factors that scale these magnitudes to the largest value of an fp8 type."""
    return LARGEST[dtype] / largest.float().clamp_min(_LEAST)


def quantize(x: Tensor, dtype: torch.dtype, scale: Tensor) -> Tensor:
    """fp8(x · scale), to nearest even. Values beyond the largest fp8 value become that value, never infinity or NaN;
    NaN stays NaN, and an infinite x, whose scale is 0, becomes NaN."""
    largest = LARGEST[dtype]
    return (x.float() * scale).clamp(-largest, largest).to(dtype)


def scaled_product(
    a: Tensor, b: Tensor, inverse_a: Tensor, inverse_b: Tensor, out: torch.dtype, *,
    bias: Tensor | None = None, fast: bool = False, emulate: bool = False,
) -> Tensor:  # fmt: skip
    """(a · inverse_a) @ (b · inverse_b) + bias in dtype `out`. a: (M, K), row-major, b: (K, N), column-major, both fp8;
    the inverses are 0-d, or (M, 1) and (1, N).

    `fast` lets Hopper's tensor cores sum in their own, shorter accumulator. `emulate` multiplies in fp32.
    """
    if emulate:
        with torch.autocast(a.device.type, enabled=False):
            y = (a.float() @ b.float()) * (inverse_a * inverse_b)
            return (y if bias is None else y + bias.float()).to(out)
    return torch._scaled_mm(
        a, b, scale_a=inverse_a, scale_b=inverse_b, bias=bias, out_dtype=out, use_fast_accum=fast
    )


def fp8_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, scaling: Scaling = "tensorwise",
    dtype: torch.dtype = torch.bfloat16, emulate: bool = False, rounded: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """`F.linear` with its three products in fp8. x: (..., K), not empty; result: (..., N) in `dtype`.

    Gradients have the dtypes of `x`, `weight` and `bias`. Weights of any dtype are rounded to fp8 directly; tensorwise
    ones may come `rounded`, with their inverse scale, and the values of `weight` are then not read. K and N must be
    multiples of 16. Cannot be differentiated twice.
    """
    function: Any = _Tensorwise if scaling == "tensorwise" else _Rowwise
    y: Tensor = function.apply(x.reshape(-1, x.shape[-1]), weight, bias, dtype, emulate, *(rounded or ()))
    return y.view(*x.shape[:-1], weight.shape[0])


class _Tensorwise(torch.autograd.Function):
    """One scale per tensor. Saves x and weight in fp8, a quarter of fp32."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, emulate: bool,
        qw: Tensor | None = None, inverse_w: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        qx, inverse_x = tensor_in_fp8(x, E4M3)
        if qw is None or inverse_w is None:
            qw, inverse_w = tensor_in_fp8(weight, E4M3)
        ctx.save_for_backward(qx, qw, inverse_x, inverse_w)
        ctx.types = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.emulate = emulate
        bias = None if bias is None else bias.to(dtype)
        return scaled_product(qx, qw.t(), inverse_x, inverse_w, dtype, bias=bias, fast=True, emulate=emulate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        qx, qw, inverse_x, inverse_w = ctx.saved_tensors
        x_type, weight_type, bias_type = ctx.types
        q, inverse = tensor_in_fp8(dy, E5M2)
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            dx = scaled_product(q, _column_major(qw), inverse, inverse_w, dy.dtype, emulate=ctx.emulate)
            dx = dx.to(x_type)
        if ctx.needs_input_grad[1]:
            qt, qx = _padded(q).t().contiguous(), _column_major(_padded(qx))
            dweight = scaled_product(qt, qx, inverse, inverse_x, weight_type, emulate=ctx.emulate)
        return dx, dweight, _bias_gradient(ctx, dy, bias_type), None, None, None, None


class _Rowwise(torch.autograd.Function):
    """One scale per row along the summed dimension. Saves x in the compute dtype."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, emulate: bool
    ) -> Tensor:
        ctx.types = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.emulate = emulate
        x = x.to(dtype)
        ctx.save_for_backward(x, weight)
        qx, inverse_x = rows_in_fp8(x)
        qw, inverse_w = rows_in_fp8(weight)
        bias = None if bias is None else bias.to(dtype)
        return scaled_product(
            qx, qw.t(), inverse_x, inverse_w.t(), dtype, bias=bias, fast=True, emulate=emulate
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        x_type, weight_type, bias_type = ctx.types
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            q, inverse = rows_in_fp8(dy)
            qw, inverse_w = rows_in_fp8(weight.t())
            dx = scaled_product(q, qw.t(), inverse, inverse_w.t(), dy.dtype, emulate=ctx.emulate)
            dx = dx.to(x_type)
        if ctx.needs_input_grad[1]:
            q, inverse = rows_in_fp8(_padded(dy).t())
            qx, inverse_x = rows_in_fp8(_padded(x).t())
            # The rowwise kernel writes bf16 only.
            dweight = scaled_product(q, qx.t(), inverse, inverse_x.t(), dy.dtype, emulate=ctx.emulate)
            dweight = dweight.to(weight_type)
        return dx, dweight, _bias_gradient(ctx, dy, bias_type), None, None


def rows_in_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """A row-major matrix rounded to e4m3 with a scale per row, and the inverse scales (rows, 1)."""
    scale = scale_of(x, E4M3, 1, power_of_two=True)
    return quantize(x, E4M3, scale).contiguous(), scale.reciprocal()


def tensor_in_fp8(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A tensor rounded to an fp8 type with one scale, and the inverse scale, 0-d."""
    scale = scale_of(x, dtype)
    return quantize(x, dtype, scale), scale.reciprocal()


def _column_major(q: Tensor) -> Tensor:
    return q.t().contiguous().t()


def _padded(x: Tensor) -> Tensor:
    """`x` padded with rows of zeros to a multiple of 16; they add nothing to a sum over rows."""
    missing = -x.shape[0] % MULTIPLE
    if not missing:
        return x
    if x.dtype in LARGEST:  # F.pad does not support fp8, and a zero byte is a zero
        return F.pad(x.view(torch.uint8), (0, 0, 0, missing)).view(x.dtype)
    return F.pad(x, (0, 0, 0, missing))


def _bias_gradient(ctx: Any, dy: Tensor, dtype: torch.dtype | None) -> Tensor | None:
    return dy.sum(0, dtype=torch.float32).to(dtype) if dtype is not None and ctx.needs_input_grad[2] else None
