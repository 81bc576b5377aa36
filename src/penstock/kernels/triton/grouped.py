"""Products of tokens with the weights of their experts, which gather and scatter: see penstock/kernels/grouped.py.

A program of the first kernel takes a tile of the visits of one expert; which one follows from `ends` on the device, so
that nothing waits for the host. There are as many programs as tiles could be needed: those too many end at once. A
program of the second takes a tile of one expert's gradient, and goes through all of that expert's visits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.common import added_product, narrow, on, power_above

TILE = {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64}
OUTER_TILE = {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64}
WARPS, STAGES = 4, 3


@triton.jit  # type: ignore[untyped-decorator]
def grouped_kernel(  # type: ignore[no-untyped-def]
    x,  # (T, K) if GATHERS, else (V, K)
    weight,  # (E, N, K), of any strides
    ends,  # (E,) int32: where each expert's visits end
    order,  # (V,) int64: the number of each visit among all
    shares,  # (V,)
    out,  # (T·k, N) if SCATTERS, else (V, N)
    n,
    k,
    experts,
    visits,  # k of each token
    stride_e,
    stride_n,
    stride_k,
    GATHERS: tl.constexpr,
    SCATTERS: tl.constexpr,
    HAS_SHARES: tl.constexpr,
    EXPERTS_WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    expert = tl.arange(0, EXPERTS_WIDE)
    there = expert < experts
    stop = tl.load(ends + expert, there, other=0)
    start = tl.load(ends + expert - 1, there & (expert > 0), other=0)
    tiles = tl.where(there, tl.cdiv(stop - start, BLOCK_M), 0)
    until = tl.cumsum(tiles, 0)
    tile = tl.program_id(1)
    if tile < tl.sum(tiles, 0):
        number = tl.sum((until <= tile).to(tl.int32), 0)
        own = expert == number
        first = tl.sum(tl.where(own, start + (tile - until + tiles) * BLOCK_M, 0), 0)
        last = tl.sum(tl.where(own, stop, 0), 0)
        row = first + tl.arange(0, BLOCK_M)
        real = row < last
        visit = row.to(tl.int64)
        if GATHERS or SCATTERS:
            visit = tl.load(order + row, real, other=0)
        source = row.to(tl.int64)
        if GATHERS:
            source = visit // visits
        column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        depth = tl.arange(0, BLOCK_K)
        left = x + source[:, None] * k + depth[None, :]
        right = weight + number.to(tl.int64) * stride_e
        right += column.to(tl.int64)[None, :] * stride_n + depth.to(tl.int64)[:, None] * stride_k
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for begin in range(0, k, BLOCK_K):
            here = begin + depth < k
            rows = tl.load(left + begin, real[:, None] & here[None, :], other=0.0)
            columns = tl.load(right, (column < n)[None, :] & here[:, None], other=0.0)
            sums = added_product(rows, columns, sums)
            right += BLOCK_K * stride_k
        if HAS_SHARES:
            sums *= tl.load(shares + row, real, other=0.0).to(tl.float32)[:, None]
        place = row.to(tl.int64)
        if SCATTERS:
            place = visit
        at = place[:, None] * n + column[None, :]
        tl.store(out + at, narrow(sums, out.dtype.element_ty), real[:, None] & (column < n)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def grouped_outer_kernel(  # type: ignore[no-untyped-def]
    grad,  # (T, N) if GATHERS_GRAD, else (V, N)
    x,  # (T, K) if GATHERS, else (V, K)
    ends,
    order,
    shares,
    out,  # (E, N, K)
    n,
    k,
    visits,
    GATHERS_GRAD: tl.constexpr,
    GATHERS: tl.constexpr,
    HAS_SHARES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    across = tl.cdiv(k, BLOCK_K)
    high = (tl.program_id(0) // across) * BLOCK_N + tl.arange(0, BLOCK_N)
    wide = (tl.program_id(0) % across) * BLOCK_K + tl.arange(0, BLOCK_K)
    expert = tl.program_id(1)
    start = tl.load(ends + expert - 1, expert > 0, other=0)
    stop = tl.load(ends + expert)
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for first in range(start, stop, BLOCK_M):
        row = first + tl.arange(0, BLOCK_M)
        real = row < stop
        source = row.to(tl.int64)
        token = source
        if GATHERS or GATHERS_GRAD:
            token = tl.load(order + row, real, other=0) // visits
        if GATHERS_GRAD:
            left = grad + token[None, :] * n
        else:
            left = grad + source[None, :] * n
        if GATHERS:
            right = x + token[:, None] * k
        else:
            right = x + source[:, None] * k
        rows = tl.load(left + high[:, None], (high < n)[:, None] & real[None, :], other=0.0)
        if HAS_SHARES:
            factor = tl.load(shares + row, real, other=0.0).to(tl.float32)
            rows = narrow(rows.to(tl.float32) * factor[None, :], rows.dtype)
        columns = tl.load(right + wide[None, :], real[:, None] & (wide < k)[None, :], other=0.0)
        sums = added_product(rows, columns, sums)
    at = expert.to(tl.int64) * n * k + high.to(tl.int64)[:, None] * k + wide[None, :]
    tl.store(out + at, narrow(sums, out.dtype.element_ty), (high < n)[:, None] & (wide < k)[None, :])


def product(
    x: Tensor, weight: Tensor, ends: Tensor, order: Tensor, shares: Tensor | None, visits: int, gathers: bool,
    scatters: bool, out: Tensor,
) -> None:  # fmt: skip
    """Fill `out`, or of it the rows of the visits, of a contiguous x."""
    experts, n, k = weight.shape
    tiles = triton.cdiv(len(order), TILE["BLOCK_M"]) + experts
    with on(x):
        grouped_kernel[(triton.cdiv(n, TILE["BLOCK_N"]), tiles)](
            x, weight, ends, order, order if shares is None else shares, out, n, k, experts, visits, *weight.stride(),
            GATHERS=gathers, SCATTERS=scatters, HAS_SHARES=shares is not None, EXPERTS_WIDE=power_above(experts),
            **TILE, num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip


def outer(
    grad: Tensor, x: Tensor, ends: Tensor, order: Tensor, shares: Tensor | None, visits: int, gathers_grad: bool,
    gathers: bool, out: Tensor,
) -> None:  # fmt: skip
    """Fill `out` (E, N, K), of contiguous factors."""
    experts, n, k = out.shape
    tiles = triton.cdiv(n, OUTER_TILE["BLOCK_N"]) * triton.cdiv(k, OUTER_TILE["BLOCK_K"])
    with on(x):
        grouped_outer_kernel[(tiles, experts)](
            grad, x, ends, order, order if shares is None else shares, out, n, k, visits, GATHERS_GRAD=gathers_grad,
            GATHERS=gathers, HAS_SHARES=shares is not None, **OUTER_TILE, num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
