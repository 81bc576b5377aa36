"""Grouped products of a mixture of experts that read tokens where they are and write results where they belong.

Shapes: T tokens, k visits of a token, V visits that are computed (T·k where none is dropped), E experts, K features in,
N out. Visits are sorted by expert; visit v is number order[v] among all T·k, that of token order[v] // k, and those of
expert e end at ends[e]. With e(v) a visit's expert, and a share for each visit or 1,

    gathered    y[v] = share[v] · W[e(v)] x[order[v] // k]                      (T, K) to (V, N)
    scattered   y[t] = Σ_{v: order[v] // k = t} share[v] · W[e(v)] h[v]         (V, K) to (T, N)

Each is the other's gradient, with Wᵀ; that of W[e] is the sum over its visits of an outer product, and that of share[v]
is h[v] · W[e(v)]ᵀ dy[order[v] // k]. Sums are in fp32 and their order is fixed, so that results repeat.

A product computes 2·V·N·K FLOPs. In a type of e bytes a grouped product between a gather and a scatter of its own moves
2·e·V·K bytes before and, with shares, 4·e·V·N behind it that these kernels do not; what scatters writes e·V·N bytes and
adds up k rows of a token, as the operators do.

On a GPU with Triton kernels do this (kernels/triton/grouped.py). The reference is one expert after the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.kernels.remainder_adamw import runs_triton


def gathered_product(
    x: Tensor, weight: Tensor, ends: Tensor, order: Tensor, visits: int, shares: Tensor | None = None
) -> Tensor:
    """y (V, N), of x (T, K), weight (E, N, K) of its type, ends (E,) int32, order (V,) int64 and `visits` k; shares:
    (V,), of any type, have no gradient. Raises ConfigError for shapes that do not fit."""
    _check(x, weight, ends, order, shares)
    y: Tensor = _gathered(x, weight, ends, order, visits, shares)
    return y


def scattered_product(
    x: Tensor,
    weight: Tensor,
    ends: Tensor,
    order: Tensor,
    visits: int,
    tokens: int,
    shares: Tensor | None = None,
) -> Tensor:
    """y (T, N), of x (V, K) and else as `gathered_product`; T is `tokens`. Shares have a gradient. Tokens without
    visits get zeros. Raises ConfigError for shapes that do not fit."""
    _check(x, weight, ends, order, shares)
    if len(x) != len(order):
        raise ConfigError(
            f"scattered_product has {len(x)} rows, but {len(order)} visits; pass a row for each."
        )
    y: Tensor = _scattered(x, weight, ends, order, visits, tokens, shares)
    return y


def _check(x: Tensor, weight: Tensor, ends: Tensor, order: Tensor, shares: Tensor | None) -> None:
    fits = (
        x.ndim == 2 and weight.ndim == 3 and weight.shape[2] == x.shape[1] and ends.shape == weight.shape[:1]
    )
    if not fits or x.dtype != weight.dtype or (shares is not None and shares.shape != order.shape):
        raise ConfigError(
            f"A grouped product needs rows (·, K), weights (E, N, K) of their type, and where the visits of each "
            f"expert end (E,), but has {tuple(x.shape)} {x.dtype}, {tuple(weight.shape)} {weight.dtype} and "
            f"{tuple(ends.shape)}; cast or transpose them."
        )


def _fuses(x: Tensor) -> bool:
    return runs_triton(x.device) and x.dtype != torch.float64


def _by_expert(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows (V, K), sorted, times the weights of their experts: (V, N)."""
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    parts = [rows @ one.t() for rows, one in zip(torch.split(x, counts), weight)]
    return torch.cat(parts) if parts else x.new_empty(0, weight.shape[1])


def _shared(y: Tensor, shares: Tensor | None) -> Tensor:
    return (
        y
        if shares is None
        else (y.to(torch.promote_types(y.dtype, shares.dtype)) * shares[:, None]).to(y.dtype)
    )


