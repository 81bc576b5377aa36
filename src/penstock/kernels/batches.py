"""Attention of batches that lie one after the other, each with a mask of its own.

Every batch goes through the kernel that its mask allows, so that neither a causal one nor packed documents need a
tensor. The reference is one mask for each sample of all.

Shapes: B samples, H heads, G KV heads, N tokens, K features per head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from penstock.config.plan import AttentionBackend
from penstock.kernels.attention import Scores, Sight, attention


class AlikeSamples(NamedTuple):
    """Consecutive samples that are seen alike."""

    samples: int
    causal: bool
    """Whether a token sees itself and those before it only, where no mask says so."""
    mask: Tensor | Sight | None = None


class Batches:
    """The batches that samples are in, in their order."""

    def __init__(self, batches: list[AlikeSamples]) -> None:
        self.batches = batches

    def attend(self, q: Tensor, k: Tensor, v: Tensor, backend: AttentionBackend, scores: Scores) -> Tensor:
        """As `attention`: q (B, H, N, K), k and v (B, G, N, K); returns (B, H, N, K)."""
        sizes = [batch.samples for batch in self.batches]
        pieces = zip(*(torch.split(each, sizes) for each in (q, k, v)))
        outputs = []
        for batch, (one, keys, values) in zip(self.batches, pieces, strict=True):
            inside = scores._replace(mask=batch.mask, causal=batch.causal and batch.mask is None)
            outputs.append(attention(one, keys, values, backend, inside))
        return torch.cat(outputs)
