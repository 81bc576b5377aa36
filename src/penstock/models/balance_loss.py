"""The balance loss of mixtures of experts. Its gradient is added to the gradient of the router's logits.

With f_e the share of visits that go to expert e, P_e the mean of its softmax over the tokens, and z_t a token's
log-sum-exp of logits, a layer's loss is

    B = balance · E · Σ_e f_e · P_e + z_loss · mean_t z_t²

(Fedus et al., JMLR 2022, equations 4 to 6; Zoph et al., 2022, equation 5). The losses of the layers are added: each is
balanced by itself. Means are over the non-padding tokens of a sample, then over samples. f has no gradient. In training
it is computed from the previous step, over all its micro-batches and ranks; in the first step it is 0. So B is a mean
over samples, and its gradient does not depend on how a step is split into micro-batches and over ranks. In a training
loop other than `TrainStep`, f is computed from each micro-batch.

In the backward pass the gradient of B is multiplied by the gradient that arrives at the micro-batch's loss, and divided
by the number of micro-batches (`weighed`). So it has the same loss scale as the loss, and tasks, pipelines and gradient
accumulation need no code for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class _Scale:
    """The weight of balance losses in the current backward pass; 1 if its loss is not `weighed`."""

    now: Tensor | float = 1.0

    @classmethod
    def forget(cls) -> None:
        cls.now = 1.0


class _Weighed(torch.autograd.Function):
    """The identity on the loss; its incoming gradient times `share` becomes the weight of the balance losses."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, share: float) -> Tensor:
        ctx.share = share
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        _Scale.now = grad.detach() * ctx.share
        torch.autograd.Variable._execution_engine.queue_callback(_Scale.forget)
        return grad, None


def weighed(loss: Tensor, parts: int = 1) -> Tensor:
    """Return a micro-batch's part of a step's loss unchanged; in the backward pass its gradient, divided by the number
    `parts` of micro-batches, weights the balance losses of the layers."""
    return _Weighed.apply(loss, 1.0 / parts)  # type: ignore[no-any-return, no-untyped-call]


class _AddGradient(torch.autograd.Function):
    """The identity on logits; its backward pass adds the gradient of the balance loss."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return _added(grad, gradient), None


def add_gradient(logits: Tensor, gradient: Tensor) -> Tensor:
    """See `_AddGradient`."""
    return _AddGradient.apply(logits, gradient)  # type: ignore[no-any-return, no-untyped-call]


@torch.library.custom_op("penstock::add_balance", mutates_args=())
def _added(grad: Tensor, gradient: Tensor) -> Tensor:
    """grad, plus the gradient of a balance loss times its weight in the current backward pass. A custom operation,
    because compiled code would treat the weight as a constant, or compute the terms without grad in the forward
    pass."""
    scale = _Scale.now
    return grad + gradient * (scale.to(gradient) if isinstance(scale, Tensor) else scale)


@_added.register_fake
def _(grad: Tensor, gradient: Tensor) -> Tensor:
    return torch.empty_like(grad)


@contextmanager
def balancing(weight: Tensor | float) -> Iterator[None]:
    """Inside, backward passes weight balance losses by `weight`: for pipeline stages, whose backward pass does not
    start at a loss."""
    _Scale.now = weight
    try:
        yield
    finally:
        _Scale.forget()
