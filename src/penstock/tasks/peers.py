"""Ranks whose samples are compared with each other: those of a group that see different ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks that see different samples, and this one's place among them."""

    group: distributed.ProcessGroup | None = None
    """None: all ranks."""
    count: int = 1
    place: int = 0

    def gathered(self, rows: Tensor) -> Tensor:
        """Rows (B, …) of all ranks, (B · ranks, …), in the order of the ranks; the same number on each.
        Differentiable: each rank's loss depends on all rows, so that a row's gradient is the sum over ranks; data
        parallelism then takes the mean over ranks, as it does of all gradients."""
        if self.count == 1:
            return rows
        return _GatheredRows.apply(rows, self)  # type: ignore[no-any-return, no-untyped-call]


class _GatheredRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        every = [torch.empty_like(rows) for _ in range(peers.count)]
        distributed.all_gather(every, rows.contiguous(), group=peers.group)
        return torch.cat(every)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        distributed.all_reduce(gradient, group=ctx.peers.group)
        return gradient.chunk(ctx.peers.count)[ctx.peers.place], None
