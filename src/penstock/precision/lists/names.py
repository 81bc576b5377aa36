"""From the name of an operation to every function by which it can be called, and back.

`torch.nn.functional.softmax`, `torch.softmax`, `torch.Tensor.softmax` and `torch.special.softmax` are one operation,
and so are `torch.matmul` and `@`: a list that names one names all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import get_overridable_functions, resolve_name

from penstock.config.convert import nearest
from penstock.errors import ConfigError

Function = Callable[..., Any]

# The places in which one operation goes by one last name. torch.linalg and torch.fft have names of their own.
_ALIKE = ("torch.nn.functional", "torch", "torch.Tensor", "torch.special")
# Contents of torch.ops: operations, and their variants by the types of arguments.
_PACKET, _OVERLOAD = type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor)
_OPERATORS = {
    "add": ("__add__", "__radd__"),
    "sub": ("__sub__", "__rsub__"),
    "mul": ("__mul__", "__rmul__"),
    "div": ("__div__", "__rdiv__", "__truediv__", "__rtruediv__"),
    "matmul": ("__matmul__", "__rmatmul__"),
    "pow": ("__pow__", "__rpow__"),
}


def functions_of(name: str) -> frozenset[Function]:
    """Every function that calls the operation of this dotted name, for example "torch.softmax".

    Raises ConfigError when there is no such operation of torch, or when it is no function that torch lets others watch.
    """
    functions = frozenset(function for full in _aliases(name) if (function := _lookup(full)) is not None)
    if not functions:
        raise ConfigError(_unknown(name))
    return functions


def name_of(function: Function | str) -> str:
    """The one name that stands for an operation in a list, whichever of its functions or names is given.

    Raises ConfigError for what is no operation of torch; the message says how such a function is listed.
    """
    if isinstance(function, str):
        functions_of(function)
        return _canonical(function)
    if isinstance(function, _PACKET):
        return f"torch.ops.{str(function).replace('::', '.')}"
    name = resolve_name(function) if function in _watchable() else None
    if not name:
        what = getattr(function, "__qualname__", repr(function))
        module = getattr(function, "__module__", None)
        raise ConfigError(
            f"{what} is no operation of torch, so torch cannot tell when it is called. Decorate it with half_function, "
            f"fp32_function or promote_function from penstock.precision.lists, or, where it is not yours, write "
            f"register_half_function({module or 'its_module'}, {getattr(function, '__name__', 'name')!r})."
        )
    return _canonical(name)


@functools.cache
def _watchable() -> frozenset[Function]:
    """Every function that a TorchFunctionMode sees."""
    return frozenset(function for group in get_overridable_functions().values() for function in group)


@functools.cache
def _canonical(name: str) -> str:
    """The first of the alike places that has the operation: torch.softmax becomes torch.nn.functional.softmax."""
    return next((full for full in _aliases(name) if _lookup(full) is not None), name)


def _aliases(name: str) -> tuple[str, ...]:
    place, _, last = name.rpartition(".")
    if place == "torch.functional":  # where torch itself keeps some of what it shows as torch.einsum
        place = "torch"
    if place not in _ALIKE:
        return (name,)
    for operation, operators in _OPERATORS.items():
        if last in operators:
            last = operation
    operators = tuple(f"torch.Tensor.{operator}" for operator in _OPERATORS.get(last, ()))
    return tuple(f"{place}.{last}" for place in _ALIKE) + operators


@functools.cache
def _lookup(name: str) -> Function | None:
    """The function of a dotted name, if it is one that a mode sees."""
    first, *rest = name.split(".")
    if first != "torch":
        return None
    resolved: Any = torch
    for part in rest:
        try:
            resolved = getattr(resolved, part)
        except (AttributeError, RuntimeError):  # torch.ops raises RuntimeError of its own for some names
            return None
    if isinstance(resolved, _PACKET | _OVERLOAD):
        return resolved
    return resolved if callable(resolved) and resolved in _watchable() else None


def _unknown(name: str) -> str:
    last = name.rpartition(".")[2]
    names = {full for function in _watchable() if (full := resolve_name(function))}
    close = sorted(full for full in names if full.rpartition(".")[2] == last)
    hint = f" Did you mean {' or '.join(close[:3])}?" if close else nearest(name, sorted(names))
    if not name.startswith("torch."):
        return (
            f"{name!r} is no operation of torch, and lists of operations name only those.{hint} For a function of your "
            "own or of another library use the decorators half_function, fp32_function and promote_function, or "
            "register_half_function(module, name) and its like, from penstock.precision.lists."
        )
    return f"There is no operation {name!r} that torch lets others watch.{hint}"
