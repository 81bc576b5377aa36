"""Subclasses that take the place of a module's or an optimizer's class without anybody's noticing."""

from __future__ import annotations

from typing import Any, TypeVar

C = TypeVar("C")


class _Quiet:
    """Stands first among the bases while a class is made, so that no `__init_subclass__` of the original's hears of it:
    registries keep the original, and what else such a hook asks for need not be known.
    """

    def __init_subclass__(cls, **_: Any) -> None:
        pass


def stand_in(cls: type[C], names: dict[str, Any]) -> type[C]:
    """A subclass of `cls` that goes by its name, with these attributes. The original is the second of its `__mro__`."""
    kept = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    made: type[C] = type(cls.__name__, (_Quiet, cls), {**kept, **names})
    made.__bases__ = (cls,)
    made.__qualname__ = cls.__qualname__
    return made


def blank(cls: type[C]) -> C:
    """An instance whose state is yet to be set: what pickle makes of one whose class stood in."""
    return cls.__new__(cls)
