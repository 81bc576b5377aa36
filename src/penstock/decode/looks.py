"""Attention over kept columns, for eager and compiled passes alike: masks by position, rotated angles, and attention of
query heads that share KV heads.

Shapes: R texts, or 1 where all are alike; N new tokens; W columns; G KV heads, H query heads; K features.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from penstock.config.plan import AttentionBackend
from penstock.kernels.attention import Scores, attention
from penstock.models.positions import Rotation


def mask_of(
    places: Tensor,
    kept: Tensor,
    *,
    dtype: torch.dtype,
    seen: Tensor | None = None,
    window: int | None = None,
    biases: Tensor | None = None,
    itself: bool = False,
) -> Tensor:
    """Numbers to add to scores, (R, H or 1, N, W): −∞ where a token sees nothing.

    A token at one of `places` (R, N) sees the columns whose positions, `kept` (R, W), are not after its own; or those
    that `seen` (R, N, W) says; of either only those within the `window`. `biases` (H, positions) are added by how far
    behind a column lies. `itself`: token n sees column n in any case, for a row of −∞ alone would be NaN.
    """
    if seen is not None and window is None and biases is None:
        return torch.where(seen, 0.0, -math.inf).to(dtype).unsqueeze(1)
    behind = places[:, :, None] - kept[:, None]  # (R, N, W)
    near = behind >= 0
    if window is not None:
        near = near & (behind < window)
    near = near if seen is None else near & seen
    if itself:
        near = near | torch.eye(near.shape[2], dtype=torch.bool, device=near.device)[: near.shape[1]]
    if biases is None:
        return torch.where(near, 0.0, -math.inf).to(dtype).unsqueeze(1)
    bias = biases[:, behind.clamp(0, biases.shape[1] - 1)].transpose(0, 1)
    return bias.masked_fill(~near.unsqueeze(1), -math.inf).to(dtype)


def turned(tables: dict[str, Rotation], places: Tensor, *, sequence_first: bool) -> dict[str, Rotation]:
    """The rotary tables of tokens at `places` (R, N), out of tables of all positions (1, positions, 1, K/2) from
    `rotations`.
    """

    def chosen(table: Tensor) -> Tensor:
        found = table[0].index_select(0, places.flatten()).view(*places.shape, 1, table.shape[-1])
        return found.transpose(0, 1) if sequence_first else found

    return {name: (chosen(cosine), chosen(sine)) for name, (cosine, sine) in tables.items()}


def folded(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, backend: AttentionBackend, scale: float | None
) -> Tensor:
    """Attention where heads that share keys are taken for more tokens of one head, so that these are read once."""
    texts, heads, tokens, features = q.shape
    groups = k.shape[1]
    if groups == heads:
        return attention(q, k, v, backend, Scores(mask, scale=scale))
    shared = heads // groups
    if mask is not None:
        if mask.shape[1] == 1:
            mask = mask.repeat(1, 1, shared, 1)
        else:
            mask = torch.unflatten(mask, 1, (groups, shared)).flatten(2, 3)
    together = q.reshape(texts, groups, shared * tokens, features)
    return attention(together, k, v, backend, Scores(mask, scale=scale)).reshape(
        texts, heads, tokens, features
    )
