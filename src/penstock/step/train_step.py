"""One optimizer step over some micro-batches, without ever waiting for the device.

`TrainStep` lets a `Runner` run the forward and backward passes, with the loss of `StepLoss`, and then updates. A runner
decides the order of micro-batches: one after another, or a pipeline's schedule.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.config.plan import Plan
from penstock.errors import ConfigError
from penstock.kernels.sdpa import Switch, switch_of
from penstock.models.anatomy import evaluating
from penstock.models.balance_loss import weighed
from penstock.models.experts import balance, mixtures_of
from penstock.optim import EMA, clipped_step
from penstock.parallel import ALONE, DataParallel, ParallelDims
from penstock.parallel.agree import average
from penstock.parallel.data import add_up_all
from penstock.parallel.dims import LOSS
from penstock.precision import LossScaler, MasterWeights, Overflow, OverflowTrace, matmul_precision
from penstock.process import set_host_memory
from penstock.tasks import Loss, Task, classification_loss

Count = Tensor | float
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step. Tensors are on the device and may not be computed yet: reading them waits."""

    loss: Tensor
    """This rank's part of the step's loss, 0-d, detached, without loss scale. Its average over ranks (with one rank,
    itself) is the loss: the sum over all targets of the step divided by their number, for any split into micro-batches
    and over ranks; for a function that returns no count, the mean of the micro-batches' means."""
    grad_norm: Tensor | None
    """2-norm of all gradients before clipping, without loss scale, 0-d fp32; None if nothing needed it. If it is not
    finite, a scaled fp16 step overflowed and was skipped."""
    parts: Tensor | None = None
    """(H,), for a task with several losses: this rank's part of each; `loss` is the part of their sum."""


class TrainStep:
    """Forward and backward over micro-batches, then clipping, update and averaging.

    `runner` runs the passes; by default micro-batches run one after another. The model's precision is set by
    `apply_precision`. Everything runs under the Plan's matmul precision; the former precision is restored on return.
    The loss is averaged over all targets before gradients are computed: see `StepResult.loss`.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, *, plan: Plan, device: torch.device | str,
        loss: Loss = classification_loss, clip_norm: float | None = None, scaler: LossScaler | None = None,
        ema: EMA | None = None, masters: MasterWeights | None = None, replicas: DataParallel | None = None,
        runner: Runner | None = None,
    ) -> None:  # fmt: skip
        if clip_norm is not None and not clip_norm > 0.0:
            raise ConfigError(
                f"recipe.clip_norm is {clip_norm}, but must be above 0; leave it out for no clipping."
            )
        self.model, self.optimizer, self.plan, self.device = model, optimizer, plan, torch.device(device)
        self.runner: Runner = runner or Accumulate(
            model, loss, scaler=scaler, masters=masters, replicas=replicas
        )
        self.clip_norm, self.scaler, self.ema = clip_norm, scaler, ema
        self.masters, self.replicas = masters, replicas
        self._unused = switch_of(model)
        self._mixtures = mixtures_of(model)
        for mixture in self._mixtures:
            mixture.stepped = True
        self.skips: Callable[[Tensor, Tensor | None], Tensor] | None = None
        """A function of a step's mean loss and gradient norm that returns 1 to skip the step, 0-d fp32 on the device.
        Set by the training loop; see `penstock.optim.clip.can_refuse`."""

    def __call__(self, micro_batches: Sequence[Any]) -> StepResult:
        """Take one step. Raises ConfigError if there is no micro-batch, or more than the Plan can run."""
        if not micro_batches:
            raise ConfigError("A training step received no micro-batch; pass it at least one.")
        recorded = self.plan.compile == "graphs"
        if recorded and len(micro_batches) > 1:
            raise ConfigError(
                "A step with plan.compile=graphs overwrites the gradients of the micro-batch before; pass it one, or "
                "use compile=whole."
            )
        set_host_memory(keep=self.plan.host_memory == "keep")
        with matmul_precision(self.plan.matmul):
            self.optimizer.zero_grad()
            loss = self.runner(micro_batches)
            if recorded:  # the next step overwrites outputs of the recorded passes, such as the loss
                loss = loss.clone()
            if self._unused is not None:
                self._tell_unused(self._unused)
            refuse = None if self.skips is None else partial(self.skips, loss)
            norm = clipped_step(
                self.optimizer, max_norm=self.clip_norm, scaler=self.scaler, refuse=refuse,
                whole=self.runner.whole_norm, divisor=self.runner.divisor,
            )  # fmt: skip
            if self._mixtures:
                balance(self._mixtures, self.add_up)
            if self.masters is not None:
                self.masters.publish()
            if self.ema is not None:
                self.ema.update()
        return StepResult(loss=loss, grad_norm=norm, parts=self.runner.parts)

    def add_up(self, loads: list[Tensor]) -> None:
        """Sum the loads of mixtures over the ranks that route different tokens, in place."""
        dims = ALONE if self.replicas is None else self.replicas.dims
        exchanges = [mixture.exchange for mixture in self._mixtures if mixture.exchange is not None]
        split = any(exchange.splits_tokens for exchange in exchanges)
        for names in (LOSS, ("tp",) if split else ()):
            if loads and dims.degree(*names) > 1:
                add_up_all(loads, dims.group(*names))

    def _tell_unused(self, switch: Switch) -> None:
        """Warn, once after the first pass, about an attention setting that the model does not use."""
        self._unused = None
        if not switch.used:
            _log.warning(
                "plan.attention=%s has no effect: %s never calls torch.nn.functional.scaled_dot_product_attention "
                "itself (nn.MultiheadAttention calls it out of reach). Leave plan.attention at sdpa, or let the model "
                "call it, as transformers' do with attn_implementation='sdpa'.",
                switch.backend, type(self.model).__name__,
            )  # fmt: skip

    def first_overflow(self, micro_batches: Sequence[Any]) -> Overflow | None:
        """The first tensor in the passes on micro-batches that is not finite, to explain why a run ends. Changes
        gradients, but not weights. All ranks must call it. Waits for the device."""
        trace = OverflowTrace([self.model])
        with matmul_precision(self.plan.matmul), trace:
            self.optimizer.zero_grad()
            self.runner(micro_batches)
        return trace.first((name, p.grad) for name, p in self.model.named_parameters())

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Within this context, the model computes as in training, under the Plan's precision, but in eval mode and
        without gradients; afterwards each module's mode is restored."""
        with evaluating(self.model):
            if self.replicas is not None:
                self.replicas.drop_copies()
            try:
                with matmul_precision(self.plan.matmul), torch.no_grad():
                    yield
            finally:
                if self.replicas is not None:
                    self.replicas.drop_copies()


