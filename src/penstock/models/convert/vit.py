"""Names and shapes of a ViT's weights: Penstock's, transformers' and timm's.

Files of transformers carry the names of its version 4 (`vit.encoder.layer.0.attention.attention.query.weight`), and
version 5 still writes them, though its modules are named otherwise (`vit.layers.0.attention.q_proj.weight`). Both are
read; the former are written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.config.model import ViTConfig
from penstock.config.theirs.vit import require_representable
from penstock.errors import ConfigError
from penstock.models.anatomy import Anatomy, pruned
from penstock.models.convert.by_role import translate
from penstock.models.families import ours, timm, transformers
from penstock.models.roles import Head, placed

_TABLE = "encoder.places"
POSITIONS = f"{_TABLE}.weight"
"""The name of the weight of the table of positions."""
_TOKENS = ("class_token", "distil_token")


def to_hf(state: Mapping[str, Tensor], config: ViTConfig, *, modules: bool = False) -> dict[str, Tensor]:
    """Penstock's state dict as transformers' ViTForImageClassification is stored, or with the names of its `modules` in
    version 5. Raises ConfigError if it has no such model.
    """
    require_representable(config)
    names = [f"vit.{'layers' if modules else 'encoder.layer'}.{i}." for i in range(config.depth)]
    return translate(_outward(state, config), ours.anatomy(config.graph), _hf(names, config))


def from_hf(state: Mapping[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """A state dict of ViTForImageClassification or ViTModel, of either naming and with or without the prefix `vit.`,
    in Penstock's names and shapes.

    Positions keep the grid they were learned on; names that the model lacks are kept.
    """
    require_representable(config)
    state = {re.sub(r"^(?!vit\.|classifier\.)", "vit.", name): tensor for name, tensor in state.items()}
    return _inward(translate(state, pruned(_hf(state, config), state), ours.anatomy(config.graph)))


def _hf(names: Collection[str], config: ViTConfig) -> Anatomy:
    inside = {name.removeprefix("vit.") for name in names}
    (stack,) = placed(transformers.vit_stacks(inside, config.heads), "vit.")
    return Anatomy(family="hf_vit", stacks=(replace(stack, after=(*stack.after, Head("classifier"))),))


def to_timm(state: Mapping[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """Penstock's state dict in timm's names and shapes. Raises ConfigError where timm has no such model."""
    names = [f"blocks.{i}." for i in range(config.depth)]
    target = _timm(names, config)
    written = translate(_outward(state, config), ours.anatomy(config.graph), target)
    if config.classifier == "token" or config.pool_norm == "before":
        return written
    return {re.sub(r"^norm\.", "fc_norm.", name): tensor for name, tensor in written.items()}


def from_timm(state: Mapping[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """timm's state dict in Penstock's names and shapes; names that the model lacks are kept.

    Positions keep the grid they were learned on. Where timm's learned tokens have no positions (`no_embed_class`),
    they get such of zeros, which is the same model.
    """
    source = pruned(_timm(state, config), state)
    named = _inward(translate(state, source, ours.anatomy(config.graph)))
    positions = named.get(POSITIONS)
    if positions is not None and "class_token" in named and math.isqrt(len(positions)) ** 2 == len(positions):
        named[POSITIONS] = torch.cat([positions.new_zeros(1 + config.distilled, config.width), positions])
    return named


def _timm(names: Collection[str], config: ViTConfig) -> Anatomy:
    if config.stem != "patchify":
        raise ConfigError(
            "timm's VisionTransformer has no convolutional stem, so weights of model.stem 'conv' cannot take "
            "its names; save them in Penstock's own with save_pretrained."
        )
    if config.experts:
        raise ConfigError(
            "timm's VisionTransformer has no mixtures, so weights of model.experts cannot take its names; save them in "
            "Penstock's own with save_pretrained."
        )
    return Anatomy(family="timm_vit", stacks=(timm.vit_stack(names, config.heads),))


def _outward(state: Mapping[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """Tensors in the shapes of both libraries: a stem that convolves, and tokens and positions of one sample."""
    kernel = (config.width, config.channels, config.patch_size, config.patch_size)
    shapes = {
        "stem.proj.weight": kernel,
        POSITIONS: (1, -1, config.width),
        **dict.fromkeys(_TOKENS, (1, 1, -1)),
    }
    # Theirs are a parameter and not a table: the name of the table takes the place of its weight's.
    return {
        _TABLE if name == POSITIONS else name: tensor.reshape(shapes.get(name, tensor.shape))
        for name, tensor in state.items()
    }


def _inward(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `_outward`."""
    ends = {"stem.proj.weight": (4, (1, -1)), _TABLE: (3, (0, 1)), **dict.fromkeys(_TOKENS, (3, (0, -1)))}
    for name, (dimensions, _) in ends.items():
        if name in state and state[name].ndim != dimensions:
            raise ConfigError(
                f"The weights of {name} have the shape {tuple(state[name].shape)}, but {dimensions} dimensions are "
                f"stored. Use weights of transformers' ViT or of timm's VisionTransformer."
            )
    return {
        POSITIONS if name == _TABLE else name: tensor.flatten(*ends[name][1]) if name in ends else tensor
        for name, tensor in state.items()
    }


def resize_positions(positions: Tensor, tokens: int, *, learned: int, antialias: bool = True) -> Tensor:
    """Bicubic interpolation of (tokens', D) on its square grid to (tokens, D), in fp32.

    The rows of `learned` tokens, such as the class token, come first and are kept. `antialias` is what timm does;
    transformers interpolates without, and so does Penstock for weights that come from there.

    Raises ConfigError when either number of tokens is no square grid.
    """
    if positions.shape[0] == tokens:
        return positions
    old, new = (math.isqrt(max(n - learned, 0)) for n in (positions.shape[0], tokens))
    if not old or old * old + learned != positions.shape[0] or new * new + learned != tokens:
        raise ConfigError(
            f"Position embeddings of {positions.shape[0]} tokens cannot become {tokens}: less {learned} for learned "
            "tokens, both must be squares. Check that model.classifier and model.distilled are those the weights were "
            "trained with."
        )
    grid = positions[learned:].float().T.reshape(1, -1, old, old)
    grid = F.interpolate(grid, size=(new, new), mode="bicubic", align_corners=False, antialias=antialias)
    patches = grid.reshape(-1, new * new).T.to(positions.dtype)
    return torch.cat([positions[:learned], patches])
