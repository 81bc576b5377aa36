"""Names that weights had in older versions, and those of today."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.models.model import Model

OLD_NAMES = {"positions": "encoder.places.weight", "blocks.": "encoder.blocks."}
"""Beginnings of names that Vision Transformers had when they ran a loop of their own, with those of today."""
BIAS, CORRECTION = ".mlp.bias", ".mlp.correction"


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


def renamed(state: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """A state dict in today's names: `present_name` where it is one of such a model, and `with_corrections`."""
    if isinstance(model, Model) and model.graph.vision and "positions" in state:
        state = {present_name(name): value for name, value in state.items()}
    return with_corrections(state)


def with_corrections(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict with the biases of sigmoid routers as today, which once were int32 in units of 2⁻²⁴, not 2⁻⁵⁰."""
    old = [name for name in state if name.endswith(BIAS) and state[name].dtype == torch.int32]
    new = {name.removesuffix(BIAS) + CORRECTION: state[name].long() << 26 for name in old}
    return {name: tensor for name, tensor in state.items() if name not in old} | new
