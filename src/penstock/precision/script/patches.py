"""Changing attributes of other people's classes and modules, and changing them back."""

from __future__ import annotations

from typing import Any

_ABSENT = object()


class Patches:
    """Attributes that were replaced, with what they were before."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute that `owner` itself defines, or hide one that it inherits."""
        self._before.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def __contains__(self, name: str) -> bool:
        return any(name == replaced for _, replaced, _ in self._before)

    def undo(self) -> None:
        """Everything as it was, last change first."""
        while self._before:
            owner, name, value = self._before.pop()
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
