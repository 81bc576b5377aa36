"""How the tokens of samples are split over ranks, and gathered again.

Under a causal mask the first tokens attend to few keys and the last to many. So samples are split into twice as many
chunks as there are devices, and device i holds the i-th from the start and the i-th from the end: all devices then have
equal work.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed

from penstock.config.plan import ContextExchange


class Cut:
    """How samples are split over the ranks of a group."""

    def __init__(self, group: Any, rank: int, size: int, *, causal: bool, exchange: ContextExchange) -> None:
        self.group: Any = distributed.group.WORLD if group is None and distributed.is_initialized() else group
        self.rank, self.size = rank, size
        self.causal, self.ring = causal, exchange == "ring"

    def __deepcopy__(self, memo: Any) -> Cut:
        return self  # a copy of a model belongs to the same group

    def unordered(self) -> Cut:
        """The split of the same ranks for samples without a causal mask."""
        return Cut(self.group, self.rank, self.size, causal=False, exchange="ring" if self.ring else "gather")

    @property
    def chunks(self) -> int:
        """The number of chunks per sample."""
        return 2 * self.size if self.causal else self.size

    def held(self, rank: int) -> tuple[int, ...]:
        """The chunks of a rank."""
        return (rank, 2 * self.size - 1 - rank) if self.causal else (rank,)

    def chunk(self, tokens: int) -> int:
        """Tokens per chunk; the last chunks may contain padding."""
        return -(-tokens // self.chunks)

    def places(self, rank: int, tokens: int, device: torch.device) -> Tensor:
        """Indices of the tokens that a rank holds, (n,); indices from N on are padding."""
        each = self.chunk(tokens)
        return torch.cat([torch.arange(c * each, (c + 1) * each, device=device) for c in self.held(rank)])

    def take(self, x: Tensor, dim: int, filling: float = 0) -> Tensor:
        """This rank's tokens of a tensor that holds all tokens along `dim`."""
        each = self.chunk(x.shape[dim])
        missing = each * self.chunks - x.shape[dim]
        if missing:
            padding = [0, 0] * (x.dim() - 1 - dim) + [0, missing]
            x = F.pad(x, padding, value=filling)
        return torch.cat([x.narrow(dim, c * each, each) for c in self.held(self.rank)], dim)

    def whole(self, x: Tensor, dim: int, tokens: int) -> Tensor:
        """Gather all N tokens of a tensor that holds only this rank's tokens along `dim`.

        All ranks continue with the same values, so that all receive the same gradients. The part of this rank is
        multiplied by the number of ranks, because gradients of weights are averaged over the ranks later.
        """
        return _Whole.apply(x, self, dim, tokens)  # type: ignore[no-any-return, no-untyped-call]

    def summed(self, x: Tensor) -> Tensor:
        """The sum over the ranks; for gradients see `whole`."""
        return _Summed.apply(x, self)  # type: ignore[no-any-return, no-untyped-call]


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: Cut, dim: int, tokens: int) -> Tensor:
        ctx.cut, ctx.dim = cut, dim
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(cut.size)]
        distributed.all_gather(parts, x.contiguous(), group=cut.group)
        each = cut.chunk(tokens)
        by_chunk = {
            chunk: part.narrow(dim, at * each, each)
            for rank, part in enumerate(parts)
            for at, chunk in enumerate(cut.held(rank))
        }
        return torch.cat([by_chunk[i] for i in range(cut.chunks)], dim).narrow(dim, 0, tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.cut.take(grad, ctx.dim) * ctx.cut.size, None, None, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: Cut) -> Tensor:
        ctx.cut = cut
        total = x.clone()
        distributed.all_reduce(total, group=cut.group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.cut.size, None
