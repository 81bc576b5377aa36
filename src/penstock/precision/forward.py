"""A model's forward pass, and its other public methods, in the types of its `Numerics`.

The class is swapped for a subclass of the same name, so that state dicts, `isinstance`, compilation and signatures stay
as they are.
"""

from __future__ import annotations

import functools
import gc
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from penstock.config.numerics import Numerics
from penstock.containers import replaced
from penstock.errors import ConfigError
from penstock.models.anatomy import uncompiled
from penstock.precision.copies import ModuleStandIns, plain
from penstock.precision.lists import apply_modules, default_lists, region
from penstock.precision.lists.mode import device_type_of
from penstock.precision.settings import half_type

M = TypeVar("M", bound=nn.Module)
_KEY = "_penstock_precision"
_INSIDE = "_penstock_inside"
_ORIGINAL = "_penstock_original"
"""Attribute of a wrapped instance method: the method that was bound before."""
_PARALLEL = (nn.parallel.DistributedDataParallel, nn.DataParallel)
_LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")
_FRAMEWORKS = ("torch", *_LIGHTNING)
_OF_TYPES = re.compile(r"same dtype|expected .*(type|dtype)|should be the same", re.IGNORECASE)
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def apply_precision(model: nn.Module, numerics: Numerics, device: torch.device) -> None:
    """Make `model(…)` compute as `numerics` say, in place: its modules follow the op lists, its inputs and outputs are
    cast. Weights and the state dict's names do not change.
    """
    half = half_type(numerics)
    if half is None:
        return
    if model.__dict__.get(_KEY) is not None and numerics.weights == "fp32":
        unwrap_forward(model)  # fp32 weights take any number of optimizers
    if numerics.by_lists:
        numerics = replace(numerics, lists=numerics.lists or default_lists(half, device.type))
        apply_modules(model, numerics.lists)
    wrap_forward(model, numerics)


def precision_on(model: nn.Module) -> Numerics | None:
    """The types that `apply_precision` gave a model; None where it was not applied."""
    return model.__dict__.get(_KEY)


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside torch.compile, DistributedDataParallel and DataParallel."""
    while True:
        inner = model.module if isinstance(model, _PARALLEL) else uncompiled(model)
        if inner is model:
            return model
        model = inner


def living(kind: type[M]) -> Iterator[M]:
    """The live modules of a class in this process; takes some tens of milliseconds."""
    for alive in gc.get_objects():
        if issubclass(type(alive), kind):  # isinstance would ask objects that pretend to be of other classes
            try:
                next(alive.children(), None)
            except AttributeError:  # its `__init__` has not run
                continue
            yield alive


def replaced_forward(model: nn.Module) -> Callable[..., Any] | None:
    """The function that replaces a model's forward on the instance and would bypass its precision; None if the class's
    own is called, or a method bound to the model, as by TRL for its loss."""
    forward = model.__dict__.get("forward")
    bound = isinstance(forward, MethodType) and forward.__self__ is model
    return (
        None if bound and "_original_forward" not in model.__dict__ else forward
    )  # which is Accelerate's mark


def redirected(model: nn.Module) -> bool:
    """Whether Lightning redirects this call of a model to a step of its module, such as `training_step`."""
    module = getattr(replaced_forward(model), "__module__", None) or ""
    return module.partition(".")[0] in _LIGHTNING


def wrap_forward(model: nn.Module, numerics: Numerics) -> None:
    """Make `model(…)` and the methods of its class compute as `numerics` say, in place."""
    before: Numerics | None = model.__dict__.get(_KEY)
    if before is not None and not before.weights == numerics.weights == "fp32":
        raise ConfigError(already(model))
    if replaced_forward(model) is not None:
        raise ConfigError(
            f"The forward of this {type(model).__name__} was replaced on the instance, which hides the class's; "
            "accelerate the model before whatever replaces it."
        )
    # A method on the instance would hide the stand-in's: the class's own is removed, any other one is wrapped.
    bound = model.__dict__.pop("forward", None)
    if bound is not None and bound.__func__ is not type(model).forward:
        original = getattr(bound, _ORIGINAL, bound.__func__)
        entered = _entered(original, always=True)
        setattr(entered, _ORIGINAL, original)
        model.__dict__["forward"] = MethodType(entered, model)
    _STAND_INS.take_off(model)  # of an earlier optimizer, or made by `type(accelerated)(…)`
    model.__dict__[_KEY] = numerics
    model.__dict__[_INSIDE] = _Inside()
    _STAND_INS.put_on(model)


def already(model: nn.Module) -> str:
    """Why a model with half weights cannot be accelerated again, and what to do."""
    return (
        f"This {type(model).__name__} is already accelerated, as {model.__dict__[_KEY].level}. For another phase of "
        "training with a new optimizer call `penstock.precision.restore(model, optimizer)` with the old one: the "
        "weights are fp32 again, and the new optimizer is made over them."
    )


def unwrap_forward(model: nn.Module) -> None:
    """Undo `wrap_forward`."""
    if _KEY in model.__dict__:
        _STAND_INS.take_off(model)
        del model.__dict__[_KEY], model.__dict__[_INSIDE]
        if (original := getattr(model.__dict__.get("forward"), _ORIGINAL, None)) is not None:
            model.__dict__["forward"] = MethodType(original, model)


class _Inside:
    """Number of a model's own methods that are running. Set on the instance from the start: torch.compile recompiles if
    a field appears later."""

    def __init__(self) -> None:
        self.depth = 0


def _methods(cls: type[nn.Module]) -> dict[str, Any]:
    """The wrapped methods of a model: `forward`, and the public methods of its class."""
    methods = {name: _entered(function, always=False) for name, function in _own_methods(cls)}
    if str(cls.__call__.__module__).partition(".")[0] not in _FRAMEWORKS:
        methods["__call__"] = _entered(cls.__call__, always=False)
    methods["forward"] = _entered(cls.forward, always=True, counts=bool(methods))
    if hasattr(cls, "save_pretrained"):
        # Hugging Face's method, which writes the weights' type along with a state dict.
        methods["save_pretrained"] = _of_the_plain_model(cls.save_pretrained)
    return methods


def _own_methods(cls: type[nn.Module]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The public methods that a class or its bases define, except those of torch and of Lightning, whose own loop
    handles precision. Generators are left out, because their code runs after the call has returned.
    """
    skipped = set(dir(nn.Module))
    for base in reversed(cls.__mro__):
        framework = base.__module__.partition(".")[0] in _FRAMEWORKS
        for name, function in vars(base).items():
            if framework and name not in _STEPS:
                skipped.add(name)
            later = inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function)
            plainly = isinstance(function, FunctionType) and not later and not name.startswith("_")
            if plainly and name not in skipped and getattr(cls, name) is function:
                yield name, function