class Runner(Protocol):
    """Runs the micro-batches of one optimizer step."""

    loss: Loss
    parts: Tensor | None
    """(H,), this rank's part of each of several losses of the last step; None: there is only one."""
    divisor: Tensor | None
    """Divisor of the gradients after the passes, 0-d; None if they need none. See `StepLoss`."""

    def __call__(self, micro_batches: Sequence[Any]) -> Tensor:
        """Compute the gradients of the step's loss, where the optimizer reads them, multiplied by the loss scale if
        there is one. Returns this rank's part of that loss (see `StepResult.loss`): 0-d, detached, unscaled."""

    def whole_norm(self, norm: Tensor) -> Tensor:
        """The norm of all gradients of the model, from the norm of this rank's gradients, 0-d."""


class Accumulate:
    """Runs micro-batches one after another through the whole model, and accumulates gradients."""

    def __init__(
        self, model: nn.Module, loss: Loss, *, scaler: LossScaler | None = None,
        masters: MasterWeights | None = None, replicas: DataParallel | None = None,
    ) -> None:  # fmt: skip
        self.model, self.loss = model, loss
        self.scaler, self.masters, self.replicas = scaler, masters, replicas
        self.divisor: Tensor | None = None
        self.parts: Tensor | None = None
        self.mixed = bool(mixtures_of(model))

    def __call__(self, micro_batches: Sequence[Any]) -> Tensor:
        step = StepLoss(self.loss, micro_batches, None if self.replicas is None else self.replicas.dims)
        for index, batch in enumerate(micro_batches):
            self._one(batch, index, len(micro_batches), step)
        if self.replicas is not None:
            self.replicas.end()
        loss, self.divisor = step.result()
        self.parts = step.parts
        return loss

    def whole_norm(self, norm: Tensor) -> Tensor:
        """The norm unchanged: the rank holds the whole model, or DTensors, whose norm covers all ranks."""
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
            self.masters.collect()  # accumulate micro-batches in fp32


