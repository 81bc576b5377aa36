"""Sliding-window attention, in blocks of queries that attend only to the keys around them.

N tokens with a window of W take N·W time and memory instead of N². Beltagy et al. (2020, "Longformer", section 3.1)
split sequences in this way. The reference is `attention` with the N × N mask of `penstock.models.masks.visible`.

Shapes: B samples, H heads, G KV heads, N tokens, K features per head; n blocks of C tokens, which attend to S =
`before` + C + `after` keys.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.config.plan import AttentionBackend
from penstock.kernels.attention import Scores, attention
from penstock.kernels.choices import window_blocks

_OUTSIDE = -2
_PADDING = -1


class Windows(NamedTuple):
    """How tokens are split into blocks, and which nearby keys each query of a block attends to."""

    mask: Tensor
    """(B·n, 1, C, S), values to add to the scores."""
    block: int
    before: int
    after: int

    @classmethod
    def of(
        cls, window: int, *, causal: bool, samples: int, tokens: int, device: torch.device, dtype: torch.dtype,
        lengths: Tensor | None = None, documents: Tensor | None = None,
    ) -> Windows | None:  # fmt: skip
        """The blocks of a window, or None if they would compute no less than full attention. For the arguments see
        `penstock.models.masks.visible`."""
        cut = window_blocks(window, tokens, causal=causal)
        if cut is None:
            return None
        block, before, after = cut
        numbers = torch.zeros(1, tokens, dtype=torch.long, device=device) if documents is None else documents
        if lengths is not None and not causal:
            places = torch.arange(tokens, device=device)
            numbers = torch.where(places < lengths[:, None], numbers, _PADDING)
        # Padding attends to padding, and the filling of the last block to itself: a row of only −∞ would be NaN.
        own = _blocks(numbers[:, None, :, None], block, _OUTSIDE)  # (B, n, 1, C, 1)
        seen = _around(own, before, after, _OUTSIDE)  # (B, n, 1, S, 1)
        looking = torch.arange(block, device=device)[:, None] + before
        distance = looking - torch.arange(before + block + after, device=device)
        visible = (own == seen.transpose(-1, -2)) & (distance <= before) & (-distance <= after)
        added = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, -math.inf)
        return cls(added.expand(samples, -1, -1, -1, -1).flatten(0, 1), block, before, after)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, backend: AttentionBackend, scores: Scores) -> Tensor:
        """The same as `attention`: q (B, H, N, K), k and v (B, G, N, K); returns (B, H, N, K)."""
        samples, _, tokens, _ = q.shape
        k, v = (_around(_blocks(t, self.block, 0), self.before, self.after, 0) for t in (k, v))
        q, k, v = (t.flatten(0, 1) for t in (_blocks(q, self.block, 0), k, v))
        out = attention(q, k, v, backend, scores._replace(mask=self.mask))
        return torch.unflatten(out, 0, (samples, -1)).transpose(1, 2).flatten(2, 3)[:, :, :tokens]


def _blocks(x: Tensor, block: int, filling: int) -> Tensor:
    """Split (B, G, N, K) into blocks (B, n, G, C, K); the last is filled up with `filling`."""
    missing = -x.shape[2] % block
    x = F.pad(x, (0, 0, 0, missing), value=filling) if missing else x
    return torch.unflatten(x, 2, (-1, block)).transpose(1, 2)


def _around(x: Tensor, before: int, after: int, filling: int) -> Tensor:
    """Extend each block by the last `before` tokens of the previous block and the first `after` tokens of the next: (B,
    n, G, C, K) to (B, n, G, S, K)."""
    parts = [x]
    if before:
        parts.insert(0, F.pad(x[:, :-1, :, -before:], (0, 0, 0, 0, 0, 0, 1, 0), value=filling))
    if after:
        parts.append(F.pad(x[:, 1:, :, :after], (0, 0, 0, 0, 0, 0, 0, 1), value=filling))
    return torch.cat(parts, dim=3)
