"""Cross entropy over a vocabulary whose logits lie on several ranks (Shoeybi et al., "Megatron-LM", 2019, section 3).

Shapes: R rows, C entries of the vocabulary on this rank, V in all. Each rank makes the logits of its own entries, and
ranks exchange three numbers of a row: the largest logit, then the sum of exponentials and the logit of the target. With
label smoothing they exchange the sum of logits too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

_collectives: Any = torch.ops._c10d_functional


class Share(NamedTuple):
    """The entries of the vocabulary that this rank has."""

    group: str
    """Name of the process group that shares the vocabulary out."""
    start: int
    whole: int
    """V."""


class Row(NamedTuple):
    """The values of each row that its loss and gradient need."""

    losses: Tensor
    """(R,) cross entropy, of rows that count nothing too."""
    column: Tensor
    """(R, 1) the target's place here, 0 where it lies elsewhere."""
    here: Tensor
    """(R, 1) whether the target lies here."""


def normalised_(z: Tensor, targets: Tensor, smoothing: float, share: Share) -> Row:
    """Make of logits (R, C), in place, the probabilities of this rank's entries; targets (R) lie within V."""
    index = targets[:, None] - share.start
    here = (index >= 0) & (index < z.shape[1])
    index = index.where(here, 0)
    z.sub_(_over(z.amax(1), "max", share)[:, None])
    parts = [z.gather(1, index).where(here, 0).squeeze(1), z.exp().sum(1)]
    if smoothing:
        parts.append(z.sum(1))
    told = _over(torch.stack(parts), "sum", share)
    total = told[1].log()
    losses = total - told[0] * (1.0 - smoothing)
    if smoothing:
        losses -= told[2] * (smoothing / share.whole)
    z.sub_(total[:, None]).exp_()
    return Row(losses, index, here)


def to_gradient_(p: Tensor, row: Row, smoothing: float, share: Share) -> Tensor:
    """Make of probabilities (R, C), in place, the gradients of the logits."""
    if smoothing:
        p.sub_(smoothing / share.whole)
    return p.scatter_add_(1, row.column, (smoothing - 1.0) * row.here.to(p.dtype))


def _over(x: Tensor, how: str, share: Share) -> Tensor:
    found: Tensor = _collectives.wait_tensor(_collectives.all_reduce(x, how, share.group))
    return found


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, counted: Tensor, smoothing: float, share: Share
    ) -> Tensor:
        p = logits.clone()
        row = normalised_(p, targets, smoothing, share)
        ctx.save_for_backward(p, counted, row.column, row.here)
        ctx.smoothing, ctx.share = smoothing, share
        return row.losses.where(counted, 0).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        p, counted, index, here = ctx.saved_tensors
        found = to_gradient_(p.clone(), Row(p, index, here), ctx.smoothing, ctx.share)
        return found * (grad * counted[:, None]), None, None, None, None


def vocabulary_cross_entropy(
    logits: Tensor, targets: Tensor, share: Share, *, smoothing: float = 0.0, ignored: int = -100
) -> Tensor:
    """The sum of the cross entropy of rows, 0-d, the same on all ranks. logits: (R, C) fp32 or fp64 of this rank's
    entries, targets: (R) int64 within the whole vocabulary, of which `ignored` counts nothing.
    """
    counted = targets != ignored
    return _Loss.apply(logits, targets.where(counted, 0), counted, smoothing, share)  # type: ignore[no-any-return, no-untyped-call]
