"""Ranks whose samples are compared with each other: the ranks of a group with different samples.

Shapes: B samples of a rank, E features of a vector.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from penstock.kernels.contrast import ContrastForm, contrast

CHUNK = 4096
"""Number of other vectors whose logits are held at a time."""


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks with different samples, and this rank's place among them."""

    group: distributed.ProcessGroup | None = None
    """None: all ranks."""
    count: int = 1
    place: int = 0

    def gathered(self, rows: Tensor) -> Tensor:
        """Gather the rows (B, …) of all ranks, (B · ranks, …), in rank order; B is the same on each rank.
        Differentiable: each rank's loss depends on all rows, so that a row's gradient is the sum over ranks; data
        parallelism then averages it over ranks, like all gradients."""
        if self.count == 1:
            return rows
        return _GatheredRows.apply(rows, self)  # type: ignore[no-any-return, no-untyped-call]

    def contrast(
        self, rows: Tensor, others: Tensor, groups: Tensor, form: ContrastForm = "softmax"
    ) -> Tensor:
        """Mean contrastive loss of vectors and their partners, (B, E) each, over all ranks, 0-d: half for finding each
        row's partners, half for the reverse; with the form `sigmoid` each pair counts once. Samples with the same
        number in `groups` (B,) match. See `penstock.kernels.contrast`."""
        every = self.gathered(groups)

        def one_way(rows: Tensor, others: Tensor) -> Tensor:
            wide = self.gathered(others)
            chunk = CHUNK if len(wide) > CHUNK else None
            return contrast(rows, wide, groups, every, form=form, chunk=chunk).mean()

        if form == "sigmoid":
            return one_way(rows, others)
        return (one_way(rows, others) + one_way(others, rows)) / 2


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
