"""A linear layer whose backward pass comes in two halves: the gradient of its input at once, the weight's later.

A zero-bubble schedule fills the end of a pipeline with gradients of weights, which no other stage waits for (Qi et al.,
ICLR 2024, section 2). Inside `put_off`, a backward pass leaves them as calls to make; outside, it is torch's own.
Biases, norms and embeddings get their gradients at once, because these are not matrix products.

Shapes: x (…, in), weight (out, in), bias (out).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Later = list[Callable[[], None]]
_present: list[Later | None] = [None]


@contextmanager
def put_off(later: Later) -> Iterator[None]:
    """Inside, backward passes defer the gradients of weights, as calls in `later`."""
    before, _present[0] = _present[0], later
    try:
        yield
    finally:
        _present[0] = before


class SplitBackward:
    """A mixin for a linear layer's class that splits its backward pass in two halves. Results do not change."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, x: Tensor) -> Tensor:
        return _Split.apply(x, self.weight, self.bias, self.weight)  # type: ignore[no-any-return, no-untyped-call]


def linear_apart(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` that returns the weight's gradient as a separate tensor, never deferred. torch's is a view of a view:
    autograd does not add a second gradient to it in place, but makes a third tensor as large as the weight."""
    return _Split.apply(x, weight, bias, None)  # type: ignore[no-any-return, no-untyped-call]


class _Split(torch.autograd.Function):
    """F.linear. Under autocast it computes in half precision, and so does its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, owner: Tensor | None) -> Tensor:
        out = F.linear(x, weight, bias)
        ctx.save_for_backward(x.to(out.dtype), weight)
        ctx.kind = x.dtype
        ctx.owner = owner
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        into = grad.matmul(weight.to(grad.dtype)).to(ctx.kind) if ctx.needs_input_grad[0] else None
        rows = grad.flatten(0, -2)
        bias = rows.sum(0).to(weight.dtype) if ctx.needs_input_grad[2] else None
        if not ctx.needs_input_grad[1]:
            return into, None, bias, None
        later, compute = _present[0], partial(_of_weight, rows, x.flatten(0, -2), weight.dtype)
        if later is None or ctx.owner is None:
            return into, compute(), bias, None
        later.append(partial(_add, ctx.owner, compute))
        return into, None, bias, None


def _of_weight(rows: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    return rows.t().mm(x).to(dtype)


@torch.no_grad()
def _add(weight: Tensor, compute: Callable[[], Tensor]) -> None:
    """Accumulate a parameter's gradient, as a backward pass does."""
    gradient = compute()
    weight.grad = gradient if weight.grad is None else weight.grad + gradient
