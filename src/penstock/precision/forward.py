"""A model's forward pass under a `Precision`: the class is swapped for a subclass of the same name, so that state
dicts, `isinstance`, compilation and signatures stay as they are.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.precision.lists import region
from penstock.precision.settings import Precision
from penstock.precision.stored import adopt_weights, take_masters

_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


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
    model.__dict__["_penstock_precision"] = precision
    model.__class__ = _wrapping(type(model))


def unwrap_forward(model: nn.Module) -> None:
    """Undo `wrap_forward`."""
    if "_penstock_precision" in model.__dict__:
        model.__class__ = type(model).__mro__[1]
        del model.__dict__["_penstock_precision"]


def _wrapping(cls: type[nn.Module]) -> type[nn.Module]:
    if cls not in _CLASSES:
        _CLASSES[cls] = _subclass(cls)
    return _CLASSES[cls]


def _subclass(cls: type[nn.Module]) -> type[nn.Module]:
    original: Callable[..., Any] = cls.forward

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        precision: Precision = self.__dict__["_penstock_precision"]
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

    def reduce(self: nn.Module, protocol: Any) -> Any:
        # Pickle and copy look a class up by its name, which is the original's.
        adopt_weights(self)
        return _new, (cls,), self.__dict__.copy()

    def restore(self: nn.Module, state: dict[str, Any]) -> None:
        cls.__setstate__(self, state)  # type: ignore[no-untyped-call]
        if self.__dict__["_penstock_precision"].autocast:
            take_masters(self)  # no optimizer publishes them into a copy

    names = {
        "forward": forward,
        "__reduce_ex__": reduce,
        "__setstate__": restore,
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
    }
    made: type[nn.Module] = type(cls.__name__, (cls,), names)
    made.__qualname__ = cls.__qualname__
    return made


def _new(cls: type[nn.Module]) -> nn.Module:
    return cls.__new__(_wrapping(cls))


def _device_type(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value.device.type
    parameter = next(model.parameters(), None)
    return "cpu" if parameter is None else parameter.device.type


def _to(dtype: torch.dtype, value: Any) -> Any:
    """Floating tensors of a nest as `dtype`: tuples, lists, mappings and dataclasses keep their type and order."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() and value.dtype != torch.float64 else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_to(dtype, item) for item in value))
    if type(value) in (tuple, list):
        return type(value)(_to(dtype, item) for item in value)
    if type(value) is dict:
        return {key: _to(dtype, item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        items: Any = value
        if isinstance(items, Mapping):  # transformers' ModelOutput, whose absent fields are no items
            return type(items)(**{key: _to(dtype, item) for key, item in items.items()})
        changed = {f.name: _to(dtype, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **changed)
    return value
