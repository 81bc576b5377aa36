"""The current scale of an optimizer's gradients, and the division by it in the optimizer's step.

Each accelerated optimizer has a `Gradients` object. Gradients stay scaled until `clip_grad_norm_` or the step: a fused
kernel divides them in the update, so that unscaling costs no separate pass.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from penstock.errors import ConfigError
from penstock.optim.clip import (
    clip_gradients,
    folds,
    grad_norm,
    gradients_of,
    guarded_update,
    overflow_of,
    unscale_,
)
from penstock.optim.tensors import parameters_of
from penstock.precision.scaler import LossScaler
from penstock.precision.session import Session

_log = logging.getLogger(__name__)


class Gradients:
    """The gradients of one optimizer between two steps."""

    def __init__(self, optimizer: Optimizer, session: Session) -> None:
        self.optimizer = optimizer
        self.session = session
        self.scale: Tensor | None = None
        """Scale of the gradients; None once they are unscaled, or before any backward pass."""
        self.scaler: LossScaler | None = None
        """Scaler from which the scale comes."""
        self.prepared = False
        """Whether a loss was scaled since the last step."""
        self.stepping = False
        """Whether the optimizer's step is running."""
        self.held_step: RemovableHandle | None = None
        """Hook that refuses a step function held since before `accelerate`."""
        self.in_backward = False
        """Whether a backward pass is running; until its end gradients are multiplied by the loss scale."""
        self.unsynced = False
        """Whether some gradients are still only this rank's, until a later backward pass averages them."""
        self.yielded: weakref.ref[Tensor] | None = None
        """The scaled loss that was returned last."""
        self.overflows: list[tuple[LossScaler, Tensor]] = []
        """For gradients unscaled before the step: their scaler, and a 0-d fp32 flag, 1 if any is not finite."""
        self._left: list[tuple[int, int]] | None = None
        """The gradients after the latest scaled backward pass: the tensors and their version counts."""
        self._warned = False
        self.stash: list[tuple[Tensor, Tensor]] = []
        """Unscaled gradients of earlier losses, by parameter, to be added to the latest loss's."""
        _EVERY.add(self)

    # -- before a backward pass

    def prepare(self, scaler: LossScaler | None) -> None:
        """Prepare for gradients under the current scale of `scaler`."""
        masters = self.session.masters
        if masters is not None:
            # Micro-batches add up in fp32; but those that DistributedDataParallel has yet to average stay.
            if not self.unsynced and masters.has_gradients(self.optimizer):
                masters.collect(self.optimizer)
            self.unsynced = self.unsynced or masters.unsynced()
        if scaler is None:
            self.prepared = True
            return
        accumulates = self.prepared and (self.scale is None or self.scaler is not scaler)
        if accumulates:
            self._put_aside()
        if not self.prepared or accumulates:
            self.scale = scaler.scale.clone()
            self.scaler = scaler
        self.prepared = True

    def remember(self) -> None:
        """After a scaled backward pass, remember the gradients, so that the step can detect changes made before
        unscaling.
        """
        self._left = self._state() or None

    def _state(self) -> list[tuple[int, int]]:
        gradients = (p.grad for p in self._given())
        return [(id(gradient), gradient._version) for gradient in gradients if gradient is not None]

    def _warn_of_changes(self) -> None:
        if self.scale is None or self._left is None or self._warned or self._state() == self._left:
            return
        self._warned = True
        _log.warning(
            "Gradients of this %s were changed between the backward pass and the step, while they were multiplied by "
            "the loss scale: a clipping limit, say, was that many times too low. Clip with "
            "penstock.clip_grad_norm_(optimizer, …), or call penstock.precision.unscale_(optimizer) first.",
            type(self.optimizer).__name__,
        )

    @torch.no_grad()
    def _put_aside(self) -> None:
        self.unscale()
        for parameter in parameters_of(self.optimizer):
            if parameter.grad is not None:
                self.stash.append((parameter, parameter.grad.clone()))
                parameter.grad = None

    # -- before or in the step

    def collect(self) -> None:
        """Move gradients of half weights to their masters, if there are any."""
        if self.session.masters is not None:
            self.session.masters.collect(self.optimizer)

    @torch.no_grad()
    def unscale(self) -> None:
        """Divide the gradients by their scale, once, and note whether any is not finite."""
        self.collect()
        if self.scale is not None:
            overflow = unscale_(gradients_of(self.optimizer), self.scale)
            if overflow is not None and self.scaler is not None:
                self.overflows.append((self.scaler, overflow))
            self.scale = None
        if self.stash:
            for parameter, gradient in self.stash:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
            self.stash = []

    @torch.no_grad()
    def step(self, update: Callable[..., Any], closure: Callable[[], Any] | None) -> Any:
        """The optimizer's step on unscaled gradients, skipped if one of them is not finite."""
        self.stepping = True
        try:
            return self._step(update, closure)
        finally:
            self.stepping = False

    def _step(self, update: Callable[..., Any], closure: Callable[[], Any] | None) -> Any:
        masters = self.session.masters
        loss: Any = None
        if self.session.numerics.scales:
            if closure is not None:
                loss = self._loss_of(closure)
            result = self._scaled_step(update)
        elif closure is not None:
            result = update(self._evaluating(closure))
        else:
            self.collect()
            result = update()
        if masters is not None:
            masters.publish(self.optimizer)
            masters.used_up(self.optimizer)
        self.forget()
        return result if loss is None else loss

    def _evaluating(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure that an optimizer may call any number of times: it returns the loss, and leaves gradients in the
        masters. Gradients from before the step stay until the closure clears them: closures of trainers that have
        already called `backward` do not.
        """
        masters = self.session.masters
        again = False

        def evaluate() -> Any:
            nonlocal again
            if masters is not None:
                masters.publish(self.optimizer)  # a line search moves the masters between evaluations
                if again:
                    masters.zero_grad(self.optimizer)
                    masters.used_up(self.optimizer)
            again = True
            with torch.enable_grad():
                loss = closure()
            self.collect()
            return loss

        return evaluate

    def _loss_of(self, closure: Callable[[], Any]) -> Any:
        """The loss of a closure whose gradients are scaled; the closure is called once, before the step."""
        kind = self.optimizer.__class__
        if kind.__name__ == "LBFGS" or not kind.__module__.startswith(("torch.optim", "penstock.")):
            raise ConfigError(
                f"{kind.__name__} may call its closure several times in a step, and reads gradients in between, which "
                "a loss scale would have multiplied; use dtype='bf16', which needs no loss scale, or step without a "
                "closure."
            )
        with torch.enable_grad():
            return closure()

    def _scaled_step(self, update: Callable[..., Any]) -> Any:
        if self.in_backward:
            raise ConfigError(
                "optimizer.step() was called inside the backward pass, by a hook, where gradients are multiplied by "
                "the loss scale until the pass is over; use --dtype bf16, which needs no loss scale, or step after "
                "loss.backward()."
            )
        self._warn_of_changes()
        self.collect()
        scaler = self.scaler
        if scaler is None or not self.prepared:
            if any(p.grad is not None for p in parameters_of(self.optimizer)):
                raise ConfigError(
                    "optimizer.step() was called on gradients whose loss was not scaled, though "
                    f"{self.session.numerics.describe()} needs it; write "
                    "`with penstock.scale_loss(loss, optimizer) as scaled: scaled.backward()`, or use dtype='bf16'."
                )
            return update()
        gradients = gradients_of(self.optimizer)
        if not gradients and not self.stash:
            return update()
        divisor, sparse = self.scale, any(gradient.is_sparse for gradient in gradients)
        if folds(self.optimizer) and not self.stash and divisor is not None and not sparse:
            self.overflows.append((scaler, overflow_of(grad_norm(gradients))))
        else:
            divisor = None
            self.unscale()
        return guarded_update(self.optimizer, update, divisor=divisor, stops=self._decision())

    def _decision(self, *, stepped: bool = True) -> Tensor:
        """Whether any gradient of any loss, on any rank, is not finite; notes each loss's overflow for its scale."""
        assert self.overflows
        merged: Tensor | None = None
        for scaler, overflow in self.overflows:
            if self.session.agree is not None:
                self.session.agree(overflow)
            self.session.note(scaler, overflow, stepped=stepped)
            merged = overflow if merged is None else torch.maximum(merged, overflow.to(merged.device))
        assert merged is not None
        return merged

    @torch.no_grad()
    def discard(self) -> None:
        """Discard gradients without a step; an overflow among them still lowers the loss scale."""
        if self.scale is not None and self.scaler is not None:
            given = [p.grad for p in self._given() if p.grad is not None and not p.grad.is_sparse]
            if given:
                self.overflows.append((self.scaler, overflow_of(grad_norm(given))))
        if self.overflows:
            self._decision(stepped=False)
        self.forget()

    def _given(self) -> Iterable[Any]:
        masters = self.session.masters
        return [
            *parameters_of(self.optimizer),
            *(masters.weights_of(self.optimizer) if masters is not None else ()),
        ]

    def chosen(self, given: set[int]) -> tuple[list[Tensor], bool]:
        """The optimizer's parameters among `given` (by their own ids or those of their half weights), and whether all
        its other parameters are without gradients. Empty if this optimizer was released."""
        if self.optimizer.__dict__.get("_penstock") is not self:
            return [], True
        masters = self.session.masters
        halves = (
            {}
            if masters is None
            else {id(masters.master_of(w)): w for w in masters.weights_of(self.optimizer)}
        )
        pairs = [(p, halves.get(id(p), p)) for p in parameters_of(self.optimizer)]
        chosen: list[Tensor] = [p for p, half in pairs if id(p) in given or id(half) in given]
        ids = set(map(id, chosen))
        return chosen, all(id(p) in ids or (p.grad is None and half.grad is None) for p, half in pairs)

    def forget(self) -> None:
        """Reset the state after gradients were used or discarded."""
        self.unsynced = False
        self.scale = self.scaler = None
        self.overflows = []
        self.stash = []
        self.prepared = False
        self._left = None


@torch.no_grad()
def clip_parameters(parameters: list[Tensor], max_norm: float) -> Tensor:
    """Clip the gradients of parameters, taken as one vector, whether held by the parameters or by their masters."""
    given = set(map(id, parameters))
    picked = {own: choice for own in list(_EVERY) if (choice := own.chosen(given))[0]}
    order = {id(p): at for at, p in enumerate(parameters)}
    # In the order of the parameters, so that all ranks sum in the same order.
    owners = sorted(picked, key=lambda own: min(order.get(id(p), len(order)) for p in own._given()))
    owned = {id(p) for own in owners for p in own._given()}
    free = [p for p in parameters if id(p) not in owned and p.grad is not None]
    if owners and not free and all(whole for _, whole in picked.values()):
        return clip(owners, max_norm)
    for own in owners:
        own.unscale()
    chosen = [p for own in owners for p in picked[own][0]]
    return clip_gradients([p.grad for p in (*chosen, *free) if p.grad is not None], max_norm)


_EVERY: weakref.WeakSet[Gradients] = weakref.WeakSet()
"""Every live `Gradients`: `clip_parameters` finds the optimizers of parameters among them."""


@torch.no_grad()
def clip(all_of: list[Gradients], max_norm: float) -> Tensor:
    """Clip the gradients of some optimizers, taken as one vector, to `max_norm`; returns their 2-norm, 0-d fp32.

    Unscaling and clipping are one pass if no gradient was unscaled before.
    """
    gradients: list[Tensor] = []
    alone = all_of[0] if len(all_of) == 1 and not all_of[0].stash else None
    for own in all_of:
        own.collect()
        if alone is None:
            own.unscale()
        gradients += gradients_of(own.optimizer)
    if alone is None or not gradients:
        return clip_gradients(gradients, max_norm)
    norm = clip_gradients(gradients, max_norm, alone.scale)
    if alone.scale is not None and alone.scaler is not None:
        alone.overflows.append((alone.scaler, overflow_of(norm)))
    alone.scale = None
    return norm
