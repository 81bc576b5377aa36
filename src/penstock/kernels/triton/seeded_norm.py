"""Dropout, residual and norm in one pass forward and one backward: see penstock/kernels/residual_norm.py.

A tile has whole rows. The forward pass reads branch and residual and writes their sum and its norm. The backward pass
reads the sum and two gradients and writes two. It draws the mask again: Philox (Salmon et al., SC 2011) with counter
(column // 4, row) and the seed as key yields the numbers of four adjacent elements, which belong to one thread.
Programs of the backward pass loop over tiles, and keep sums of the weight's gradients in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.common import narrow, on, programs_for, tile_of


@triton.jit  # type: ignore[untyped-decorator]
def _drawn(seed, row, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Random 24-bit numbers, (ROWS, BLOCK) int32."""
    quarter = tl.arange(0, BLOCK // 4)[None, :] + 0 * row[:, None]
    line = row[:, None] + 0 * quarter
    a, b, c, d = tl.philox(tl.load(seed), quarter, line, 0 * line, 0 * line)
    bits = tl.join(tl.join(a, c), tl.join(b, d))  # a, b, c, d of each quarter, one after the other
    return (tl.reshape(bits, [row.shape[0], BLOCK]) >> 8).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def seeded_norm_kernel(  # type: ignore[no-untyped-def]
    x,  # (R, D)
    residual,  # (R, D)
    weight,  # (D,)
    bias,  # (D,)
    seed,  # (1,) int64
    normed,  # (R, D)
    total,  # (R, D)
    means,  # (R,) fp32
    inverses,  # (R,) fp32
    rows,
    columns,
    level,  # of 2²⁴: elements with numbers below it are dropped
    scale,
    eps,
    DROPS: tl.constexpr,
    CENTRED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    there = column < columns
    real = (row < rows)[:, None] & there[None, :]
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    value = tl.load(x + at, real, other=0.0).to(tl.float32)
    if DROPS:
        value = tl.where(_drawn(seed, row, BLOCK) >= level, value * scale, 0.0)
    value += tl.load(residual + at, real, other=0.0).to(tl.float32)
    kept = narrow(value, total.dtype.element_ty)
    tl.store(total + at, kept, real)
    value = kept.to(tl.float32)  # statistics are of the rounded values, which the backward pass reads
    if CENTRED:
        mean = tl.sum(value, 1) / columns
        tl.store(means + row, mean, row < rows)
        value = tl.where(real, value - mean[:, None], 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(value * value, 1) / columns + eps)
    tl.store(inverses + row, inverse, row < rows)
    value = value * inverse[:, None]
    if HAS_WEIGHT:
        value *= tl.load(weight + column, there, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        value += tl.load(bias + column, there, other=0.0).to(tl.float32)[None, :]
    tl.store(normed + at, narrow(value, normed.dtype.element_ty), real)


@triton.jit  # type: ignore[untyped-decorator]
def seeded_norm_backward_kernel(  # type: ignore[no-untyped-def]
    to_normed,  # (R, D), gradients of both results
    to_total,
    total,  # (R, D)
    weight,  # (D,)
    means,  # (R,) fp32
    inverses,
    seed,
    to_x,  # (R, D)
    to_residual,
    to_weight,  # (programs, D) fp32
    to_bias,
    rows,
    columns,
    level,
    scale,
    DROPS: tl.constexpr,
    CENTRED: tl.constexpr,
    HAS_TOTAL: tl.constexpr,
    HAS_X: tl.constexpr,  # whether the gradient of x differs from the residual's
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    there = column < columns
    if HAS_WEIGHT:
        factor = tl.load(weight + column, there, other=0.0).to(tl.float32)
    weight_sums = tl.zeros([ROWS, BLOCK], tl.float32)
    bias_sums = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        real = (row < rows)[:, None] & there[None, :]
        at = row.to(tl.int64)[:, None] * columns + column[None, :]
        value = tl.load(total + at, real, other=0.0).to(tl.float32)
        grad = tl.load(to_normed + at, real, other=0.0).to(tl.float32)
        inverse = tl.load(inverses + row, row < rows, other=0.0)[:, None]
        if CENTRED:
            value -= tl.load(means + row, row < rows, other=0.0)[:, None]
        value = tl.where(real, value * inverse, 0.0)
        if HAS_BIAS:
            bias_sums += grad
        if HAS_WEIGHT:
            weight_sums += grad * value
            grad *= factor[None, :]
        grad -= value * (tl.sum(grad * value, 1) / columns)[:, None]
        if CENTRED:
            # The mean of `value` is 0, so the subtraction above did not change the mean of `grad`.
            grad -= (tl.sum(grad, 1) / columns)[:, None]
        grad *= inverse
        if HAS_TOTAL:
            grad += tl.load(to_total + at, real, other=0.0).to(tl.float32)
        tl.store(to_residual + at, narrow(grad, to_residual.dtype.element_ty), real)
        if DROPS:
            grad = tl.where(_drawn(seed, row, BLOCK) >= level, grad * scale, 0.0)
        if HAS_X:
            tl.store(to_x + at, narrow(grad, to_x.dtype.element_ty), real)
    place = tl.program_id(0) * columns + column
    if HAS_WEIGHT:
        tl.store(to_weight + place, tl.sum(weight_sums, 0), there)
    if HAS_BIAS:
        tl.store(to_bias + place, tl.sum(bias_sums, 0), there)


def forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, seed: Tensor, level: int, scale: float,
    eps: float, centred: bool, normed: Tensor, total: Tensor, means: Tensor, inverses: Tensor,
) -> None:  # fmt: skip
    """Fill `normed`, `total`, `means` and `inverses`, from contiguous inputs (R, D) with R > 0."""
    rows, block, warps = tile_of(x.shape[1])
    with on(x):
        seeded_norm_kernel[(triton.cdiv(len(x), rows),)](
            x, residual, x if weight is None else weight, x if bias is None else bias, seed, normed, total, means,
            inverses, *x.shape, level, scale, eps, DROPS=level > 0, CENTRED=centred, HAS_WEIGHT=weight is not None,
            HAS_BIAS=bias is not None, ROWS=rows, BLOCK=block, num_warps=warps,
        )  # fmt: skip


def backward(
    to_normed: Tensor, to_total: Tensor | None, total: Tensor, weight: Tensor | None, has_bias: bool, means: Tensor,
    inverses: Tensor, seed: Tensor, level: int, scale: float, centred: bool, to_x: Tensor, to_residual: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Fill `to_x` and `to_residual`, and return the gradients of weight and bias, (D,) fp32."""
    rows, block, warps = tile_of(total.shape[1])
    programs = programs_for(total.device, triton.cdiv(len(total), rows))
    sums = torch.empty(2, programs, total.shape[1], dtype=torch.float32, device=total.device)
    with on(total):
        seeded_norm_backward_kernel[(programs,)](
            to_normed, to_normed if to_total is None else to_total, total, total if weight is None else weight, means,
            inverses, seed, to_x, to_residual, sums[0], sums[1], *total.shape, level, scale, DROPS=level > 0,
            CENTRED=centred, HAS_TOTAL=to_total is not None, HAS_X=to_x.numel() > 0, HAS_WEIGHT=weight is not None,
            HAS_BIAS=has_bias, ROWS=rows, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return sums[0].sum(0), sums[1].sum(0)
