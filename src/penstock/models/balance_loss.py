"""The balance loss of mixtures, whose gradient joins that of their routers' logits.

With f_e the share of visits that go to expert e, P_e the mean of its softmax over the tokens, and z_t a token's
log-sum-exp of logits, a layer's loss is

    B = balance · E · Σ_e f_e · P_e + z_loss · mean_t z_t²

(Fedus et al., JMLR 2022, equations 4 to 6; Zoph et al., 2022, equation 5). Layers add up: each is balanced by itself.
Means are over the tokens of a sample that are no padding, then over samples. f has no gradient. In training it is that
of the step before, over all its micro-batches and ranks, and the first step has none: so B is a mean over samples, and
its gradient the same however a step is cut into micro-batches and over ranks. Who takes steps otherwise than by
`TrainStep` has the f of each micro-batch.

The gradient of B joins that of the router's logits in the backward pass, times the gradient that reached the
micro-batch's part of the step's loss there, over the number of micro-batches (`weighed`). It so has a loss scale as the
loss has it, and no task, pipeline or accumulation knows of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class _Scale:
    """The weight of balance losses in the present backward pass; 1 in one whose loss is not `weighed`."""

    now: Tensor | float = 1.0

    @classmethod
    def forget(cls) -> None:
        cls.now = 1.0


class _Weighed(torch.autograd.Function):
    """The loss as it is; its gradient, times `share`, is the weight of the balance losses."""

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
    """A micro-batch's part of a step's loss as it is, with which the balance losses of its layers are weighted in the
    backward pass: each of `parts` micro-batches has its share of them."""
    return _Weighed.apply(loss, 1.0 / parts)  # type: ignore[no-any-return, no-untyped-call]


class _AddGradient(torch.autograd.Function):
    """The logits as they are, to whose gradient that of the balance loss is added."""

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
    """grad, plus the gradient of a balance loss times its weight in the present backward pass. An operation of its own:
    compiled code would take the weight for a constant, or compute what does not read grad in the forward pass."""
    scale = _Scale.now
    return grad + gradient * (scale.to(gradient) if isinstance(scale, Tensor) else scale)


@_added.register_fake
def _(grad: Tensor, gradient: Tensor) -> Tensor:
    return torch.empty_like(grad)


@contextmanager
def balancing(weight: Tensor | float) -> Iterator[None]:
    """Inside, backward passes weight balance losses with `weight`: those of pipeline stages, which no loss begins."""
    _Scale.now = weight
    try:
        yield
    finally:
        _Scale.forget()
