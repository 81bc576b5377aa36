"""One optimizer step over some micro-batches, without ever waiting for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from penstock.config.plan import Plan
from penstock.errors import ConfigError
from penstock.host_memory import settle
from penstock.optim import EMA, clipped_step
from penstock.parallel import DataParallel
from penstock.precision import (
    LossScaler,
    MasterWeights,
    Overflow,
    OverflowTrace,
    autocast,
    matmul_precision,
)

Loss = Callable[[nn.Module, Any], Tensor]
"""Runs the model on a batch, in whatever form the data come, and returns the mean loss over its samples, 0-d."""


class Guard(Protocol):
    """Decides which steps must not be taken."""

    def judge(self, loss: Tensor, norm: Tensor | None) -> Tensor:
        """1 where the step with this loss and gradient norm is to be skipped, else 0: 0-d fp32, on the device. `norm`
        is None where a loss scale skips gradients that are not finite.
        """
        ...


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came out of a step. Tensors are on the device and may not be computed yet: reading them waits."""

    loss: Tensor
    """Mean over this rank's micro-batches, 0-d, detached, without loss scale."""
    grad_norm: Tensor | None
    """2-norm of all gradients before clipping, without loss scale, 0-d fp32; None if nothing needed it. Not finite
    means that a scaled fp16 step overflowed and was skipped."""


def classification_loss(model: nn.Module, batch: Any) -> Tensor:
    """Mean cross entropy of `model(images)`, (B, classes), against targets: (B,) int64 classes or (B, classes) shares.

    `batch` has attributes `images` and `targets`, or is a pair of them, or a mapping with transformers' names
    `pixel_values` and `labels`. The model may return logits or an object with `logits`. The logarithm of the softmax
    is taken in fp32 under every Plan: over so few numbers half precision saves nothing.
    """
    if isinstance(batch, Mapping):
        images, targets = batch["pixel_values"], batch["labels"]
    elif isinstance(batch, Sequence):
        images, targets = batch
    else:
        images, targets = batch.images, batch.targets
    output = model(images)
    logits = output if isinstance(output, Tensor) else output.logits
    if targets.is_floating_point():
        targets = targets.float()
    return F.cross_entropy(logits.float(), targets)


class TrainStep:
    """Forward and backward over micro-batches, then clipping, update and averaging.

    Forward passes run under the Plan's autocast, everything under its matmul precision, which is restored on return.
    Gradients are those of the loss averaged over the micro-batches. fp16 gets a dynamic loss scale.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        plan: Plan,
        device: torch.device | str,
        loss: Loss = classification_loss,
        clip_norm: float | None = None,
        scaler: LossScaler | None = None,
        ema: EMA | None = None,
        masters: MasterWeights | None = None,
        replicas: DataParallel | None = None,
    ) -> None:
        if clip_norm is not None and not clip_norm > 0.0:
            raise ConfigError(
                f"recipe.clip_norm is {clip_norm}, but must be above 0; leave it out for no clipping."
            )
        self.model = model
        self.optimizer = optimizer
        self.plan = plan
        self.device = torch.device(device)
        self.loss = loss
        self.clip_norm = clip_norm
        self.scaler = scaler
        self.ema = ema
        self.masters = masters
        self.replicas = replicas
        self.guard: Guard | None = None
        """What skips steps that must not be taken; set by who trains. See `penstock.optim.clip.can_refuse`."""

    def __call__(self, micro_batches: Sequence[Any]) -> StepResult:
        """Take one step. Raises ConfigError when there is no micro-batch."""
        if not micro_batches:
            raise ConfigError("A training step was given no micro-batch; give it at least one.")
        settle(keep=self.plan.host_memory == "keep")
        with matmul_precision(self.plan.matmul):
            self.optimizer.zero_grad()
            losses = [
                self._accumulate(batch, index, len(micro_batches))
                for index, batch in enumerate(micro_batches)
            ]
            if self.replicas is not None:
                self.replicas.end()
            loss = losses[0] if len(losses) == 1 else torch.stack(losses).mean()
            refuse = None if self.guard is None else partial(self.guard.judge, loss)
            norm = clipped_step(self.optimizer, max_norm=self.clip_norm, scaler=self.scaler, refuse=refuse)
            if self.masters is not None:
                self.masters.publish()
            if self.ema is not None:
                self.ema.update()
        return StepResult(loss=loss, grad_norm=norm)

    def _accumulate(self, batch: Any, index: int, parts: int) -> Tensor:
        if self.replicas is not None:
            self.replicas.begin(index, parts)
        with autocast(self.plan, self.device):
            loss = self.loss(self.model, batch)
        share = loss if parts == 1 else loss / parts
        (share if self.scaler is None else self.scaler.scaled(share)).backward()  # type: ignore[no-untyped-call]
        if self.masters is not None:
            self.masters.collect()  # micro-batches add up in fp32
        return loss.detach()

    def first_overflow(self, micro_batches: Sequence[Any]) -> Overflow | None:
        """Where forward and backward passes on micro-batches first leave the finite numbers, for a run that is lost:
        weights stay, gradients do not. All ranks must call it. Waits for the device.
        """
        trace = OverflowTrace([self.model])
        with matmul_precision(self.plan.matmul), trace:
            self.optimizer.zero_grad()
            for index, batch in enumerate(micro_batches):
                self._accumulate(batch, index, len(micro_batches))
            if self.replicas is not None:
                self.replicas.end()
        return trace.first((name, p.grad) for name, p in self.model.named_parameters())

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Inside, the model computes as in training, under the Plan's precision, but in eval mode and without
        gradients; afterwards each module's mode is what it was.
        """
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        if self.replicas is not None:
            self.replicas.settle()
        try:
            with matmul_precision(self.plan.matmul), autocast(self.plan, self.device), torch.no_grad():
                yield
        finally:
            if self.replicas is not None:
                self.replicas.settle()
            for module, training in modes:
                module.training = training
