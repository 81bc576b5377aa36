"""Functions of one's own, and of other libraries, on the op lists: decorators, and registration by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from types import ModuleType
from typing import Any, TypeVar

import torch

from penstock.config.convert import nearest
from penstock.errors import ConfigError
from penstock.precision.lists.mode import cast, chosen_type, device_type_of

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__penstock_policy__"


def half_function(function: F) -> F:
    """Inside an accelerated forward pass (where autocast is on for its tensors' device), `function` gets its floating
    tensors in the half type. Elsewhere it is as it was.
    """
    return _wrapped(function, "half")


def fp32_function(function: F) -> F:
    """Inside an accelerated forward pass, `function` gets its floating tensors in fp32 and runs without autocast, so
    that all it does is in fp32. Elsewhere it is as it was.
    """
    return _wrapped(function, "fp32")


def promote_function(function: F) -> F:
    """Inside an accelerated forward pass, `function` gets floating tensors of several types in the widest of them."""
    return _wrapped(function, "promote")


class Registration(ExitStack):
    """A function replaced in its module; `remove()`, or the end of a `with` block, puts it back."""

    def remove(self) -> None:
        """Put the function back as it was."""
        self.close()


def register_half_function(owner: ModuleType | type, name: str) -> Registration:
    """Make `owner.name`, a function of another library's module or a method of its class, a `half_function`.

    What was imported from there before (`from library import function`) stays as it was. Raises ConfigError when there
    is no such function, or when it is one of torch's, which belong in an `OpLists`.
    """
    return _registered(owner, name, "half")


def register_fp32_function(owner: ModuleType | type, name: str) -> Registration:
    """Make `owner.name` an `fp32_function`; see `register_half_function`."""
    return _registered(owner, name, "fp32")


def register_promote_function(owner: ModuleType | type, name: str) -> Registration:
    """Make `owner.name` a `promote_function`; see `register_half_function`."""
    return _registered(owner, name, "promote")


def _registered(owner: ModuleType | type, name: str, policy: str) -> Registration:
    where = owner.__name__
    original = getattr(owner, name, None)
    if not callable(original):
        raise ConfigError(f"{where} has no function {name!r}.{nearest(name, dir(owner))}")
    if where == "torch" or where.startswith("torch."):
        raise ConfigError(
            f"{where}.{name} belongs to torch, which all models of the process share; list it for one model with "
            f"OpLists.with_({policy}=[{f'{where}.{name}'!r}])."
        )
    before = getattr(original, _MARK, policy)
    if before != policy:
        raise ConfigError(
            f"{where}.{name} is already registered as a {before} function; remove() that registration first."
        )
    # A class's own entry, since getattr would strip a staticmethod.
    stored = vars(owner).get(name, original)
    if isinstance(stored, staticmethod | classmethod):
        replaced: Any = type(stored)(_wrapped(stored.__func__, policy))
    else:
        replaced = _wrapped(original, policy)
    registration = Registration()
    registration.callback(setattr, owner, name, stored)
    setattr(owner, name, replaced)
    return registration


def _wrapped(function: F, policy: str) -> F:
    if getattr(function, _MARK, None) == policy:
        return function

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        device = device_type_of((args, kwargs))
        if device is None or not torch.is_autocast_enabled(device):
            return function(*args, **kwargs)
        to = chosen_type(policy, (args, kwargs), device, torch.get_autocast_dtype(device))
        if to is not None:
            args, kwargs = cast((args, kwargs), to, device)
        with torch.autocast(device, enabled=False) if policy == "fp32" else nullcontext():
            return function(*args, **kwargs)

    setattr(wrapper, _MARK, policy)
    return wrapper  # type: ignore[return-value]
