"""The forward and backward passes of a training step: a runner owns the micro-batches and their order.

One after the other is one order; a pipeline schedule is another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from penstock.models.balance_loss import weighed
from penstock.models.experts import mixtures_of
from penstock.parallel import ALONE, DataParallel
from penstock.precision import LossScaler, MasterWeights
from penstock.step.step_loss import StepLoss
from penstock.tasks import Loss, Task


class Runner(Protocol):
    """Runs the micro-batches of one optimizer step."""

    loss: Loss
    parts: Tensor | None
    """(H,), this rank's part of each of several losses of the last step; None: there is one."""
    divisor: Tensor | None
    """Divisor of the gradients after the passes, 0-d; None where they are complete. See `StepLoss`."""

    def __call__(self, micro_batches: Sequence[Any]) -> Tensor:
        """Leave the gradients of the step's loss where the optimizer takes them, with the loss scale in them if there
        is one. Returns this rank's part of that loss (see `StepResult.loss`): 0-d, detached, without loss scale.
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
        self.divisor: Tensor | None = None
        self.parts: Tensor | None = None
        self.mixed = bool(mixtures_of(model))

    def __call__(self, micro_batches: Sequence[Any]) -> Tensor:
        dims = ALONE if self.replicas is None else self.replicas.dims
        step = StepLoss(self.loss, micro_batches, dims)
        for index, batch in enumerate(micro_batches):
            self._one(batch, index, len(micro_batches), step)
        if self.replicas is not None:
            self.replicas.end()
        loss, self.divisor = step.result()
        self.parts = step.parts
        return loss

    def whole_norm(self, norm: Tensor) -> Tensor:
        """The same: the rank holds the whole model, or DTensors that know of the others."""
        return norm

    def _one(self, batch: Any, index: int, parts: int, step: StepLoss) -> None:
        """Forward and backward of micro-batch `index` of `parts`."""
        if self.replicas is not None:
            self.replicas.begin(index, parts)
        loss = self.loss.separate if isinstance(self.loss, Task) else self.loss
        share = step.share(index, loss(self.model, batch))
        share = weighed(share, parts) if self.mixed else share
        (share if self.scaler is None else self.scaler.scaled(share)).backward()  # type: ignore[no-untyped-call]
        if self.masters is not None:
            self.masters.collect()  # micro-batches add up in fp32
