"""Functions that count, sort, spread and merge the visits of tokens to experts.

Shapes: T tokens, D width, E experts, k experts per token, V visits (T·k where none is dropped).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Spread(torch.autograd.Function):
    """The tokens x (T, D) of visits: row `order[v] // k` for visit v. Gradients are summed in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.tokens, ctx.k = len(x), k
        return x.index_select(0, order if k == 1 else order // k)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (order,) = ctx.saved_tensors
        placed = grad.new_zeros(ctx.tokens * ctx.k, grad.shape[1]).index_copy_(0, order, grad)
        return placed if ctx.k == 1 else _summed(placed.view(ctx.tokens, ctx.k, grad.shape[1])), None, None


def _summed(x: Tensor) -> Tensor:
    """The sum of (T, k, D) over k. For k = 2, the usual case, it takes a tenth of the time of torch's sum on a CPU."""
    return x[:, 0] + x[:, 1] if x.shape[1] == 2 else x.sum(1)


class _Merged(torch.autograd.Function):
    """The sum of a token's two results (T, 2, D) times their weights (T, 2)."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(made, weights)
        return (made[:, 0] * weights[:, :1]).addcmul_(made[:, 1], weights[:, 1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        made, weights = ctx.saved_tensors
        grad = grad[:, None]
        return grad * weights[..., None], (grad * made).sum(2)


def merged(made: Tensor, weights: Tensor) -> Tensor:
    """See `_Merged`."""
    return _Merged.apply(made, weights)  # type: ignore[no-any-return, no-untyped-call]


def spread(x: Tensor, order: Tensor, k: int) -> Tensor:
    """See `_Spread`."""
    return _Spread.apply(x, order, k)  # type: ignore[no-any-return, no-untyped-call]


class _Permuted(torch.autograd.Function):
    """Rows `take` of x, where row i of the result's gradient goes to row `back[i]` of x repeated k times: both passes
    are lookups, which compiled code fuses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, take: Tensor, back: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(back)
        ctx.k = k
        return x[take]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (back,) = ctx.saved_tensors
        grad = grad[back]
        return grad if ctx.k == 1 else grad.view(-1, ctx.k, grad.shape[1]).sum(1), None, None, None


def permuted(x: Tensor, take: Tensor, back: Tensor, k: int) -> Tensor:
    """See `_Permuted`."""
    if not torch.is_grad_enabled():
        return x[take]
    return _Permuted.apply(x, take, back, k)  # type: ignore[no-any-return, no-untyped-call]


def places_of(keys: Tensor) -> Tensor:
    """For each of the keys (V,), the number of equal keys before it."""
    ranked, order = keys.sort(stable=True)
    places = torch.arange(len(keys), device=keys.device) - torch.searchsorted(ranked, ranked)
    return torch.empty_like(order).scatter_(0, order, places)


def loads_of(chosen: Tensor, experts: int, shares: Tensor | None = None) -> Tensor:
    """The number of visits (T, k), or (V,) without shares, to each expert, (E,); tokens with a share of 0 are not
    counted. Expert number E means no expert."""
    ones = torch.ones_like(chosen)
    if shares is not None:
        ones *= (shares != 0)[:, None]
    return chosen.new_zeros(experts + 1).scatter_add_(0, chosen.flatten(), ones.flatten())[:experts]
