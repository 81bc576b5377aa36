"""int8 matrix products for training: rounding by rows, exact integer sums, and a linear layer's three products.

Shapes: M rows (tokens), K features in, N features out. x: (M, K), weight: (N, K), y: (M, N).

    y = x weightᵀ          summed over K    x and weight as int8, with a scale s_x for each row and s_w for each output
    dx = dy weight         summed over N    the same weight; s_w goes into dy before that is rounded by rows
    dweight = dyᵀ x        summed over M    the same x; s_x goes into dy, which is rounded by columns, or stays in bf16

So weight and x are each rounded once and stored in 8 bits, and a row with an outlier does not affect other rows.
Numbers are symmetric, −127 to 127. Gradients are rounded stochastically, up or down with the probability that preserves
the mean (Gupta et al., "Deep Learning with Limited Numerical Precision", ICML 2015, section 3). The gradient of weights
is a sum over thousands of rows, where rounding hurts most: in bf16 it is computed as in SwitchBack (Wortsman et al.,
"Stable and low-precision training for large-scale vision-language models", NeurIPS 2023, section 2.2), which however
has one scale for a whole weight.

With a learned clip log₂ α all inputs have the scale α / 127 instead, as in a deployed model with static scales. Inputs
at an end of the range are clipped: they pass no gradient on, and α receives the gradient of the clipped value (Choi et
al., "PACT: Parameterized Clipping Activation for Quantized Neural Networks", 2018, section 3), divided by √K, so that
it does not dominate the global norm (Esser et al., "Learned Step Size Quantization", ICLR 2020, section 2.2).

The sums are exact on every CPU. `torch._int_mm` is exact with VNNI. Without it, oneDNN adds pairs of products of whole
bytes in 16 bits, which saturate: there the second factor is split into halves and remainders, whose pairs fit, and
multiplied twice. So results do not depend on the processor, but int8 does not pay off without VNNI.

Measured on one core of an AMD EPYC with VNNI (`benchmarks/int8_products.py`): `_int_mm` takes half of bf16's time in
each of the three products, in any memory layout of its factors. oneDNN's quantised linear layer is as fast for unsigned
bytes if weights are packed, but a thousand times slower for signed bytes, and packing weights takes as long as a
product with 500 rows.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.config.formats import ProductPass
from penstock.cpu import this_cpu
from penstock.models.rounded import MOST as LEVELS
from penstock.models.rounded import in_levels, input_scale_of, sizes_along

_PIECE = 1 << 15
"""Elements that are rounded at a time on a CPU, so that they stay in its cache from one operation to the next."""
_ALIGNED = 8
"""A GPU's product needs all sizes to be multiples of this, and more than 16 rows."""


