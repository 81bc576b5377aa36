"""Names that weights had in older versions, and their current names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.models.model import Model

OLD_NAMES = {"positions": "encoder.places.weight", "blocks.": "encoder.blocks."}
"""Old prefixes of the names in Vision Transformers, from when these had their own class, with the current prefixes."""
BIAS, CORRECTION = ".mlp.bias", ".mlp.correction"


def present_name(name: str) -> str:
    """The current name of a Vision Transformer's parameter, from its old or current name."""
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
    """Patterns of part names, with old names replaced by `present_name` if the model is a Vision Transformer."""
    renamed = isinstance(model, Model) and model.graph.vision
    return [present_name(p) if renamed and isinstance(p, str) else p for p in patterns]


def renamed(state: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """A state dict in current names: `present_name` for a Vision Transformer, and `with_corrections`."""
    if isinstance(model, Model) and model.graph.vision and "positions" in state:
        state = {present_name(name): value for name, value in state.items()}
    return with_corrections(state)


def with_corrections(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict with the biases of sigmoid routers in units of 2⁻⁵⁰; old versions had int32 in units of 2⁻²⁴."""
    old = [name for name in state if name.endswith(BIAS) and state[name].dtype == torch.int32]
    new = {name.removesuffix(BIAS) + CORRECTION: state[name].long() << 26 for name in old}
    return {name: tensor for name, tensor in state.items() if name not in old} | new
