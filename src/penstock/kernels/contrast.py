"""Contrastive losses: each row is compared with all vectors of another set, without holding all logits.

Shapes: B rows, M other vectors, E features. Logits are z = rows · othersᵀ. A row matches all other vectors of its
group. Its loss:

- softmax: log Σ exp z_j − the mean of z_j over its group (Khosla et al., NeurIPS 2020, equation 2). If each
  group has one member, this is the cross entropy of choosing it (van den Oord et al., 2018).
- sigmoid: Σ log(1 + exp z_j) − the sum of z_j over its group (Zhai et al., ICCV 2023, "SigLIP", equation 1)

The gradient by logits is p − t, with p their softmax or sigmoid; for a matching pair t is 1 / size of the group
(softmax) or 1 (sigmoid), otherwise 0. The chunked form handles some of the other vectors at a time, and recomputes
logits in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

ContrastForm = Literal["softmax", "sigmoid"]


def contrast(
    rows: Tensor, others: Tensor, groups: Tensor, other_groups: Tensor, *, form: ContrastForm = "softmax",
    chunk: int | None = None,
) -> Tensor:  # fmt: skip
    """The loss of each row, (B,): rows (B, E) and others (M, E) in fp32 or fp64, groups (B,) and (M,) int64. With
    `chunk`, logits of at most `chunk` other vectors are held at a time. For a row that matches no other vector, the
    mean over its group is taken as 0."""
    if chunk is None:
        return plain_contrast(rows, others, groups, other_groups, form)
    losses: Tensor = _ContrastLoss.apply(  # type: ignore[no-untyped-call]
        rows, others, groups, other_groups, form, chunk
    )
    return losses


def plain_contrast(
    rows: Tensor, others: Tensor, groups: Tensor, other_groups: Tensor, form: ContrastForm = "softmax"
) -> Tensor:
    """All logits at once: the reference that the chunked form is tested against."""
    logits = _logits(rows, others)
    same = groups[:, None] == other_groups
    own = logits.masked_fill(~same, 0.0).sum(1)
    if form == "sigmoid":
        return F.softplus(logits).sum(1) - own
    return torch.logsumexp(logits, dim=1) - own / same.sum(1).clamp(min=1)


class _ContrastLoss(torch.autograd.Function):
    """The loss of each row (B,), computed for some of the other vectors at a time."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, others: Tensor, groups: Tensor, other_groups: Tensor, form: str, chunk: int
    ) -> Tensor:
        total = rows.new_full((len(rows),), float("-inf" if form == "softmax" else "0"))
        own, count = torch.zeros_like(total), torch.zeros_like(total)
        for part, names in _parts(others, other_groups, chunk):
            logits, same = _logits(rows, part), groups[:, None] == names
            own += logits.masked_fill(~same, 0.0).sum(1)
            count += same.sum(1)
            if form == "softmax":
                total = torch.logaddexp(total, torch.logsumexp(logits, dim=1))
            else:
                total += F.softplus(logits).sum(1)
        count = count.clamp(min=1) if form == "softmax" else torch.ones_like(count)
        ctx.save_for_backward(rows, others, groups, other_groups, total, count)
        ctx.form, ctx.chunk = form, chunk
        return total - own / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, others, groups, other_groups, total, count = ctx.saved_tensors
        by_rows, by_others = torch.zeros_like(rows), []
        for part, names in _parts(others, other_groups, ctx.chunk):
            logits = _logits(rows, part)
            shares = torch.exp(logits - total[:, None]) if ctx.form == "softmax" else torch.sigmoid(logits)
            matches = (groups[:, None] == names) / count[:, None]
            by_logits = gradient[:, None] * (shares - matches)
            with torch.autocast(rows.device.type, enabled=False):
                by_rows += by_logits @ part
                by_others.append(by_logits.T @ rows)
        return by_rows, torch.cat(by_others), None, None, None, None


def _logits(rows: Tensor, part: Tensor) -> Tensor:
    with torch.autocast(rows.device.type, enabled=False):
        return rows @ part.T


def _parts(others: Tensor, groups: Tensor, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield `chunk` of the other vectors at a time, with their groups."""
    for begin in range(0, len(others), chunk):
        yield others[begin : begin + chunk], groups[begin : begin + chunk]
