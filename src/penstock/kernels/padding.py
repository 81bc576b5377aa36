"""Computation without padding.

On a CPU a batch is flattened to one row of tokens, and attention runs sample by sample (`Unpadded`). The same happens
on a GPU with `attention=flash`, whose kernel supports variable lengths. Elsewhere, and for short samples, padding is
dropped from operations on single tokens, and put back for attention with a mask (`Real`).

Shapes: B samples, N tokens, T tokens that are computed, D features.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.config.plan import AttentionBackend
from penstock.kernels.attention import Scores, attention
from penstock.kernels.choices import least_mean_unpadded
from penstock.kernels.varlen import varlen_attention

SIZES = 16
"""Most different values of T, so that compiled code is reused; at worst a sixteenth of all tokens is computed in vain,
half of that on average."""


class Real(NamedTuple):
    """Which tokens of a batch are computed."""

    rows: Tensor
    """(T,), their indices among all tokens in the layout of the blocks: first all real tokens, in order, then some
    padding, so that T is one of `SIZES` values."""
    first: int
    second: int
    """The batch's first two dimensions: B and N, or N and B."""

    @classmethod
    def of(cls, lengths: Tensor, places: Tensor, *, sequence_first: bool) -> Real | None:
        """The tokens at `places` (N,) before the end of each sample, `lengths` (B,). None if dropping the others saves
        nothing. On a GPU this waits for the lengths."""
        return cls.but(places >= lengths[:, None], sequence_first=sequence_first)

    @classmethod
    def but(cls, padding: Tensor, *, sequence_first: bool = False) -> Real | None:
        """All tokens that `padding` (B, N) does not mark."""
        count = _rounded(padding)
        if count == padding.numel():
            return None
        padding = padding.T if sequence_first else padding
        rows = padding.flatten().to(torch.uint8).argsort(stable=True)[:count]
        return cls(rows, *padding.shape)

    def take(self, x: Tensor) -> Tensor:
        """(B, N, D), or (N, B, D), to (1, T, D)."""
        return _Take.apply(x.flatten(0, 1), self.rows).unsqueeze(0)  # type: ignore[no-any-return, no-untyped-call]

    def put(self, x: Tensor) -> Tensor:
        """Undo `take`, with zeros for tokens that were not computed."""
        whole = put_rows(x[0], self.rows, self.first * self.second)
        placed: Tensor = whole.view(self.first, self.second, *x.shape[2:])
        return placed


def put_rows(x: Tensor, rows: Tensor, count: int) -> Tensor:
    """Put x (T, D) into `rows` (no row twice) of a tensor (count, D) of zeros."""
    return _Put.apply(x, rows, count)  # type: ignore[no-any-return, no-untyped-call]


