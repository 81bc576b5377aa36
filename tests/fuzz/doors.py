"""What a door is, and which doors each module describes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

Case = tuple[str, bytes]
"""The name of the valid input that a case was made from, and the input."""


@dataclass(frozen=True, kw_only=True)
class Door:
    """One door. README.md says how to enrol it."""

    seeds: Callable[[], dict[str, bytes]]
    """Small valid inputs by name. Each must be let in as it is."""
    enter: Callable[[str, bytes], object]
    """Takes a case through the door: returns, or raises a PenstockError."""
    made: Callable[[], SearchStrategy[Case]] | None = None
    """Inputs that are well formed, and mean nonsense."""
    tokens: tuple[bytes, ...] = ()
    """Words of the format, which mutations insert."""


MODULES = {
    "files": ("files", "tar"), "images": ("images", "image_folder"), "checkpoint": ("checkpoint", "sealed"),
    "pack": ("pack", "tokens"), "model": ("tensors", "model", "text_model", "model_config"),
    "config": ("settings", "plan_line", "machine", "messages"), "options": ("options",), "text": ("text", "tokenizer"),
}  # fmt: skip
DOORS = tuple(door for doors in MODULES.values() for door in doors)


def load(name: str) -> Door:
    """The door of that name."""
    (module,) = (module for module, doors in MODULES.items() if name in doors)
    doors: dict[str, Door] = importlib.import_module(f"fuzz.door_{module}").DOORS
    return doors[name]