@torch.library.custom_op("penstock::gathered_product", mutates_args=())
def _gathered(
    x: Tensor, weight: Tensor, ends: Tensor, order: Tensor, visits: int, shares: Tensor | None
) -> Tensor:
    if not _fuses(x) or not len(order):
        return _shared(_by_expert(x[order // visits], weight, ends), shares)
    from penstock.kernels.triton.grouped import product

    y = x.new_empty(len(order), weight.shape[1])
    product(x.contiguous(), weight, ends, order, shares, visits, True, False, y)
    return y


@_gathered.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor, order: Tensor, *_: Any) -> Tensor:
    return x.new_empty(order.shape[0], weight.shape[1])


@torch.library.custom_op("penstock::scattered_product", mutates_args=())
def _scattered(
    x: Tensor, weight: Tensor, ends: Tensor, order: Tensor, visits: int, tokens: int, shares: Tensor | None
) -> Tensor:
    whole = len(order) == tokens * visits
    placed = (x.new_empty if whole else x.new_zeros)(tokens * visits, weight.shape[1])
    if not _fuses(x) or not len(order):
        placed[order] = _shared(_by_expert(x, weight, ends), shares)
    else:
        from penstock.kernels.triton.grouped import product

        product(x.contiguous(), weight, ends, order, shares, visits, False, True, placed)
    return placed if visits == 1 else placed.view(tokens, visits, weight.shape[1]).sum(1)


@_scattered.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor, order: Tensor, visits: int, tokens: int, *_: Any) -> Tensor:
    return x.new_empty(tokens, weight.shape[1])


@torch.library.custom_op("penstock::grouped_outer_product", mutates_args=())
def _outer(
    grad: Tensor, x: Tensor, ends: Tensor, order: Tensor, visits: int, shares: Tensor | None,
    gathers_grad: bool,
) -> Tensor:  # fmt: skip
    """Each expert's gradient (E, N, K), where either grad or x is by token and the other by visit."""
    out = x.new_empty(len(ends), grad.shape[1], x.shape[1])
    if _fuses(x) and len(order):
        from penstock.kernels.triton.grouped import outer

        dense = grad.contiguous(), x.contiguous()
        outer(*dense, ends, order, shares, visits, gathers_grad, not gathers_grad, out)
        return out
    tokens = order // visits
    grad, x = (grad[tokens], x) if gathers_grad else (grad, x[tokens])
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    for one, rows, seen in zip(out, torch.split(_shared(grad, shares), counts), torch.split(x, counts)):
        torch.mm(rows.t(), seen, out=one)
    return out


@_outer.register_fake
def _(grad: Tensor, x: Tensor, ends: Tensor, *_: Any) -> Tensor:
    return x.new_empty(ends.shape[0], grad.shape[1], x.shape[1])


def _keep_gathered(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ends, order, ctx.visits, shares = inputs
    ctx.save_for_backward(x, weight, ends, order, shares)


def _gathered_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, ends, order, shares = ctx.saved_tensors
    to_x = to_weight = None
    if ctx.needs_input_grad[0]:
        to_x = _scattered(grad, weight.transpose(1, 2), ends, order, ctx.visits, x.shape[0], shares)
    if ctx.needs_input_grad[1]:
        to_weight = _outer(grad, x, ends, order, ctx.visits, shares, False)
    return to_x, to_weight, None, None, None, None


def _keep_scattered(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ends, order, ctx.visits, _, shares = inputs
    ctx.save_for_backward(x, weight, ends, order, shares)


def _scattered_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, ends, order, shares = ctx.saved_tensors
    to_x = to_weight = to_shares = None
    if ctx.needs_input_grad[0] or ctx.needs_input_grad[6]:
        inner = _gathered(grad, weight.transpose(1, 2), ends, order, ctx.visits, None)
        to_x = _shared(inner, shares)
        if shares is not None:
            wide = torch.promote_types(x.dtype, torch.float32)
            to_shares = (inner.to(wide) * x).sum(1).to(shares.dtype)
    if ctx.needs_input_grad[1]:
        to_weight = _outer(grad, x, ends, order, ctx.visits, shares, True)
    return to_x, to_weight, None, None, None, None, to_shares


_gathered.register_autograd(_gathered_gradients, setup_context=_keep_gathered)
_scattered.register_autograd(_scattered_gradients, setup_context=_keep_scattered)