class Unpadded:
    """The samples of a batch, flattened to one row. Not a tuple, because torch would compile code for its values.

    As a mask of cross-attention it lets each sample's queries attend to that sample's keys: see `AttentionMask`.
    """

    def __init__(self, real: Real, lengths: list[int], *, varlen: bool) -> None:
        self.real, self.lengths, self.varlen = real, lengths, varlen
        self.places = (real.rows % real.second)[None]
        """(1, T), the position of each token in its sample."""
        self.rest = len(real.rows) - sum(lengths)
        """Tokens of padding after the last sample."""
        ends = torch.tensor([0, *itertools.accumulate([*lengths, self.rest])], dtype=torch.int32)
        self._starts = ends.to(real.rows.device)  # moved once, not in each block

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def of(cls, lengths: Tensor, tokens: int, dtype: torch.dtype, *, varlen: bool) -> Unpadded | None:
        """Samples of `lengths` (B,), padded to `tokens` tokens, with queries of this dtype. None if attention is faster
        with padding. `varlen` says that the kernel supports variable lengths."""
        # Checked first: on a GPU the rest waits for the lengths.
        if not cls.pays(lengths, dtype, varlen=varlen):
            return None
        real = Real.of(lengths, torch.arange(tokens, device=lengths.device), sequence_first=False)
        return None if real is None else cls(real, lengths.tolist(), varlen=varlen)

    @staticmethod
    def pays(lengths: Tensor, dtype: torch.dtype, *, varlen: bool) -> bool:
        """Whether attention sample by sample is faster than with padding and a mask."""
        least = least_mean_unpadded(lengths.device.type, dtype.itemsize, varlen=varlen)
        # Lengths are read only if they decide, because reading them from a GPU waits for it.
        return least == 0.0 or (least < math.inf and int(lengths.sum()) >= least * len(lengths))

    def starts(self, *, rest: bool) -> tuple[Tensor, int]:
        """Where samples begin and where the last ends, int32, and the length of the longest; with `rest`, the padding
        counts as a sample."""
        if rest:
            return self._starts, max(*self.lengths, self.rest)
        return self._starts[:-1], max(self.lengths)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(self, q: Tensor, k: Tensor, v: Tensor, backend: AttentionBackend, scores: Scores) -> Tensor:
        """Attention of samples, q (B, H, M, K), to the flattened ones: k and v (1, G, T, K); returns (B, H, M, K)."""
        if self.varlen:
            samples, _, tokens, _ = q.shape
            begins = torch.arange(0, (samples + 1) * tokens, tokens, dtype=torch.int32, device=q.device)
            # The kernel leaves gradients of keys after the last sample uninitialised.
            k, v = (t[:, :, : t.shape[2] - self.rest] for t in (k, v))
            return varlen_attention(
                q, k, v, (begins, tokens), self.starts(rest=False), (-1, -1), scores.scale
            )
        scores = scores._replace(mask=None)
        ends = [*self.lengths, self.rest]
        parts = zip(torch.split(q, 1), torch.split(k, ends, dim=2), torch.split(v, ends, dim=2))
        return torch.cat([attention(*part, backend, scores) for part in parts])


class Padded:
    """An `AttentionMask` that puts padding back for attention: queries, keys and values of (1, T) tokens become padded
    samples, with a mask over the padding. For foreign models, which do not know `Real`."""

    def __init__(self, real: Real, mask: Tensor) -> None:
        self.real, self.mask = real, mask

    def attend(self, q: Tensor, k: Tensor, v: Tensor, backend: AttentionBackend, scores: Scores) -> Tensor:
        """The same as `attention`: q (1, H, T, K), k and v (1, G, T, K); returns (1, H, T, K)."""
        q, k, v = (self._put(t) for t in (q, k, v))
        mixed = attention(q, k, v, backend, scores._replace(mask=self.mask, causal=False))
        rows = self.real.take(mixed.transpose(1, 2).flatten(2))
        return rows.view(*rows.shape[:2], *mixed.shape[1::2]).transpose(1, 2)

    def _put(self, x: Tensor) -> Tensor:
        """(1, H, T, K) to (B, H, N, K)."""
        rows = self.real.put(x.transpose(1, 2).flatten(2))
        return rows.view(*rows.shape[:2], *x.shape[1::2]).transpose(1, 2)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _rounded(padding: Tensor) -> int:
    """The number of real tokens, rounded up to a sixteenth of all; at least one."""
    tokens = padding.numel()
    step = -(-tokens // SIZES)
    return min(tokens, max(1, -(-int((~padding).sum()) // step)) * step)


class _Take(torch.autograd.Function):
    """Select rows of x, none of them twice, so that gradients are copied into place instead of added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.count = len(x)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (rows,) = ctx.saved_tensors
        return grad.new_zeros(ctx.count, *grad.shape[1:]).index_copy_(0, rows, grad), None


class _Put(torch.autograd.Function):
    """Put the rows of x into their places among `count` rows, with zeros elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(rows)
        return x.new_zeros(count, *x.shape[1:]).index_copy_(0, rows, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (rows,) = ctx.saved_tensors
        return grad.index_select(0, rows), None, None


def is_real(lengths: Tensor, tokens: int) -> Tensor:
    """Mask of the non-padding tokens, (B, N)."""
    return torch.arange(tokens, device=lengths.device) < lengths[:, None]


def within(lengths: Tensor, tokens: int) -> Tensor:
    """Mask of the non-padding tokens in the shape of scores, (B, 1, 1, N)."""
    return is_real(lengths, tokens)[:, None, None]
