"""The loss of a step: the mean over all its targets, however these are cut into micro-batches and over ranks.

Where a task has several losses, each has its own n_i, and the loss is the sum of their means.

With s_i the summed loss of micro-batch i and n_i its targets, on any rank, the loss is Σ s_i / Σ n_i. Gradients are
averaged over R ranks afterwards, so each rank takes Σ s_i / N of its own micro-batches, with N = Σ n_i / R over all
ranks. A `Task` counts targets before the forward pass, so that N costs one all-reduce of one number, which nobody waits
for. A function that returns (sum, count) counts in the forward pass, when N is not known yet: its sums are divided by
an N that the first micro-batch lets expect, and the gradients, before they are clipped, by how far that was off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.parallel import ParallelDims
from penstock.parallel.agree import average
from penstock.parallel.dims import LOSS
from penstock.tasks import Loss, Task

Count = Tensor | float


class StepLoss:
    """Takes in the micro-batches' losses of one step, in any order, and returns what to call backward on."""

    def __init__(self, loss: Loss, micro_batches: Sequence[Any], dims: ParallelDims) -> None:
        self._parts = len(micro_batches)
        self._dims = dims
        self._alone = dims.degree(*LOSS) == 1
        self._losses: list[Tensor] = []
        self._counts: list[Count] | None = None
        """Targets of each micro-batch, known beforehand; None where they are not asked for."""
        self._counted: list[Count] = []
        """Targets that came with the losses."""
        self.parts: Tensor | None = None
        """(H,), this rank's part of each of several losses, once `result` was asked for."""
        self._total: Count = float(self._parts)
        """N, or what is taken for it."""
        if isinstance(loss, Task) and not (self._alone and self._parts == 1):
            self._counts = [loss.targets(batch) for batch in micro_batches]
            self._total = self._per_rank(sum(self._counts))

    def share(self, index: int, loss: Tensor | tuple[Tensor, Count]) -> Tensor:
        """The part of micro-batch `index` in the loss of the step; differentiable."""
        if len(self._losses) > 0 and isinstance(loss, tuple) != bool(self._counted):
            raise ConfigError(
                "The loss function returned (sum, count) for some batches only; let it do so for all."
            )
        if isinstance(loss, tuple):
            total, count = _checked(loss)
            if not self._counted:
                self._total = self._per_rank(count * self._parts)
            self._counted.append(count)
            self._losses.append(total.detach())
            return total / _like(self._total, total)
        if self._counts is None:
            self._losses.append(loss.detach())
            return _summed(loss if self._parts == 1 else loss / self._parts)
        share = loss * _like(self._counts[index] / self._total, loss)
        self._losses.append(share.detach())
        return _summed(share)

    def result(self) -> tuple[Tensor, Tensor | None]:
        """This rank's part of the step's loss, 0-d, whose average over ranks is the loss; and the divisor of the
        gradients, 0-d, where they still need one.
        """
        losses = torch.stack(self._losses)
        if losses.dim() > 1:
            self.parts = losses.mean(0) if self._counts is None else losses.sum(0)
            return self.parts.sum(), None
        if self._counted:
            if self._alone and self._parts == 1:
                return losses[0] / _like(self._total, losses), None
            total = self._per_rank(sum(self._counted))
            divisor = total / self._total
            if not isinstance(divisor, Tensor):
                divisor = torch.full((), divisor, dtype=torch.float64, device=losses.device)
            return losses.sum() / _like(total, losses), divisor
        if self._parts == 1:
            return self._losses[0], None
        return losses.mean() if self._counts is None else losses.sum(), None

    def _per_rank(self, count: Count) -> Count:
        """The mean of a count over the ranks whose gradients are averaged; 1 where nothing is counted, so that losses
        of nothing are 0.
        """
        mesh = self._dims.mesh
        if isinstance(count, Tensor):
            device = count.device if mesh is None else mesh.device_type
            count = count.detach().to(device, torch.float64, non_blocking=True, copy=True)
        elif mesh is not None:
            count = torch.full((), count, dtype=torch.float64, device=mesh.device_type)
        if isinstance(count, Tensor):
            count = average(count, self._dims)
            return count.where(count > 0, 1.0)
        return count or 1.0


def _summed(loss: Tensor) -> Tensor:
    """The sum of several losses; one as it is."""
    return loss.sum() if loss.dim() else loss


def _like(value: Count, loss: Tensor) -> Count:
    """A factor in the type of a loss, which it must not widen."""
    return value.to(loss.device, loss.dtype, non_blocking=True) if isinstance(value, Tensor) else value


def _checked(value: tuple[Any, ...]) -> tuple[Tensor, Count]:
    """Sum and count that a function returned. Raises ConfigError for other pairs."""
    if len(value) == 2:
        total, count = value
        counts = isinstance(count, int | float) or (isinstance(count, Tensor) and count.ndim == 0)
        if isinstance(total, Tensor) and total.ndim == 0 and counts:
            return total, count.detach() if isinstance(count, Tensor) else float(count)
    kinds = ", ".join(
        f"a tensor of shape {tuple(one.shape)}" if isinstance(one, Tensor) else type(one).__name__
        for one in value
    )
    raise ConfigError(
        f"The loss function returned ({kinds}), but must return the mean loss as a 0-d tensor, or (sum, count): the "
        "summed loss as a 0-d tensor, and the number of targets."
    )