def _entered(original: Callable[..., Any], *, always: bool, counts: bool = True) -> Callable[..., Any]:
    """A method that computes in the model's precision; unless `always`, only if it is called from outside the model. If
    only `forward` is wrapped, calls need not be counted.
    """

    @functools.wraps(original)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        numerics: Numerics | None = self.__dict__.get(_KEY)
        # An instance made by `type(accelerated)(…)` behaves as the original class.
        if numerics is None or (not always and self.__dict__[_INSIDE].depth):
            return original(self, *args, **kwargs)
        if not counts:
            return _to(numerics.outputs, _computed(self, numerics, original, args, kwargs))
        inside: _Inside = self.__dict__[_INSIDE]
        inside.depth += 1
        try:
            output = _computed(self, numerics, original, args, kwargs)
        finally:
            inside.depth -= 1
        # Methods may return weights, which must not be cast.
        return _to(numerics.outputs, output, but=() if always else Parameter)

    return method


def _computed(
    model: nn.Module, numerics: Numerics, original: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    half = half_type(numerics)
    if half is None:
        return original(model, *args, **kwargs)
    if not numerics.by_lists:
        args = tuple(_to(half, value) for value in args)
        kwargs = {key: _to(half, value) for key, value in kwargs.items()}
        try:
            return original(model, *args, **kwargs)
        except RuntimeError as error:
            if not _OF_TYPES.search(str(error)):
                raise
            raise ConfigError(
                f"{error} In {numerics.level} operations run in the type of their arguments, and weights are "
                f"{numerics.weights}: make tensors inside the model in the type of its inputs, as "
                "torch.zeros(…, dtype=x.dtype) does, or use O2, whose op lists cast them."
            ) from error
    place = device_type_of((args, kwargs)) or device_type_of(next(model.parameters(), None)) or "cpu"
    with torch.autocast(place, dtype=half), region(numerics.lists, place, half):
        return original(model, *args, **kwargs)


def _of_the_plain_model(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return original(plain(self), *args, **kwargs)

    return method


_STAND_INS = ModuleStandIns(_methods)


def _to(dtype: torch.dtype | str, value: Any, but: Any = ()) -> Any:
    """A nested structure with its floating tensors cast to `dtype` (unchanged if that is "keep"); fp64 stays."""
    if dtype == "keep":
        return value
    target = torch.float32 if dtype == "fp32" else dtype

    def cast(tensor: Tensor) -> Tensor:
        stays = not tensor.is_floating_point() or tensor.dtype == torch.float64 or isinstance(tensor, but)
        return tensor if stays else tensor.to(target)

    return replaced(value, cast)