def rounded(
    x: Tensor, dim: int = 1, *, factor: Tensor | None = None, noisy: bool = False
) -> tuple[Tensor, Tensor]:
    """Round `x` · `factor` to int8 with one scale per slice along `dim`; returns numbers (M, K) and fp32 scales, (M, 1)
    for dim 1 and (1, K) for dim 0. Rounds to nearest even, or stochastically if `noisy`.

    x: (M, K); factor: fp32, (M, 1) or (1, K). A row that is not finite has a scale that is not finite either.
    """
    noise = torch.ops.penstock.noise(x) if noisy else None
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        wide = _scaled(x, factor)
        sizes = sizes_along(wide, dim)
        return _numbers(wide, sizes, noise), sizes / LEVELS
    rows = max(1, _PIECE // x.shape[1])
    pieces = [slice(start, start + rows) for start in range(0, len(x), rows)]
    by_piece = [factor if factor is None or len(factor) == 1 else factor[piece] for piece in pieces]
    numbers = torch.empty(x.shape, dtype=torch.int8)
    sizes = torch.zeros(1, x.shape[1]) if dim == 0 else torch.empty(len(x), 1)
    if dim == 0:
        for piece, by in zip(pieces, by_piece):
            sizes = torch.maximum(sizes, sizes_along(_scaled(x[piece], by), 0))
    for piece, by in zip(pieces, by_piece):
        wide = _scaled(x[piece], by)
        if dim == 1:
            sizes[piece] = sizes_along(wide, 1)
        own = sizes if dim == 0 else sizes[piece]
        numbers[piece] = _numbers(wide, own, None if noise is None else noise[piece])
    return numbers, sizes / LEVELS


def _scaled(x: Tensor, factor: Tensor | None) -> Tensor:
    return x.float() if factor is None else x.float() * factor


def clipped(x: Tensor, scale: Tensor) -> Tensor:
    """Round x (M, K) to int8, −128 to 127, with one fp32 scale (1,), as in a deployed model."""
    inverse = scale.double().reciprocal().float()
    return (x.float() * inverse).round().clamp(-LEVELS - 1, LEVELS).to(torch.int8)


def _numbers(wide: Tensor, sizes: Tensor, noise: Tensor | None) -> Tensor:
    numbers = in_levels(wide, sizes)
    # From −127.5/256 to 127.5/256: whole numbers do not change, and no value leaves the range.
    if noise is not None:
        numbers = numbers + (noise.float() * 2.0**-8 + 2.0**-9)
    return numbers.round().to(torch.int8)


torch.library.define("penstock::noise", "(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))


@torch.library.impl("penstock::noise", "CompositeExplicitAutograd")
def _noise(x: Tensor) -> Tensor:
    """Uniform int8 numbers in the shape of `x`, eight from each 64-bit draw of torch's generator."""
    drawn = torch.empty(-(-x.numel() // 8), dtype=torch.int64, device=x.device).random_(-(1 << 63), None)
    return drawn.view(torch.int8)[: x.numel()].view(x.shape)


@torch.library.register_fake("penstock::noise")  # type: ignore[untyped-decorator]
def _noise_shape(x: Tensor) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.int8)


def integer_product(a: Tensor, b: Tensor, *, emulate: bool = False) -> Tensor:
    """The exact product a @ b of int8 matrices (M, K) and (K, N): (M, N) int32; with `emulate` computed in fp64, which
    is exact too, on any device."""
    if emulate:
        return (a.double() @ b.double()).to(torch.int32)
    if a.device.type == "cuda":
        (m, k), n = a.shape, b.shape[1]
        # cuBLAS multiplies int8 only if the summed dimension is contiguous in both factors.
        a = _padded(a, -m % _ALIGNED if m > 16 else 24 - m, -k % _ALIGNED)
        b = _padded(b.t(), -n % _ALIGNED, -k % _ALIGNED)
        return torch._int_mm(a, b.t())[:m, :n]
    if this_cpu().vnni:
        return torch._int_mm(a, b)
    return torch._int_mm(a, b >> 1) * 2 + torch._int_mm(a, b & 1)


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    """`x` in row-major order, padded with rows and columns of zeros, which add nothing to a sum."""
    return F.pad(x, (0, columns, 0, rows)) if rows or columns else x.contiguous()


def int8_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, clip: Tensor | None = None, *,
    passes: tuple[ProductPass, ...] = ("forward", "input"), dtype: torch.dtype = torch.bfloat16,
    emulate: bool = False,
) -> Tensor:  # fmt: skip
    """`F.linear` with products in int8. x: (..., K), not empty; result: (..., N) in `dtype`.

    Gradients have the dtypes of `x`, `weight`, `bias` and `clip`; with `clip`, (1,), all inputs share one scale.
    Products that are not in `passes` are in `dtype`. Saves x in int8 and a reference to `weight`. Cannot be
    differentiated twice.
    """
    flat = x.reshape(-1, x.shape[-1])
    function: Any = _Int8
    y: Tensor = function.apply(flat, weight, bias, clip, dtype, passes, emulate)
    return y.view(*x.shape[:-1], weight.shape[0])


def scale_sums(
    sums: Tensor, columns: Tensor, rows: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Sums (M, N) times the scales of columns (1, N), then of rows (M, 1), plus a bias (N,): (M, N) in `dtype`. A
    single scale for all rows, (1,), is first multiplied by the scales of columns, as in a deployed model."""
    if rows.ndim == 1:
        scales = columns * rows
        # Torch rounds this once, as oneDNN's fused products do.
        wide = sums * scales if bias is None else torch.addcmul(bias.float(), sums.float(), scales)
        return wide.to(dtype)
    wide = sums * columns
    wide = wide * rows if bias is None else torch.addcmul(bias.float(), wide, rows)
    return wide.to(dtype)


def input_gradient(
    dy: Tensor, outputs: Tensor, scales: Tensor, dtype: torch.dtype, *, emulate: bool = False
) -> Tensor:
    """dy (M, N) times the weight, passed as int8 numbers (N, K) with scales (N, 1): (M, K) in `dtype`."""
    gradients, own = rounded(dy, factor=scales.t(), noisy=True)
    return (integer_product(gradients, outputs, emulate=emulate) * own).to(dtype)


def weight_gradient(
    dy: Tensor, rows: Tensor, scales: Tensor, dtype: torch.dtype, *, weights_too: bool, emulate: bool = False
) -> Tensor:
    """dyᵀ x (N, K), for x as int8 numbers (M, K) with scales (M, 1); in int8 with `weights_too`, else in `dtype`."""
    if weights_too:
        gradients, own = rounded(dy, 0, factor=scales, noisy=True)
        return integer_product(gradients.t(), rows, emulate=emulate) * own.t()
    # Whole numbers up to 127 are exact in bf16.
    return (dy * scales).to(dtype).t() @ rows.to(dtype)


class _Int8(torch.autograd.Function):
    """The three products; see the top of this file."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, clip: Tensor | None, dtype: torch.dtype,
        passes: tuple[ProductPass, ...], emulate: bool,
    ) -> Tensor:  # fmt: skip
        ctx.types = (x.dtype, weight.dtype, None if bias is None else bias.dtype, dtype)
        ctx.passes, ctx.emulate = passes, emulate
        if clip is None:
            rows, row_scales = rounded(x)
        else:
            row_scales = input_scale_of(clip)
            rows = clipped(x, row_scales)
        # The weight is saved as the parameter itself, so that no gathered copy of a sharded weight is kept.
        ctx.save_for_backward(rows, row_scales, weight, clip)
        if "forward" not in passes:
            return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
        outputs, output_scales = rounded(weight)
        sums = integer_product(rows, outputs.t(), emulate=emulate)
        return scale_sums(sums, output_scales.t(), row_scales, bias, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        rows, row_scales, weight, clip = ctx.saved_tensors
        x_type, weight_type, bias_type, dtype = ctx.types
        dx = dweight = dbias = dclip = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[3]:
            outputs, scales = rounded(weight)
            if "input" in ctx.passes:
                wide = x_type if clip is None else torch.float32
                dx = input_gradient(dy, outputs, scales, wide, emulate=ctx.emulate)
            else:
                dx = (dy * scales.t()).to(dtype) @ outputs.to(dtype)
            if clip is not None:
                unclipped = (rows < LEVELS) & (rows > -LEVELS - 1)
                ends = (dx * rows).masked_fill(unclipped, 0.0).sum(dtype=torch.float32)
                dclip = (ends * row_scales * (math.log(2) / rows.shape[1] ** 0.5)).to(clip.dtype)
                dx = dx * unclipped
            dx = dx.to(x_type)
        if ctx.needs_input_grad[1]:
            weights_too = "weight" in ctx.passes
            dweight = weight_gradient(
                dy, rows, row_scales.view(-1, 1), dtype, weights_too=weights_too, emulate=ctx.emulate
            ).to(weight_type)
        if ctx.needs_input_grad[2]:
            dbias = dy.sum(0, dtype=torch.float32).to(bias_type)
        return dx, dweight, dbias, dclip, None, None, None
