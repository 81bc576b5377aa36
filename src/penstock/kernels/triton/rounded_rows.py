"""Rounding to 8 bits in the pass that makes the numbers, and the product of what was rounded: see
penstock/products/rounded_rows.py.

In the first kernel a tile has whole rows, and each row's largest magnitude is known before anything is written. The
second multiplies tiles of 8-bit numbers and does in registers what follows: both scales, bias, activation, rounding.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.common import activated, narrow, on, tile_of, whole

TILE = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 128}
WARPS, STAGES = 8, 3
_LARGEST = tl.constexpr(448.0)  # of e4m3


@triton.jit  # type: ignore[untyped-decorator]
def rounded_rows_kernel(  # type: ignore[no-untyped-def]
    x,  # (R, D), or (R, 2·D) of a gated activation: gates, then what they multiply
    weight,  # (D,)
    bias,  # (D,)
    numbers,  # (R, D) int8 or e4m3
    scales,  # (R,) fp32
    means,  # (R,) fp32
    inverses,  # (R,) fp32
    rows,
    columns,
    eps,
    least,  # the least magnitude that a scale is made for
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FP8: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    there = column < columns
    real = (row < rows)[:, None] & there[None, :]
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    if GATED:
        place = row.to(tl.int64)[:, None] * (2 * columns) + column[None, :]
        value = activated(tl.load(x + place, real, other=0.0).to(tl.float32), ACTIVATION)
        value *= tl.load(x + place + columns, real, other=0.0).to(tl.float32)
    else:
        value = activated(tl.load(x + at, real, other=0.0).to(tl.float32), ACTIVATION)
    if NORM != "none":
        if NORM == "layer":
            mean = tl.sum(value, 1) / columns
            tl.store(means + row, mean, row < rows)
            value = tl.where(real, value - mean[:, None], 0.0)
        inverse = 1.0 / tl.sqrt(tl.sum(value * value, 1) / columns + eps)
        tl.store(inverses + row, inverse, row < rows)
        value *= inverse[:, None]
        if HAS_WEIGHT:
            value *= tl.load(weight + column, there, other=0.0).to(tl.float32)[None, :]
        if HAS_BIAS:
            value += tl.load(bias + column, there, other=0.0).to(tl.float32)[None, :]
    largest = tl.maximum(tl.max(tl.abs(value), 1), least)
    if FP8:
        scale = tl.div_rn(_LARGEST, largest)  # rounded down to a power of two, so that scaling is exact
        scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        value = tl.clamp(value * scale[:, None], -_LARGEST, _LARGEST)
        tl.store(numbers + at, narrow(value, tl.float8e4nv), real)
        tl.store(scales + row, 1.0 / scale, row < rows)
    else:
        value = whole(value * tl.div_rn(127.0, largest)[:, None])
        tl.store(numbers + at, value.to(tl.int8), real)
        tl.store(scales + row, tl.div_rn(largest, 127.0), row < rows)


@triton.jit  # type: ignore[untyped-decorator]
def rounded_product_kernel(  # type: ignore[no-untyped-def]
    a,  # (M, K) int8 or e4m3
    b,  # (N, K) of the same
    a_scales,  # (M,) fp32
    b_scales,  # (N,) fp32
    bias,  # (N,)
    out,  # (M, N)
    m,
    n,
    k,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # Eight rows of tiles at a time, whose factors stay in the cache.
    across = tl.cdiv(n, BLOCK_N)
    group = tl.program_id(0) // (8 * across)
    high = tl.minimum(tl.cdiv(m, BLOCK_M) - 8 * group, 8)
    inside = tl.program_id(0) % (8 * across)
    row = (8 * group + inside % high) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = (inside // high) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    left = a + row.to(tl.int64)[:, None] * k + depth[None, :]
    right = b + column.to(tl.int64)[None, :] * k + depth[:, None]
    kind: tl.constexpr = tl.int32 if a.dtype.element_ty == tl.int8 else tl.float32
    sums = tl.zeros([BLOCK_M, BLOCK_N], kind)
    for first in range(0, k, BLOCK_K):
        here = first + depth < k
        rows = tl.load(left + first, (row < m)[:, None] & here[None, :], other=0.0)
        columns = tl.load(right + first, (column < n)[None, :] & here[:, None], other=0.0)
        sums = tl.dot(rows, columns, sums, out_dtype=kind)
    value = sums.to(tl.float32) * tl.load(b_scales + column, column < n, other=0.0)[None, :]
    value *= tl.load(a_scales + row, row < m, other=0.0)[:, None]
    if HAS_BIAS:
        value += tl.load(bias + column, column < n, other=0.0).to(tl.float32)[None, :]
    value = narrow(activated(value, ACTIVATION), out.dtype.element_ty)
    at = row.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(out + at, value, (row < m)[:, None] & (column < n)[None, :])


def round_rows(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, norm: str, activation: str, gated: bool,
    least: float, numbers: Tensor, scales: Tensor, means: Tensor, inverses: Tensor,
) -> None:  # fmt: skip
    """Fill the last four, of contiguous rows x."""
    rows, block, warps = tile_of(numbers.shape[1])
    with on(x):
        rounded_rows_kernel[(triton.cdiv(len(x), rows),)](
            x, x if weight is None else weight, x if bias is None else bias, numbers, scales, means, inverses,
            *numbers.shape, eps, least, NORM=norm, ACTIVATION=activation, GATED=gated, HAS_WEIGHT=weight is not None,
            HAS_BIAS=bias is not None, FP8=numbers.dtype.is_floating_point, ROWS=rows, BLOCK=block, num_warps=warps,
        )  # fmt: skip


def multiply(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, bias: Tensor | None, activation: str, out: Tensor,
) -> None:  # fmt: skip
    """Fill `out`, of contiguous factors."""
    (m, k), n = a.shape, len(b)
    with on(a):
        rounded_product_kernel[(triton.cdiv(m, TILE["BLOCK_M"]) * triton.cdiv(n, TILE["BLOCK_N"]),)](
            a, b, a_scales, b_scales, a_scales if bias is None else bias, out, m, n, k, ACTIVATION=activation,
            HAS_BIAS=bias is not None, **TILE, num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
