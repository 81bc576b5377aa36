"""A model's forward pass under a `Precision`: the class is swapped for a subclass of the same name, so that state
dicts, `isinstance`, compilation and signatures stay as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.precision.copies import ModuleStandIns
from penstock.precision.lists import apply_modules, default_lists, region
from penstock.precision.nests import replaced
from penstock.precision.settings import Precision


def apply_precision(model: nn.Module, precision: Precision, device: torch.device) -> None:
    """From now on `model(…)` computes as `precision` says, in place: its modules follow the op lists, its inputs and
    outputs are cast. Weights stay what they are; names in the state dict too.
    """
    if precision.dtype is None:
        return
    if precision.autocast:
        precision = replace(precision, lists=precision.lists or default_lists(precision.dtype, device.type))
        apply_modules(model, precision.lists)
    wrap_forward(model, precision)


def unwrapped(model: nn.Module) -> nn.Module:
    """The module behind torch.compile and DistributedDataParallel."""
    while True:
        inner = model._modules.get("_orig_mod")
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


def wrap_forward(model: nn.Module, precision: Precision) -> None:
    """From now on `model(…)` computes as `precision` says, in place."""
    if "_penstock_precision" in model.__dict__:
        raise ConfigError(
            f"This {type(model).__name__} is already accelerated, as {model.__dict__['_penstock_precision'].level}; "
            "accelerate a fresh one, or load its state dict into one."
        )
    if "forward" in model.__dict__:
        raise ConfigError(
            f"The forward of this {type(model).__name__} was replaced on the instance, which hides the class's; "
            "accelerate the model before whatever replaces it."
        )
    _STAND_INS.take_off(model)  # made by `type(accelerated)(…)`
    model.__dict__["_penstock_precision"] = precision
    _STAND_INS.put_on(model)


def unwrap_forward(model: nn.Module) -> None:
    """Undo `wrap_forward`."""
    if "_penstock_precision" in model.__dict__:
        _STAND_INS.take_off(model)
        del model.__dict__["_penstock_precision"]


def _forward(cls: type[nn.Module]) -> dict[str, Any]:
    original: Callable[..., Any] = cls.forward

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        precision: Precision | None = self.__dict__.get("_penstock_precision")
        if precision is None:  # an instance that `type(accelerated)(…)` made is one of the original class
            return original(self, *args, **kwargs)
        if not precision.autocast and precision.dtype is not None:
            args = tuple(_to(precision.dtype, value) for value in args)
            kwargs = {key: _to(precision.dtype, value) for key, value in kwargs.items()}
        if precision.autocast:
            assert precision.dtype is not None
            place = _device_type(self, args, kwargs)
            with (
                torch.autocast(place, dtype=precision.dtype),
                region(precision.lists, place, precision.dtype),
            ):
                output = original(self, *args, **kwargs)
        else:
            output = original(self, *args, **kwargs)
        return _to(torch.float32, output) if precision.outputs == "fp32" else output

    return {"forward": forward}


_STAND_INS = ModuleStandIns(_forward)


def _device_type(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value.device.type
    parameter = next(model.parameters(), None)
    return "cpu" if parameter is None else parameter.device.type


def _to(dtype: torch.dtype, value: Any) -> Any:
    """Floating tensors of a nest as `dtype`; fp64 stays."""

    def cast(tensor: Tensor) -> Tensor:
        wanted = tensor.is_floating_point() and tensor.dtype != torch.float64
        return tensor.to(dtype) if wanted else tensor

    return replaced(value, cast)
