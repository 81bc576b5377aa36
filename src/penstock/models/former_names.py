"""Names of parameters that Vision Transformers had when they ran a loop of their own, and those of today."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torch import nn

from penstock.models.model import Model

T = TypeVar("T")

OLD_NAMES = {"positions": "encoder.places.weight", "blocks.": "encoder.blocks."}
"""Beginnings of names that Vision Transformers had when they ran a loop of their own, with those of today."""


def present_name(name: str) -> str:
    """The name of a parameter of a Vision Transformer today."""
    for old, new in OLD_NAMES.items():
        if name == old or (old.endswith(".") and name.startswith(old)):
            return new + name.removeprefix(old)
    return name


def former_name(name: str) -> str:
    """The inverse of `present_name`."""
    for old, new in OLD_NAMES.items():
        if name == new or (new.endswith(".") and name.startswith(new)):
            return old + name.removeprefix(new)
    return name


def present_patterns(model: nn.Module, patterns: Sequence[Any]) -> list[Any]:
    """Patterns of names of parts with `present_name` in place of old names, where they are of such a model."""
    renamed = isinstance(model, Model) and model.graph.vision
    return [present_name(p) if renamed and isinstance(p, str) else p for p in patterns]


def renamed(state: Mapping[str, T], model: nn.Module) -> dict[str, T]:
    """A state dict with `present_name` in place of old names, where it is one of such a model."""
    if isinstance(model, Model) and model.graph.vision and "positions" in state:
        return {present_name(name): value for name, value in state.items()}
    return dict(state)
