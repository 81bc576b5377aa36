"""Attention in pieces: within each document of packed samples, or each sample of a batch flattened to one row without
padding; and for concatenated batches, each with a mask of its own.

No mask of the whole is made, and scores between pieces are not computed: every batch uses the kernel that its own mask
allows. The host must know where documents end, so `Documents` is for a CPU; other devices use a mask. The reference of
both is attention with one full mask per sample.

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
"""Average tokens per document below which one call with a mask is faster than one small call per document."""


class Documents:
    """The lengths of the documents in each sample of a batch. Not a tuple, because torch would compile code for its
    values."""

    def __init__(
        self, runs: list[list[int]], *, causal: bool,
        mask: Callable[[int], Tensor | AttentionMask | None] | None = None,
    ) -> None:  # fmt: skip
        self.runs, self.causal = runs, causal
        """Tokens of each document in each sample. The outputs of tokens after the last document are zeros."""
        self.mask = mask
        """A function from a document's length to the mask within it; None: no mask, or a causal one if `causal`."""

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def of(
        cls, documents: Tensor | Unpadded, *, causal: bool,
        mask: Callable[[int], Tensor | AttentionMask | None] | None = None,
    ) -> Documents | None:  # fmt: skip
        """Find runs of equal numbers in `documents` (B, N). None if it is not on a CPU, or runs are too short."""
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
        """The same as `attention`: q (B, H, N, K), k and v (B, G, N, K); returns (B, H, N, K)."""
        return torch.cat([self._sample(i, q, k, v, backend, scores) for i in range(len(q))])

    def _sample(
        self, sample: int, q: Tensor, k: Tensor, v: Tensor, backend: AttentionBackend, scores: Scores
    ) -> Tensor:
        lengths = self.runs[sample]
        rest = q.shape[2] - sum(lengths)
        pieces = zip(*(torch.split(t[sample : sample + 1], [*lengths, rest], dim=2) for t in (q, k, v)))
        outputs = []
        for (queries, keys, values), tokens in zip(pieces, lengths):
            mask = None if self.mask is None else self.mask(tokens)
            piece_scores = scores._replace(mask=mask, causal=self.causal and mask is None)
            outputs.append(attention(queries, keys, values, backend, piece_scores))
        if rest:
            outputs.append(v.new_zeros(*outputs[0].shape[:2], rest, outputs[0].shape[3]))
        return torch.cat(outputs, dim=2)


def _runs(documents: Tensor) -> list[list[int]]:
    """Lengths of the runs of equal numbers in each sample."""
    return [torch.unique_consecutive(row, return_counts=True)[1].tolist() for row in documents]


class AlikeSamples(NamedTuple):
    """Consecutive samples with the same kind of attention mask."""

    samples: int
    causal: bool
    """Whether a token attends only to itself and earlier tokens; used if there is no mask."""
    mask: Tensor | AttentionMask | None = None


class Batches:
    """A mask for several batches, concatenated along samples."""

    def __init__(self, batches: list[AlikeSamples]) -> None:
        self.batches = batches

    def attend(self, q: Tensor, k: Tensor, v: Tensor, backend: AttentionBackend, scores: Scores) -> Tensor:
        """The same as `attention`: q (B, H, N, K), k and v (B, G, N, K); returns (B, H, N, K)."""
        sizes = [batch.samples for batch in self.batches]
        pieces = zip(*(torch.split(each, sizes) for each in (q, k, v)))
        outputs = []
        for batch, (queries, keys, values) in zip(self.batches, pieces, strict=True):
            batch_scores = scores._replace(mask=batch.mask, causal=batch.causal and batch.mask is None)
            outputs.append(attention(queries, keys, values, backend, batch_scores))
        return torch.cat(outputs)
