"""Cross entropy over a vocabulary that is split over ranks (Shoeybi et al., "Megatron-LM", 2019, section 3).

Shapes: R rows, C entries of the vocabulary on this rank, V in all. Each rank computes the logits of its own entries,
and ranks exchange three values per row: the largest logit, then the sum of exponentials and the logit of the target.
Label smoothing adds the sum of logits; a teacher's logits, split in the same way, add five values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

_collectives: Any = torch.ops._c10d_functional


class Share(NamedTuple):
    """The part of the vocabulary that this rank holds."""

    group: str
    """Name of the process group that the vocabulary is split over."""
    start: int
    whole: int
    """V."""


class Row(NamedTuple):
    """The values of each row that its loss and gradient need."""

    losses: Tensor
    """(R,) cross entropy of each row; ignored rows included."""
    column: Tensor
    """(R, 1) the target's index among this rank's entries, 0 if it is not one of them."""
    here: Tensor
    """(R, 1) whether the target is one of this rank's entries."""
    sums: Tensor
    """(R,) log Σ exp of the logits of the whole vocabulary."""


def normalised_(z: Tensor, targets: Tensor, smoothing: float, share: Share, z_loss: float = 0.0) -> Row:
    """Turn logits (R, C) into the probabilities of this rank's entries, in place; targets (R) are below V."""
    index = targets[:, None] - share.start
    here = (index >= 0) & (index < z.shape[1])
    index = index.where(here, 0)
    most = _over(z.amax(1), "max", share)
    z.sub_(most[:, None])
    parts = [z.gather(1, index).where(here, 0).squeeze(1), z.exp().sum(1)]
    if smoothing:
        parts.append(z.sum(1))
    summed = _over(torch.stack(parts), "sum", share)
    total = summed[1].log()
    losses = total - summed[0] * (1.0 - smoothing)
    if smoothing:
        losses -= summed[2] * (smoothing / share.whole)
    sums = most + total
    if z_loss:
        losses += z_loss * sums.square()
    z.sub_(total[:, None]).exp_()
    return Row(losses, index, here, sums)


def to_gradient_(p: Tensor, row: Row, smoothing: float, share: Share, z_loss: float = 0.0) -> Tensor:
    """Turn probabilities (R, C) into the gradients of the logits, in place."""
    if z_loss:
        p.mul_(1.0 + 2.0 * z_loss * row.sums[:, None])
    if smoothing:
        p.sub_(smoothing / share.whole)
    return p.scatter_add_(1, row.column, (smoothing - 1.0) * row.here.to(p.dtype))


def _over(x: Tensor, how: str, share: Share) -> Tensor:
    reduced: Tensor = _collectives.wait_tensor(_collectives.all_reduce(x, how, share.group))
    return reduced


def divergence_and_gradient(
    logits: Tensor, taught: Tensor, temperature: float, share: Share
) -> tuple[Tensor, Tensor]:
    """The divergence of each row (R,) of a student's logits from a teacher's, both for this rank's entries (R, C), and
    the gradient (R, C) of its sum by the student's logits; `kernels.distil.divergences_and_gradients` does the same for
    the whole vocabulary. Both logits are changed in place."""
    p, q = logits.div_(temperature), taught.div_(temperature)
    p_most, q_most = _over(torch.stack([p.amax(1), q.amax(1)]), "max", share)
    p.sub_(p_most[:, None])
    q.sub_(q_most[:, None])
    p_sum, q_sum = _over(torch.stack([p.exp().sum(1), q.exp().sum(1)]), "sum", share)
    p.sub_(p_sum.log()[:, None])
    q.sub_(q_sum.log()[:, None])
    shares = q.exp()
    losses = _over(q.sub_(p).mul_(shares).sum(1), "sum", share).mul_(temperature**2)
    return losses, p.exp_().sub_(shares).mul_(temperature)


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, counted: Tensor, smoothing: float, share: Share,
        z_loss: float,
    ) -> Tensor:  # fmt: skip
        p = logits.clone()
        row = normalised_(p, targets, smoothing, share, z_loss)
        ctx.save_for_backward(p, counted, row.column, row.here, row.sums)
        ctx.options = smoothing, share, z_loss
        return row.losses.where(counted, 0).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        p, counted, *row = ctx.saved_tensors
        gradients = to_gradient_(p.clone(), Row(p, *row), *ctx.options)
        return gradients * (grad * counted[:, None]), None, None, None, None, None


def vocabulary_cross_entropy(
    logits: Tensor, targets: Tensor, share: Share, *, smoothing: float = 0.0, ignored: int = -100,
    z_loss: float = 0.0,
) -> Tensor:  # fmt: skip
    """The sum of the rows' cross entropy, 0-d, the same on all ranks. logits: (R, C) fp32 or fp64, for this rank's
    entries; targets: (R) int64 within the whole vocabulary, where `ignored` is not counted. `z_loss` is the factor of
    (log Σ exp z)²."""
    counted = targets != ignored
    return _SplitCrossEntropy.apply(logits, targets.where(counted, 0), counted, smoothing, share, z_loss)  # type: ignore[no-any-return, no-untyped-call]
