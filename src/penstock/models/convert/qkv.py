"""The fused qkv projection: Penstock orders its rows (head, {q, k, v}, K), others ({q, k, v}, head, K)."""

from __future__ import annotations

from torch import Tensor


def by_head(rows: Tensor, heads: int) -> Tensor:
    """({q, k, v}, head, K) to (head, {q, k, v}, K), along the first dimension of a weight or a bias."""
    return rows.reshape(3, heads, -1, *rows.shape[1:]).transpose(0, 1).flatten(0, 2).contiguous()


def by_kind(rows: Tensor, heads: int) -> Tensor:
    """(head, {q, k, v}, K) to ({q, k, v}, head, K): the inverse of `by_head`."""
    return rows.reshape(heads, 3, -1, *rows.shape[1:]).transpose(0, 1).flatten(0, 2).contiguous()