class StepLoss:
    """The loss of a step: the mean over all its targets, for any split into micro-batches and over ranks. It collects
    the micro-batches' losses, in any order, and returns the losses to backpropagate.

    With s_i the summed loss of micro-batch i and n_i its targets, on any rank, the loss is Σ s_i / Σ n_i. Gradients are
    averaged over R ranks afterwards, so each rank uses Σ s_i / N over its own micro-batches, with N = Σ n_i / R over
    all ranks. A `Task` counts targets before the forward pass, so that N costs one all-reduce of one number, without
    waiting. A function that returns (sum, count) counts in the forward pass, when N is not known yet: its sums are
    divided by an N that is estimated from the first micro-batch, and the gradients, before clipping, by the ratio of N
    to its estimate. If a task has several losses, each has its own n_i, and the loss is the sum of their means.
    """

    def __init__(self, loss: Loss, micro_batches: Sequence[Any], dims: ParallelDims | None) -> None:
        self._parts = len(micro_batches)
        self._dims = None if dims is None or dims.degree(*LOSS) == 1 else dims
        """None: there is one rank to average over."""
        self._losses: list[Tensor] = []
        self._counts: list[Count] | None = None
        """Targets of each micro-batch, known beforehand; None if they are not needed."""
        self._counted: list[Count] = []
        """Numbers of targets that came with the losses."""
        self.parts: Tensor | None = None
        """(H,), this rank's part of each of several losses, after `result` was called."""
        self._total: Count = float(self._parts)
        """N, or its estimate."""
        if isinstance(loss, Task) and not (self._dims is None and self._parts == 1):
            self._counts = [loss.targets(batch) for batch in micro_batches]
            self._total = self._per_rank(sum(self._counts))

    def share(self, index: int, loss: Tensor | tuple[Tensor, Count]) -> Tensor:
        """The contribution of micro-batch `index` to the loss of the step; differentiable."""
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
        gradients, 0-d, if they still need one."""
        losses = torch.stack(self._losses)
        if losses.dim() > 1:
            self.parts = losses.mean(0) if self._counts is None else losses.sum(0)
            return self.parts.sum(), None
        if self._counted:
            if self._dims is None and self._parts == 1:
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
        """The mean of a count over the ranks whose gradients are averaged; 1 instead of 0, so that a loss without
        targets is 0."""
        mesh = None if self._dims is None else self._dims.mesh
        if isinstance(count, Tensor):
            device = count.device if mesh is None else mesh.device_type
            count = count.detach().to(device, torch.float64, non_blocking=True, copy=True)
        elif mesh is not None:
            count = torch.full((), count, dtype=torch.float64, device=mesh.device_type)
        if isinstance(count, Tensor):
            count = count if self._dims is None else average(count, self._dims)
            return count.where(count > 0, 1.0)
        return count or 1.0


def _summed(loss: Tensor) -> Tensor:
    """The sum of several losses; a single loss unchanged."""
    return loss.sum() if loss.dim() else loss


def _like(value: Count, loss: Tensor) -> Count:
    """A factor in the dtype of a loss, which it must not widen."""
    return value.to(loss.device, loss.dtype, non_blocking=True) if isinstance(value, Tensor) else value


def _checked(value: tuple[Any, ...]) -> tuple[Tensor, Count]:
    """The sum and count that a function returned. Raises ConfigError for other pairs."""
    if len(value) == 2:
        total, count = value
        counts = isinstance(count, int | float) or (isinstance(count, Tensor) and count.ndim == 0)
        if isinstance(total, Tensor) and total.ndim == 0 and counts:
            return total, count.detach() if isinstance(count, Tensor) else float(count)
    kinds = ", ".join(
        f"a tensor of shape {tuple(part.shape)}" if isinstance(part, Tensor) else type(part).__name__
        for part in value
    )
    raise ConfigError(
        f"The loss function returned ({kinds}), but must return the mean loss as a 0-d tensor, or (sum, count): the "
        "summed loss as a 0-d tensor, and the number of targets."
    )
