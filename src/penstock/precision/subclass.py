"""Subclasses that take the place of a module's or an optimizer's class and look like it from outside."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

_CLASS: Any = object.__dict__["__class__"]


class _Quiet:
    """The first base of a class while it is made, so that the original's `__init_subclass__` is not called: registries
    of classes keep the original, and arguments that such a hook needs are not missing.
    """

    def __init_subclass__(cls, **_: Any) -> None:
        pass


class StandIns:
    """One stand-in for each class, made when it is first needed: a subclass that goes by the name of the original.

    `attributes(cls)` are its own methods. An object's `__class__` still reads as the original, which pickle looks up by
    name. torch.compile alone reads the stand-in where it looks up methods. Code that assigns another class, as
    sharding and parametrizations do, gets a stand-in for that class.
    """

    def __init__(self, attributes: Callable[[Any], dict[str, Any]]) -> None:
        self._attributes = attributes
        self._made: dict[type, type] = {}

    def put_on(self, value: Any) -> None:
        """Let a stand-in take the place of an object's class."""
        _CLASS.__set__(value, self._for(type(value)))

    def take_off(self, value: Any) -> None:
        """Give an object its original class back; nothing happens where it has that."""
        if self.on(value):
            _CLASS.__set__(value, type(value).__mro__[1])

    def on(self, value: Any) -> bool:
        """Whether an object's class is one of these stand-ins."""
        kind = type(value)
        return self._made.get(kind.__mro__[1]) is kind if len(kind.__mro__) > 1 else False

    def _for(self, cls: type) -> type:
        if cls not in self._made:
            kept = {"__module__": cls.__module__, "__doc__": cls.__doc__}
            original = vars(cls).get("_penstock_original", cls)  # one may stand in for another
            shown = property(
                lambda value: (
                    type(value)
                    if not torch.compiler.is_dynamo_compiling() and asked_by(*_METHODS_IN_DYNAMO)
                    else original
                ),
                lambda value, new: _CLASS.__set__(value, self._for(new)),
            )
            names = {**kept, "__class__": shown, "_penstock_original": original, **self._attributes(cls)}
            made = type(cls.__name__, (_Quiet, cls), names)
            made.__bases__ = (cls,)
            made.__qualname__ = cls.__qualname__
            self._made[cls] = made
        return self._made[cls]


_METHODS_IN_DYNAMO = "torch._dynamo", "lookup_class_mro_attr"
"""Where torch.compile looks up an object's methods. Elsewhere it must read what compiled code will read."""


def asked_by(package: str, function: str = "") -> bool:
    """Whether code of a package, or a function of it, reads the property whose own function calls this."""
    frame = sys._getframe(2)
    own = str(frame.f_globals.get("__name__")).startswith(package)
    return own and function in ("", frame.f_code.co_name)
