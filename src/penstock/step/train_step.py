"""One optimizer step over some micro-batches, without ever waiting for the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.config.plan import Plan
from penstock.errors import ConfigError
from penstock.host_memory import set_host_memory
from penstock.kernels.sdpa import Switch, switch_of
from penstock.models.anatomy import evaluating
from penstock.models.experts import balance, mixtures_of
from penstock.optim import EMA, clipped_step
from penstock.parallel import ALONE, DataParallel
from penstock.parallel.data import add_up_all
from penstock.parallel.dims import LOSS
from penstock.precision import LossScaler, MasterWeights, Overflow, OverflowTrace, matmul_precision
from penstock.step.runner import Accumulate, Runner
from penstock.tasks import Loss, classification_loss

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step. Tensors are on the device and may not be computed yet: reading them waits."""

    loss: Tensor
    """This rank's part of the step's loss, 0-d, detached, without loss scale. The average over ranks, and what one rank
    alone returns, is the loss: summed over all targets of the step and divided by their number, however they are cut
    into micro-batches and over ranks; of a function that returns no count, the mean of the micro-batches' means."""
    grad_norm: Tensor | None
    """2-norm of all gradients before clipping, without loss scale, 0-d fp32; None if nothing needed it. Not finite
    means that a scaled fp16 step overflowed and was skipped."""
    parts: Tensor | None = None
    """(H,), of a task with several losses this rank's part of each, as `loss` is of their sum."""


class TrainStep:
    """Forward and backward over micro-batches, then clipping, update and averaging.

    `runner` runs the passes, without one the micro-batches one after the other.
    The model computes as `apply_precision` has set it up. Everything runs under the Plan's matmul precision, and the
    former one is restored on return. Gradients are those of the loss averaged over all targets: see `StepResult.loss`.
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
        runner: Runner | None = None,
    ) -> None:
        if clip_norm is not None and not clip_norm > 0.0:
            raise ConfigError(
                f"recipe.clip_norm is {clip_norm}, but must be above 0; leave it out for no clipping."
            )
        self.model = model
        self.optimizer = optimizer
        self.plan = plan
        self.device = torch.device(device)
        self.runner: Runner = runner or Accumulate(
            model, loss, scaler=scaler, masters=masters, replicas=replicas
        )
        self.clip_norm = clip_norm
        self.scaler = scaler
        self.ema = ema
        self.masters = masters
        self.replicas = replicas
        self._unused = switch_of(model)
        self._mixtures = mixtures_of(model)
        for mixture in self._mixtures:
            mixture.stepped = True
        self.skips: Callable[[Tensor, Tensor | None], Tensor] | None = None
        """Given a step's mean loss and gradient norm: 1 where it must not be taken, 0-d fp32 on the device. Set by who
        trains; see `penstock.optim.clip.can_refuse`.
        """

    def __call__(self, micro_batches: Sequence[Any]) -> StepResult:
        """Take one step. Raises ConfigError when there is no micro-batch."""
        if not micro_batches:
            raise ConfigError("A training step received no micro-batch; pass it at least one.")
        set_host_memory(keep=self.plan.host_memory == "keep")
        with matmul_precision(self.plan.matmul):
            self.optimizer.zero_grad()
            loss = self.runner(micro_batches)
            if self._unused is not None:
                self._tell_unused(self._unused)
            refuse = None if self.skips is None else partial(self.skips, loss)
            norm = clipped_step(
                self.optimizer,
                max_norm=self.clip_norm,
                scaler=self.scaler,
                refuse=refuse,
                whole=self.runner.whole_norm,
                divisor=self.runner.divisor,
            )
            if self._mixtures:
                balance(self._mixtures, self.add_up)
            if self.masters is not None:
                self.masters.publish()
            if self.ema is not None:
                self.ema.update()
        return StepResult(loss=loss, grad_norm=norm, parts=self.runner.parts)

    def add_up(self, loads: list[Tensor]) -> None:
        """Add up the loads of mixtures over the ranks that route other tokens, in place."""
        dims = ALONE if self.replicas is None else self.replicas.dims
        parts = any(
            mixture.exchange is not None and mixture.exchange.splits_tokens for mixture in self._mixtures
        )
        for names in (LOSS, ("tp",)[: int(parts)]):
            if loads and dims.degree(*names) > 1:
                add_up_all(loads, dims.group(*names))

    def _tell_unused(self, switch: Switch) -> None:
        """Warn, once after the first pass, of a choice of attention that the model has no use for."""
        self._unused = None
        if not switch.used:
            name = type(self.model).__name__
            _log.warning(
                "plan.attention=%s changes nothing: %s never calls torch.nn.functional.scaled_dot_product_attention by "
                "itself (nn.MultiheadAttention calls it out of reach). Leave plan.attention at sdpa, or let the model "
                "call it, as transformers' do with attn_implementation='sdpa'.",
                switch.backend,
                name,
            )

    def first_overflow(self, micro_batches: Sequence[Any]) -> Overflow | None:
        """The first tensor in the passes on micro-batches that is not finite, to explain why a run ends. Weights stay
        as they are, gradients do not. All ranks must call it. Waits for the device.
        """
        trace = OverflowTrace([self.model])
        with matmul_precision(self.plan.matmul), trace:
            self.optimizer.zero_grad()
            self.runner(micro_batches)
        return trace.first((name, p.grad) for name, p in self.model.named_parameters())

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Inside, the model computes as in training, under the Plan's precision, but in eval mode and without
        gradients; afterwards each module's mode is what it was.
        """
        with evaluating(self.model):
            if self.replicas is not None:
                self.replicas.drop_copies()
            try:
                with matmul_precision(self.plan.matmul), torch.no_grad():
                    yield
            finally:
                if self.replicas is not None:
                    self.replicas.drop_copies()
