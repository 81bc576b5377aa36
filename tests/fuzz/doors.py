"""Which doors there are. Each is enrolled by its name here and described in `door_NAME.py`."""

from __future__ import annotations

import importlib

from fuzz.door import Door

DOORS = (
    "files", "tar", "images", "image_folder", "tensors", "sealed", "checkpoint", "pack", "model",
    "text_model", "settings", "plan_line", "machine", "model_config", "messages", "options", "text", "tokens",
    "tokenizer",
)  # fmt: skip


def load(name: str) -> Door:
    """The door of that name. Only its own module is imported."""
    door: Door = importlib.import_module(f"fuzz.door_{name}").DOOR
    return door
