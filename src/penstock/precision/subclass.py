"""Subclasses that take the place of a module's or an optimizer's class without anybody's noticing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_CLASS: Any = object.__dict__["__class__"]


class _Quiet:
    """Stands first among the bases while a class is made, so that no `__init_subclass__` of the original's hears of it:
    registries keep the original, and what else such a hook asks for need not be known.
    """

    def __init_subclass__(cls, **_: Any) -> None:
        pass


class StandIns:
    """One stand-in for each class, made when it is first needed: a subclass that goes by the name of the original.

    `attributes(cls)` are what it has besides. An object's `__class__` stays the original, as pickle wants it that looks
    classes up by name; who assigns another one, as sharding and parametrizations do, gets a stand-in for that.
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
            shown = property(lambda _: original, lambda value, new: _CLASS.__set__(value, self._for(new)))
            names = {**kept, "__class__": shown, "_penstock_original": original, **self._attributes(cls)}
            made = type(cls.__name__, (_Quiet, cls), names)
            made.__bases__ = (cls,)
            made.__qualname__ = cls.__qualname__
            self._made[cls] = made
        return self._made[cls]
