"""Leaves padding out of what is computed token by token, and puts it back where attention wants whole samples.

Attention itself stays in samples with a mask of padding: it is a small part of the work at the lengths of sentences,
and one call of a fused kernel for all samples is quicker than one for each.

Shapes: B samples, N tokens, T tokens that are computed, D features.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

SIZES = 16
"""Different T at the most, so that compiled code is used again; a sixteenth of all tokens is computed in vain at worst,
half of that on average."""


class Real(NamedTuple):
    """Which tokens of a batch are computed."""

    rows: Tensor
    """(T,), their numbers among all tokens in the order in which blocks hold them: all that are no padding, in their
    order, and some padding up to one of `SIZES` numbers."""
    first: int
    second: int
    """The batch's first two sizes: B and N, or N and B."""

    @classmethod
    def of(cls, lengths: Tensor, places: Tensor, *, sequence_first: bool) -> Real | None:
        """Of tokens at `places` (N,) those before `lengths` (B,) of each sample; None where leaving out the others
        saves nothing. On a GPU this waits for the lengths.
        """
        padding = places >= lengths[:, None]  # (B, N)
        count = _rounded(padding)
        if count == padding.numel():
            return None
        padding = padding.T if sequence_first else padding
        rows = padding.flatten().to(torch.uint8).argsort(stable=True)[:count]
        return cls(rows, *padding.shape)

    def take(self, x: Tensor) -> Tensor:
        """(B, N, D), or (N, B, D), to (1, T, D)."""
        return _Take.apply(x.flatten(0, 1), self.rows).unsqueeze(0)  # type: ignore[no-any-return, no-untyped-call]

    def put(self, x: Tensor) -> Tensor:
        """The reverse: zeros where no token is computed."""
        whole = _Put.apply(x[0], self.rows, self.first * self.second)  # type: ignore[no-untyped-call]
        return whole.unflatten(0, (self.first, self.second))  # type: ignore[no-any-return]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _rounded(padding: Tensor) -> int:
    """How many tokens are no padding, rounded up to a sixteenth of all; one at the least."""
    tokens = padding.numel()
    step = -(-tokens // SIZES)
    return min(tokens, max(1, -(-int((~padding).sum()) // step)) * step)


class _Take(torch.autograd.Function):
    """Rows of x, none of them twice: so gradients are put in their places, and need not be added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.count = len(x)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (rows,) = ctx.saved_tensors
        return grad.new_zeros(ctx.count, *grad.shape[1:]).index_copy_(0, rows, grad), None


class _Put(torch.autograd.Function):
    """Rows of x in their places among `count`, and zeros elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(rows)
        return x.new_zeros(count, *x.shape[1:]).index_copy_(0, rows, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (rows,) = ctx.saved_tensors
        return grad.index_select(0, rows), None, None
