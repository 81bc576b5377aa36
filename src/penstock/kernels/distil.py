"""The divergence of a student from its teacher (Hinton et al., "Distilling the knowledge in a neural network", 2015).

Shapes: R rows of logits, V entries or classes. For logits z of the student and u of the teacher, q = softmax(u / T) and
p = softmax(z / T) at a temperature T, a row's divergence and its gradient by z are

    T² Σ_v q_v (log q_v − log p_v)          T (p − q)

The factor T² keeps gradients comparable to the usual loss's, at any temperature (section 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Taught(NamedTuple):
    """The inputs of a teacher's logits, and the weight of the divergence in the student's loss."""

    x: Tensor
    """Features, (R, D'), in the type of the weight."""
    weight: Tensor
    """(V, D')."""
    bias: Tensor | None
    """(V,)."""
    share: float
    """Share of the divergence in the loss, in [0, 1]."""
    temperature: float
    cap: float = 0.0
    """Soft cap of the teacher's logits; 0: none."""


def divergences(logits: Tensor, taught: Tensor, temperature: float) -> Tensor:
    """The divergence of each row (R,) of logits (R, V) from a teacher's (R, V), in their dtype; differentiable."""
    p, q = (torch.log_softmax(values / temperature, dim=-1) for values in (logits, taught))
    return F.kl_div(p, q, reduction="none", log_target=True).sum(-1) * temperature**2


def relation_divergence(
    student: Tensor, teacher: Tensor, heads: int, *, real: Tensor | None = None, causal: bool = False
) -> Tensor:
    """The mean divergence of a student's self-attention relations from a teacher's (Wang et al., ACL 2021, "MiniLMv2",
    equations 5 to 7), 0-d: softmax(X Xᵀ / √d) over tokens, of queries, keys or values X in `heads` equal parts.

    student: (B, N, F), teacher: (B, N, F'); `heads` divides F and F'. real: (B, N), true for tokens that are not
    padding; None: all. With `causal` a token is compared only with itself and earlier tokens.
    """
    samples, tokens = student.shape[:2]
    seen = torch.ones(1, tokens, tokens, dtype=torch.bool, device=student.device)
    seen = seen.tril() if causal else seen
    if real is not None:
        seen = seen & real[:, None, :]
    logs = []
    for features in (student, teacher):
        parts = features.float().view(samples, tokens, heads, -1).transpose(1, 2)
        scores = parts @ parts.transpose(2, 3) * parts.shape[-1] ** -0.5
        logs.append(
            torch.log_softmax(scores.masked_fill(~seen[:, None], -torch.finfo(scores.dtype).max), dim=-1)
        )
    divergence = F.kl_div(logs[0], logs[1], reduction="none", log_target=True).sum(-1)  # (B, heads, N)
    if real is None:
        return divergence.mean()
    return divergence.where(real[:, None], 0.0).sum() / (heads * real.sum().clamp(min=1))


def score_difference(
    student: Sequence[Tensor], teacher: Sequence[Tensor], *, real: Tensor | None = None, causal: bool = False
) -> Tensor:
    """The mean squared difference of a student's attention scores Q Kᵀ / √d from a teacher's (Jiao et al., EMNLP 2020,
    "TinyBERT", equation 7), 0-d, over heads and pairs of tokens.

    student, teacher: queries (B, N, H, d) and keys (B, N, G, d), each shared by H / G query heads; H is the same. real:
    (B, N), true for tokens that are not padding; None: all. With `causal` a token is compared only with itself and
    earlier ones.
    """
    scores = []
    for q, k in (student, teacher):
        keys = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
        scores.append(torch.einsum("bnhd,bmhd->bhnm", q.float(), keys.float()) * q.shape[-1] ** -0.5)
    squares = (scores[0] - scores[1]).square().mean(1)
    seen = torch.ones_like(squares, dtype=torch.bool)
    seen = seen.tril() if causal else seen
    if real is not None:
        seen = seen & real[:, None, :] & real[:, :, None]
    mean: Tensor = squares.where(seen, 0.0).sum() / seen.sum().clamp(min=1)
    return mean


def divergences_and_gradients(
    logits: Tensor, taught: Tensor, temperature: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`divergences`, and the gradients (R, V) of their sum by the logits, both in `dtype`. Not differentiable."""
    p = torch.log_softmax(logits.to(dtype) / temperature, dim=-1)
    q_logs = torch.log_softmax(taught.to(dtype) / temperature, dim=-1)
    q = q_logs.exp()
    losses = q_logs.sub_(p).mul_(q).sum(1).mul_(temperature**2)
    return losses, p.exp_().sub_(q).mul_(temperature)
