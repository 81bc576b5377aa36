"""Numbers that ranks agree on: sums, means, the slowest, and the largest that any rank reports."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed

from penstock.parallel.dims import LOSS, ParallelDims


@torch.no_grad()
def average(values: Tensor, dims: ParallelDims) -> Tensor:
    """Average `values` over the ranks with different samples or tokens, in place; fp32 or wider, on the device."""
    return add_up(values, dims).div_(dims.degree(*LOSS))  # gloo has no mean


@torch.no_grad()
def add_up(values: Tensor, dims: ParallelDims) -> Tensor:
    """Sum `values` over the ranks with different samples or tokens, in place."""
    if dims.degree(*LOSS) > 1:
        distributed.all_reduce(values, group=dims.group(*LOSS))
    return values


def slowest(value: float, dims: ParallelDims) -> float:
    """The largest of all ranks' values, on every rank; they wait for each other. A single process returns its own."""
    if dims.alone:
        return value
    largest = torch.tensor(value, dtype=torch.float64)
    distributed.all_reduce(largest, op=distributed.ReduceOp.MAX)
    return float(largest)


class Ballot:
    """Collects one number per turn from each rank; one turn later all ranks get the largest of them.

    The all-reduce runs during the following step and is read at the next turn, so a rank waits only if a peer is a
    whole step late. Everything is on the host; no device is waited for. All ranks must take the same turns.
    """

    def __init__(self, dims: ParallelDims) -> None:
        self._dims = dims
        self._pending: tuple[Any, Tensor] | None = None

    def turn(self, value: int) -> int:
        """Submit this rank's value for this turn; returns the largest of the previous turn (alone: of this one)."""
        if self._dims.alone:
            return value
        before = self.result()
        ballot = torch.tensor([value], dtype=torch.int64)
        self._pending = (distributed.all_reduce(ballot, op=distributed.ReduceOp.MAX, async_op=True), ballot)
        return before

    def result(self) -> int:
        """Wait for the largest value of the last turn; 0 if there was none."""
        if self._pending is None:
            return 0
        work, ballot = self._pending
        self._pending = None
        work.wait()
        return int(ballot.item())
