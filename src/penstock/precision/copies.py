"""Copies and pickles of accelerated models.

A copy is accelerated as its original is. A pickle, and what `torch.save` writes of a whole model, is the plain model
in fp32: it loads where there is no Penstock, and under `torch.serialization.safe_globals`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from penstock.containers import tensors
from penstock.precision.state_hooks import (
    Fp32State,
    HalfWeight,
    adopt_weights,
    fp32_state_of,
    is_half,
    own_buffers,
    own_parameters,
    remove_hooks,
    take_masters,
)
from penstock.precision.subclass import StandIns, asked_by
from penstock.products.convert import restore_linears

_KINDS: list[ModuleStandIns] = []
"""Every kind of stand-in that modules may wear."""


class ModuleStandIns(StandIns):
    """Stand-ins for the classes of modules, whose copies and pickles are as the head of this file says."""

    def __init__(self, attributes: Callable[[Any], dict[str, Any]]) -> None:
        def with_copies(cls: type[nn.Module]) -> dict[str, Any]:
            return {
                **attributes(cls),
                "__deepcopy__": property(lambda module: self._copier(module, cls, by_name=asked_by("copy"))),
                "__copy__": lambda module: self._copied(module, lambda: copy.copy(module)),
                "__reduce_ex__": lambda module, protocol: plain(module).__reduce_ex__(protocol),
            }

        super().__init__(with_copies)
        _KINDS.append(self)

    def _copier(self, module: nn.Module, cls: type[nn.Module], *, by_name: bool) -> Any:
        """The module's `__deepcopy__` where copy.deepcopy asks for it. A wrapper that forwards what it lacks to this
        module, as PEFT's do, must not take it for its own.
        """
        if by_name:
            return functools.partial(self._deep, module)
        own: Any = getattr(cls, "__deepcopy__", None)
        if own is None:
            raise AttributeError("__deepcopy__")
        return own.__get__(module)

    def _deep(self, module: nn.Module, memo: dict[int, Any]) -> nn.Module:
        adopt_weights(module)
        copied = self._copied(module, lambda: copy.deepcopy(module, memo))
        precision = copied.__dict__.get("_penstock_precision")
        if precision is not None and precision.autocast:
            take_masters(copied)  # no optimizer publishes them into a copy
        return copied

    def _copied(self, module: nn.Module, make: Callable[[], nn.Module]) -> nn.Module:
        # The original's own ways of being copied, `__getstate__` above all, are those of its own class.
        self.take_off(module)
        try:
            copied = make()
        finally:
            self.put_on(module)
        if any(key.startswith("_penstock") for key in copied.__dict__):
            self.put_on(copied)
        return copied


@torch.no_grad()
def plain(model: nn.Module) -> nn.Module:
    """A model as it would be without Penstock: plain classes, fp32 weights, none of our hooks.

    Weights that are fp32 already, and master weights, are shared with the model and not copied.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        stored = fp32_state_of(module)
        for _, value in (*own_parameters(module), *own_buffers(module)):
            memo[id(value)] = _fp32(value, stored)
        for value in tensors(list(vars(module).values())):
            memo.setdefault(id(value), value)  # copy refuses those that autograd has made
        if stored is not None:
            memo[id(stored)] = Fp32State(stored.dtype)
    twin = copy.deepcopy(model, memo)
    strip(twin)
    return twin


def strip(model: nn.Module) -> None:
    """Take everything off a model that Penstock has put on it, but for the type of its weights."""
    for module in model.modules():
        for kind in reversed(_KINDS):
            kind.take_off(module)
        remove_hooks(module)
        for mark in [name for name in module.__dict__ if name.startswith("_penstock")]:
            del module.__dict__[mark]
    restore_linears(model)


@torch.no_grad()
def widen(model: nn.Module) -> None:
    """Give a model its fp32 weights back, in place: the masters where there are any, which optimizers hold."""
    widened: dict[int, Tensor] = {}
    for module in model.modules():
        stored = fp32_state_of(module)
        if stored is None:
            continue
        for key, weight in own_parameters(module):
            if not is_half(weight):
                continue
            if weight in stored.masters or isinstance(weight, HalfWeight):
                if id(weight) not in widened:
                    stored.fp32(weight)  # takes over what was written to it
                    widened[id(weight)] = (
                        stored.masters[weight] if weight in stored.masters else _fp32(weight, stored)
                    )
                setattr(module, key, widened[id(weight)])
            else:  # the optimizer holds this very parameter
                weight.grad = None
                weight.data = stored.fp32(weight)
        for key, buffer in own_buffers(module):
            if buffer.dtype == stored.dtype:
                setattr(module, key, buffer.float())


def _fp32(value: Tensor, stored: Fp32State | None) -> Tensor:
    if stored is None or not is_half(value):
        return value
    wide = stored.fp32(value)
    if isinstance(value, Parameter):
        wide = Parameter(wide, requires_grad=value.requires_grad)
    wide.__dict__.update({key: v for key, v in value.__dict__.items() if not key.startswith("_penstock")})
    return wide
