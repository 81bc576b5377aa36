"""What a door is to the fuzz room."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

Case = tuple[str, bytes]
"""The name of the valid input that a case was made from, and the input."""


@dataclass(frozen=True, kw_only=True)
class Door:
    """One door, as `door_NAME.py` enrols it. README.md says how."""

    seeds: Callable[[], dict[str, bytes]]
    """Small valid inputs by name. Each must be let in as it is."""
    enter: Callable[[str, bytes], object]
    """Takes a case through the door: returns, or raises a PenstockError."""
    made: Callable[[], SearchStrategy[Case]] | None = None
    """Inputs that are well formed, and mean nonsense."""
    tokens: tuple[bytes, ...] = ()
    """Words of the format, which mutations insert."""
