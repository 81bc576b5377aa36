"""The cross entropy of each sample, for losses that compare whole texts, without holding all logits.

Shapes: B samples, N tokens, R = B·N rows of features, D features, V entries of the vocabulary. For logits z = x Wᵀ + b,
a sample's loss is the sum of its rows' cross entropy against the targets t (see `linear_cross_entropy`), without
smoothing −Σ log softmax(z)_t. If g is the gradient of a sample's loss, the gradient of its logits is, row by row,

    g (softmax(z) − onehot(t))

The plain form holds R·V logits. The chunked form handles some rows at a time. The weight of a sample is known only in
the backward pass, which therefore recomputes the logits, chunk by chunk: one matrix product of three is repeated.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.dtypes import sums_type, widened
from penstock.kernels.cross_entropy import IGNORED, capped
from penstock.kernels.linear_cross_entropy import (
    CAPPED_ROWS,
    FP16_SCALE,
    in_chunks,
    padded_layer,
    rows_at_once,
)
from penstock.kernels.logit_rows import row_losses


def sample_losses(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *, smoothing: float = 0.0,
    budget: int | None = None, cap: float = 0.0,
) -> Tensor:  # fmt: skip
    """The sum over each sample's rows of the cross entropy of x Wᵀ + b against the targets, (B,), in fp32 (fp64 for
    fp64 inputs).

    x: (B, N, D), weight: (V, D), bias: (V), targets: (B, N) int64, where −100 is ignored. `budget` is the number of
    bytes for logits and the tensors computed from them at one time, at least for one row; None holds all logits, in the
    plain form. Both forms multiply in the dtype that torch.autocast and the op lists set for a linear layer. The
    chunked form can be differentiated once.
    """
    if budget is None:
        return plain_sample_losses(x, weight, bias, targets, smoothing, cap)
    # An empty product shows the dtype of a linear layer's outputs here.
    with torch.no_grad():
        dtype = F.linear(x[:0, 0], weight[:1]).dtype
    rows = _SampleLosses.apply(  # type: ignore[no-untyped-call]
        x.flatten(0, 1), weight, bias, targets.flatten(), smoothing, budget, dtype, cap
    )
    return rows.view(targets.shape).sum(1)  # type: ignore[no-any-return]


def plain_sample_losses(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, smoothing: float = 0.0,
    cap: float = 0.0,
) -> Tensor:  # fmt: skip
    """All logits at once: the reference that the chunked form is tested against."""
    logits = widened(capped(F.linear(x, weight, bias), cap))
    losses = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(),
        reduction="none", ignore_index=IGNORED, label_smoothing=smoothing,
    )  # fmt: skip
    return losses.view(targets.shape).sum(1)


class _SampleLosses(torch.autograd.Function):
    """The loss of each row (R,) of features (R, D); 0 for ignored targets."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, smoothing: float, budget: int,
        dtype: torch.dtype, cap: float,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight, bias, targets)
        ctx.smoothing, ctx.budget, ctx.dtype, ctx.cap = smoothing, budget, dtype, cap
        wide = sums_type(dtype)
        losses = x.new_empty(len(x), dtype=wide)
        with torch.autocast(x.device.type, enabled=False):
            cast, offset = padded_layer(weight, bias, dtype)
            step = rows_at_once(budget // CAPPED_ROWS if cap else budget, len(x), len(weight), dtype)
            for first in range(0, len(x), step):
                here = slice(first, first + step)
                logits = capped(F.linear(x[here].to(dtype), cast, offset)[:, : len(weight)], cap)
                logs = torch.log_softmax(logits, dim=-1, dtype=wide)
                counted = targets[here] != IGNORED
                index = targets[here].where(counted, 0)[:, None]
                losses[here] = row_losses(logs, index, smoothing).where(counted, 0.0)
                del logits, logs
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, targets = ctx.saved_tensors
        # Weights of at most 1 keep the products in the range of fp16, whatever the loss scale is.
        largest = gradient.abs().max().clamp(min=torch.finfo(gradient.dtype).tiny)
        to_x, to_weight, to_bias = needed = ctx.needs_input_grad[:3]
        _, *gradients = in_chunks(
            x, weight, bias, targets, ctx.smoothing, ctx.budget, ctx.dtype, to_x, to_weight, to_bias, "", 0,
            len(weight), row_weights=gradient / largest, cap=ctx.cap,
        )  # fmt: skip
        if ctx.dtype == torch.float16:
            largest = largest / FP16_SCALE
        scaled = [
            computed.mul_(largest).to(value.dtype) if wanted else None
            for computed, value, wanted in zip(gradients, (x, weight, bias), needed, strict=True)
        ]
        return (*scaled, *[None] * 5)
