"""The forward and backward passes of a training step: a runner owns the micro-batches and their order.

One after the other is one order; a pipeline schedule is another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from penstock.parallel import DataParallel
from penstock.precision import LossScaler, MasterWeights
from penstock.tasks import Loss


class Runner(Protocol):
    """Runs the micro-batches of one optimizer step."""

    loss: Loss

    def __call__(self, micro_batches: Sequence[Any]) -> Tensor:
        """Leave the gradients of the mean loss where the optimizer takes them, with the loss scale in them if there is
        one. Returns the mean loss over this rank's micro-batches: 0-d, detached, without loss scale.
        """

    def whole_norm(self, norm: Tensor) -> Tensor:
        """The norm of all gradients of the model, from that of those that this rank holds, 0-d."""


class Accumulate:
    """Takes one micro-batch after the other through the whole model, so that their gradients add up."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        *,
        scaler: LossScaler | None = None,
        masters: MasterWeights | None = None,
        replicas: DataParallel | None = None,
    ) -> None:
        self.model = model
        self.loss = loss
        self.scaler = scaler
        self.masters = masters
        self.replicas = replicas

    def __call__(self, micro_batches: Sequence[Any]) -> Tensor:
        parts = len(micro_batches)
        losses = [self._one(batch, index, parts) for index, batch in enumerate(micro_batches)]
        if self.replicas is not None:
            self.replicas.end()
        return losses[0] if parts == 1 else torch.stack(losses).mean()

    def whole_norm(self, norm: Tensor) -> Tensor:
        """The same: the rank holds the whole model, or DTensors that know of the others."""
        return norm

    def _one(self, batch: Any, index: int, parts: int) -> Tensor:
        """Forward and backward of micro-batch `index` of `parts`; returns its loss."""
        if self.replicas is not None:
            self.replicas.begin(index, parts)
        loss = self.loss(self.model, batch)
        share = loss if parts == 1 else loss / parts
        (share if self.scaler is None else self.scaler.scaled(share)).backward()  # type: ignore[no-untyped-call]
        if self.masters is not None:
            self.masters.collect()  # micro-batches add up in fp32
        return loss.detach()
