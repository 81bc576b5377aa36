"""The methods of an accelerated optimizer, which handle loss scale and master weights."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer

from penstock.errors import CheckpointError, ConfigError
from penstock.precision.copies import StandIns
from penstock.precision.scaling import Gradients
from penstock.precision.session import Session

_KEY = "penstock"
_log = logging.getLogger(__name__)


def gradients_beside(optimizer: Optimizer) -> Gradients:
    """The `Gradients` that `accelerate` put beside an optimizer. Raises ConfigError if it was not accelerated."""
    own = optimizer.__dict__.get("_penstock") if isinstance(optimizer, Optimizer) else None
    if own is None:
        raise ConfigError(
            f"This {type(optimizer).__name__} was not accelerated; call "
            "`model, optimizer = penstock.accelerate(model, optimizer)` first."
        )
    beside: Gradients = own
    return beside


def attend(own: Gradients) -> None:
    """Let the optimizer's step, zero_grad and state dict handle loss scale and master weights."""
    optimizer = own.optimizer
    stepping = optimizer.__dict__.get("step")
    _STAND_INS.put_on(optimizer)
    own.held_step = optimizer.register_step_pre_hook(_require_own_step)
    if stepping is not None:  # a learning-rate scheduler wrapped it on the instance

        @functools.wraps(stepping)
        def step(closure: Callable[[], Any] | None = None) -> Any:
            return own.step(functools.partial(_call, stepping), closure)

        step.__dict__["_penstock"] = stepping
        optimizer.step = step  # type: ignore[method-assign]


def release(optimizer: Optimizer) -> None:
    """Undo `attend`, and remove the optimizer's `Gradients`."""
    own = optimizer.__dict__.pop("_penstock", None)
    if own is not None and own.held_step is not None:
        own.held_step.remove()
    if not _STAND_INS.on(optimizer):
        return
    _STAND_INS.take_off(optimizer)
    stepping = getattr(optimizer.__dict__.get("step"), "_penstock", None)
    if stepping is not None:
        optimizer.step = stepping  # type: ignore[method-assign]


def _require_own_step(optimizer: Optimizer, *_: Any) -> None:
    """Raise ConfigError if a step function was held since before `accelerate`: it knows no loss scale or masters."""
    if not gradients_beside(optimizer).stepping:
        raise ConfigError(
            f"A step of this {type(optimizer).__name__} was taken by itself, as `step = optimizer.step`, before "
            "penstock.accelerate, and would leave the model as it is; take it afterwards."
        )


def _call(step: Callable[..., Any], closure: Callable[[], Any] | None = None) -> Any:
    return step() if closure is None else step(closure)


def _methods(cls: type[Optimizer]) -> dict[str, Any]:
    original: Callable[..., Any] = cls.step

    @functools.wraps(original)
    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        update = functools.partial(_call, functools.partial(original, self))
        if "_penstock" not in self.__dict__:  # released; a scheduler that was made before still calls this
            return update(closure)
        return gradients_beside(self).step(update, closure)

    def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        own = gradients_beside(self)
        if own.prepared:
            own.discard()
        else:
            own.forget()
        if own.session.masters is not None:
            own.session.masters.zero_grad(self, set_to_none=set_to_none)
        cls.zero_grad(self, set_to_none=set_to_none)

    def state_dict(self: Optimizer) -> dict[str, Any]:
        session = gradients_beside(self).session
        session.move_scales()
        packed = cls.state_dict(self)
        packed[_KEY] = {
            "precision": session.numerics.level,
            "dtype": session.numerics.compute,
            "scalers": [scaler.state_dict() for scaler in session.scalers],
        }
        return packed

    def load_state_dict(self: Optimizer, state_dict: dict[str, Any]) -> None:
        session = gradients_beside(self).session
        plain = {key: value for key, value in state_dict.items() if key != _KEY}
        cls.load_state_dict(self, plain)
        session.start_again()
        _load_scalers(session, state_dict.get(_KEY))

    def add_param_group(self: Optimizer, param_group: dict[str, Any]) -> None:
        masters = gradients_beside(self).session.masters
        if masters is None:
            cls.add_param_group(self, param_group)
            return
        param_group, new = masters.joining(param_group)
        cls.add_param_group(self, param_group)
        masters.join(self, new)

    def reduce(self: Optimizer, protocol: Any) -> Any:
        raise TypeError(
            "An accelerated optimizer cannot be copied or pickled: its master weights belong to the model. Accelerate "
            "a new pair and load this one's state_dict()."
        )

    return {
        "step": step, "zero_grad": zero_grad, "state_dict": state_dict, "load_state_dict": load_state_dict,
        "add_param_group": add_param_group, "__reduce_ex__": reduce,
    }  # fmt: skip


_STAND_INS = StandIns(_methods)


def _load_scalers(session: Session, stored: Mapping[str, Any] | None) -> None:
    if not session.scalers:
        return
    states = stored["scalers"] if stored else []
    if not states:
        _log.info("What was loaded was trained without a loss scale; it starts at its initial value.")
        return
    if len(states) != len(session.scalers):
        raise CheckpointError(
            f"The stored optimizer has {len(states)} loss scales, but accelerate was called for "
            f"{len(session.scalers)} losses; call accelerate(…, losses={len(states)})."
        )
    for scaler, state in zip(session.scalers, states):
        if scaler.dynamic:
            scaler.load_state_dict(state)
