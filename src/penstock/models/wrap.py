"""Wrappers around a module, and their order; `show` prints them.

A call of a module passes, from the outside in: torch's own layers (shards, compiled code, hooks), the wrappers that
`put_around` put around its forward, in the reverse of `ORDER`, and the classes that `swap` laid over its own, the last
one first. `exchange` replaces a module as a whole. Names in a model's state dict do not change.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any, ClassVar, TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)
A = TypeVar("A", bound="Around")

_LAID = "penstock_laid"
"""Attribute of a class made by `_class_over`: its `kind`."""
ORDER = ("samples of an expert", "one call", "stages", "recomputation", "offload")
"""Kinds of `Around`, from the inside out: recomputation happens outside the selection of an expert's samples, and
inputs that a recomputed block keeps are offloaded."""


class Around:
    """A callable around a module's forward. A class, so that a model with it can be pickled and copied."""

    kind: ClassVar[str]

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward
        functools.update_wrapper(self, forward, updated=())  # a wrapper inside has fields of its own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def arounds(module: nn.Module) -> list[Around]:
    """The callables around a module's forward, from the outside in."""
    around, forward = [], module.__dict__.get("forward")
    while isinstance(forward, Around):
        around.append(forward)
        forward = forward.forward
    return around


def find(module: nn.Module, kind: type[A]) -> A | None:
    """The wrapper of this kind around a module's forward, if any."""
    return next((one for one in arounds(module) if isinstance(one, kind)), None)


def put_around(module: nn.Module, around: Around) -> None:
    """Let `around`, which was made from the module's forward, be called in its place."""
    assert all(ORDER.index(one.kind) <= ORDER.index(around.kind) for one in arounds(module))
    module.forward = around


def take_off(module: nn.Module, around: Around) -> None:
    """Undo `put_around`, even if more wrappers were added since."""
    outside: Any = next((one for one in arounds(module) if one.forward is around), module)
    outside.forward = around.forward


def set_class(module: M, cls: type) -> M:
    """Change a module's class; wrappers around its forward then call the forward of the new class."""
    module.__class__ = cls
    if chain := arounds(module):
        chain[-1].forward = MethodType(type(module).forward, module)
    return module


@functools.cache
def _class_over(kind: Any, base: Any) -> Any:
    """A subclass of `kind` and `base` with the name of `base`."""

    def as_base(module: Any, call: Callable[[], Any]) -> Any:
        laid = type(module)
        set_class(module, base)
        try:
            return call()
        finally:
            set_class(module, laid)

    def copied(module: Any, call: Callable[[], Any]) -> Any:
        laid = type(module)
        return set_class(as_base(module, call), laid)

    def reduced(module: Any, protocol: Any) -> Any:
        # From protocol 2 on, pickle requires that the class it writes is the module's, which is not `base`.
        return as_base(module, lambda: module.__reduce_ex__(min(protocol, 1)))

    methods = {  # a copy has the class too; a pickle is the plain module, which loads without Penstock
        "__reduce_ex__": reduced,
        "__copy__": lambda module: copied(module, lambda: copy.copy(module)),
        "__deepcopy__": lambda module, memo: copied(module, lambda: copy.deepcopy(module, memo)),
    }
    named = {"__module__": base.__module__, "__qualname__": base.__qualname__, _LAID: kind}
    return type(base.__name__, (kind, base), {**methods, **named})


def swap(module: M, kind: type) -> M:
    """Lay `kind` over a module's class, once: `kind` calls that class by `super()`. The classes of
    `penstock.precision.copies` stay outside."""
    base: Any = module.__class__
    return module if isinstance(module, kind) else set_class(module, _class_over(kind, base))


def class_under(module: nn.Module, kind: type) -> Any:
    """The class of a module as it was before a subclass of `kind` was laid over it."""
    laid = [cls for cls in type(module).__mro__ if issubclass(vars(cls).get(_LAID, object), kind)]
    return laid[-1].__bases__[1] if laid else type(module)


def restore(model: nn.Module, kind: type) -> None:
    """Undo `swap` of subclasses of `kind` in all modules of a model, where they were the last to be swapped in."""
    for module in model.modules():
        while issubclass(vars(module.__class__).get(_LAID, object), kind):
            set_class(module, module.__class__.__bases__[1])


def exchange(model: nn.Module, instead: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Replace the modules of these names; returns the former modules, which undo it when passed to `exchange`."""
    before = {name: model.get_submodule(name) for name in instead}
    for name, module in instead.items():
        model.set_submodule(name, module)
    return before


@contextmanager
def exchanged(model: nn.Module, instead: Mapping[str, nn.Module]) -> Iterator[None]:
    """Inside, the model has other modules under these names."""
    before = exchange(model, instead)
    try:
        yield
    finally:
        exchange(model, before)


def show(model: nn.Module) -> str:
    """One line for each module that has wrappers: its name, its class, and its wrappers from the inside out."""
    lines = []
    for name, module in model.named_modules():
        laid = [vars(cls)[_LAID].__name__ for cls in reversed(type(module).__mro__) if _LAID in vars(cls)]
        hooks = len(module._forward_pre_hooks) + len(module._forward_hooks)
        words = [*laid, *(one.kind for one in reversed(arounds(module)))]
        words += [f"{hooks} hooks"] * (hooks > 0) + ["compiled"] * (module._compiled_call_impl is not None)
        if words:
            lines.append(f"{name or '(model)'}: {type(module).__name__}, {', '.join(words)}")
    return "\n".join(lines)
