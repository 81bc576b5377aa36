"""Attention in pieces: within each of the documents that are packed into samples, one document after the other, or each
of the samples that make one without padding; and of batches that lie one after the other, each with a mask of its own.

No mask is made of all, and what one piece would not see of another is not computed: every batch goes through the kernel
that its mask allows. Where a document ends must be known on the host, so `Documents` serves a CPU; elsewhere a mask
tells documents apart. One mask for each sample of all is the reference of both.

Shapes: B samples, H heads, G KV heads, N tokens, K features per head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.config.plan import AttentionBackend
from penstock.kernels.attention import AttentionMask, Scores, attention
from penstock.kernels.padding import Unpadded

LEAST_MEAN = 32
"""Tokens of a document on average, below which a mask is quicker than so many small calls."""


class Documents:
    """Where documents lie in the samples of a batch. It is no tuple, whose numbers compiled code would be made for."""

    def __init__(
        self, runs: list[list[int]], *, causal: bool,
        mask: Callable[[int], Tensor | AttentionMask | None] | None = None,
    ) -> None:  # fmt: skip
        self.runs, self.causal = runs, causal
        """Tokens of each document in each sample. What is behind the last sees nothing, and becomes zeros."""
        self.mask = mask
        """The mask within a document of so many tokens, where a causal one is not all that it has."""

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def of(
        cls, documents: Tensor | Unpadded, *, causal: bool,
        mask: Callable[[int], Tensor | AttentionMask | None] | None = None,
    ) -> Documents | None:  # fmt: skip
        """Runs of one number in `documents` (B, N), or None where they are on no CPU, or too short."""
        if isinstance(documents, Unpadded):
            return cls([documents.lengths], causal=causal, mask=mask)
        if documents.device.type != "cpu":
            return None
        runs = _runs(documents)
        if documents.numel() < LEAST_MEAN * sum(map(len, runs)):
            return None
        return cls(runs, causal=causal, mask=mask)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(self, q: Tensor, k: Tensor, v: Tensor, backend: AttentionBackend, scores: Scores) -> Tensor:
        """As `attention`: q (B, H, N, K), k and v (B, G, N, K); returns (B, H, N, K)."""
        return torch.cat([self._sample(i, q, k, v, backend, scores) for i in range(len(q))])

    def _sample(
        self, sample: int, q: Tensor, k: Tensor, v: Tensor, backend: AttentionBackend, scores: Scores
    ) -> Tensor:
        lengths = self.runs[sample]
        rest = q.shape[2] - sum(lengths)
        pieces = zip(*(torch.split(t[sample : sample + 1], [*lengths, rest], dim=2) for t in (q, k, v)))
        outputs = []
        for (one, keys, values), tokens in zip(pieces, lengths):
            mask = None if self.mask is None else self.mask(tokens)
            inside = scores._replace(mask=mask, causal=self.causal and mask is None)
            outputs.append(attention(one, keys, values, backend, inside))
        if rest:
            outputs.append(v.new_zeros(*outputs[0].shape[:2], rest, outputs[0].shape[3]))
        return torch.cat(outputs, dim=2)


def _runs(documents: Tensor) -> list[list[int]]:
    """Lengths of the runs of one number in each sample."""
    return [torch.unique_consecutive(row, return_counts=True)[1].tolist() for row in documents]


class AlikeSamples(NamedTuple):
    """Consecutive samples that are seen alike."""

    samples: int
    causal: bool
    """Whether a token sees itself and those before it only, where no mask says so."""
    mask: Tensor | AttentionMask | None = None


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
