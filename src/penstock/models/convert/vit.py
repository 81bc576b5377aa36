"""Names and shapes of a ViT's weights: Penstock's, transformers' and timm's, by tables like those of text models.

transformers' files have the names of its version 4 (`vit.encoder.layer.0.attention.attention.query.weight`), and
version 5 still writes them, though its modules have other names (`vit.layers.0.attention.q_proj.weight`). Both are
read; the former are written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.config.model import ViTConfig
from penstock.config.theirs.backbones import backbone_in, require_vit, written_as
from penstock.config.theirs.names import Names, WeightPlaces
from penstock.errors import ConfigError
from penstock.models.convert.names import Converted, from_library, in_library, to_library
from penstock.models.model import Model

POSITIONS = "encoder.places.weight"
"""The name of the weight of the table of positions."""
_BLOCK = "encoder.blocks.{i}."


def to_hf(state: Mapping[str, Tensor], config: ViTConfig, *, modules: bool = False) -> dict[str, Tensor]:
    """Penstock's state dict in the names and shapes of transformers' model that computes the same: a
    ViTForImageClassification's as in its files, or with `modules` as its modules are called in version 5; or another
    model's of `config.theirs.backbones`. Raises ConfigError if transformers has no such model.
    """
    if (written := written_as(config)) and written[0].model_type != "vit":
        one, values = written
        prefix = one.prefix if values["architectures"] == [one.classes[0]] else ""
        named = _projections_joined(to_library(state, config, one.names(config))).items()
        return {name if name.startswith("classifier.") else prefix + name: tensor for name, tensor in named}
    require_vit(config)
    return to_library(state, config, _hf_names(config, modules=modules))


def from_hf(state: Mapping[str, Tensor], config: ViTConfig) -> Converted:
    """A state dict of ViTForImageClassification or ViTModel, of either naming and with or without the prefix `vit.`,
    in Penstock's names and shapes; or one of a model of `config.theirs.backbones`.

    Positions keep the grid they were trained on; names that the model lacks are kept.
    """
    if one := backbone_in(state):
        named = {name.removeprefix(one.prefix): tensor for name, tensor in state.items() if tensor.numel()}
        return _converted(_projections_apart(named), config, one.names(config))
    require_vit(config)
    state = {re.sub(r"^(?!vit\.|classifier\.)", "vit.", name): tensor for name, tensor in state.items()}
    modules = any(name.startswith("vit.layers.") for name in state)
    return _converted(state, config, _hf_names(config, modules=modules))


def _converted(state: Mapping[str, Tensor], config: ViTConfig, table: Names) -> Converted:
    """A library's state dict in Penstock's names and shapes, with positions for any grid."""
    expected = {
        name: tensor
        for name, tensor in Model(config, device="meta").state_dict().items()
        if _is_listed(name, table)
    }
    if POSITIONS in expected:
        ((stored, like),) = in_library(POSITIONS, expected[POSITIONS], config, table).items()
        places = state.get(stored, like)
        if places.ndim == like.ndim and places.shape[-1] == config.width:
            expected[POSITIONS] = torch.empty(places.shape[-2:], device="meta")
    made = from_library(state, config, table, expected)
    return made._replace(state={name: state[name] for name in made.left} | made.state)


def _is_listed(name: str, table: Names) -> bool:
    pattern = re.sub(r"\.blocks\.\d+\.", ".blocks.{i}.", name)
    return pattern in table or pattern.rpartition(".")[0] in table


_JOINED = "head.attention.in_proj_"
"""Prefix of the projections that torch's MultiheadAttention stores as one, in the head of SigLIP's tower."""


def _projections_joined(state: dict[str, Tensor]) -> dict[str, Tensor]:
    for kind in ("weight", "bias"):
        names = [f"head.attention.{one}_proj.{kind}" for one in "qkv"]
        if names[0] in state:
            state[_JOINED + kind] = torch.cat([state.pop(name) for name in names])
    return state


def _projections_apart(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `_projections_joined`."""
    for kind in ("weight", "bias"):
        if (joined := state.pop(_JOINED + kind, None)) is not None:
            state |= {f"head.attention.{one}_proj.{kind}": part for one, part in zip("qkv", joined.chunk(3))}
    return state


def _hf_names(config: ViTConfig, *, modules: bool) -> Names:
    """The names in files of transformers' ViT, or with `modules` the names of its modules in version 5."""
    ends = {
        "stem.proj": "vit.embeddings.patch_embeddings.projection", "class_token": "vit.embeddings.cls_token",
        POSITIONS: "vit.embeddings.position_embeddings", "norm": "vit.layernorm", "head": "classifier",
    }  # fmt: skip
    parts = {"norm1": "layernorm_before", "norm2": "layernorm_after"}
    if modules:
        parts |= {"attention.out": "attention.o_proj", "mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"}
        projections = [f"attention.{one}_proj" for one in "qkv"]
        return _names(config, ends, "vit.layers.{i}.", parts, projections)
    parts |= {
        "attention.out": "attention.output.dense",
        "mlp.up": "intermediate.dense",
        "mlp.down": "output.dense",
    }
    projections = [f"attention.attention.{one}" for one in ("query", "key", "value")]
    return _names(config, ends, "vit.encoder.layer.{i}.", parts, projections)


def _names(
    config: ViTConfig, ends: Mapping[str, str], place: str, parts: Mapping[str, str], projections: Sequence[str]
) -> Names:  # fmt: skip
    """A table from our names to a library's: `ends` outside the blocks, and `parts` of block `{i}`, whose names there
    begin with `place`."""
    named = {**ends, **{_BLOCK + part: place + name for part, name in parts.items()}}
    table = {part: WeightPlaces((name,)) for part, name in named.items()}
    kernel = (config.width, config.channels, config.patch_size, config.patch_size)
    # Tokens and positions have a first dimension of 1 there, and the stem is a convolution.
    shapes = {POSITIONS: (1, -1, config.width), **dict.fromkeys(("class_token", "distil_token"), (1, 1, -1))}
    table |= {
        part: WeightPlaces((ends[part],), shape=shape) for part, shape in shapes.items() if part in ends
    }
    table["stem.proj.weight"] = WeightPlaces((f"{ends['stem.proj']}.weight",), shape=kernel)
    table[f"{_BLOCK}attention.qkv"] = WeightPlaces(tuple(place + name for name in projections), "heads")
    return table


def to_timm(state: Mapping[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """Penstock's state dict in timm's names and shapes. Raises ConfigError where timm has no such model."""
    table = _timm_names(config)
    own = {name: tensor for name, tensor in state.items() if not _is_listed(name, table)}
    listed = {name: tensor for name, tensor in state.items() if name not in own}
    return to_library(listed, config, table) | own


def from_timm(state: Mapping[str, Tensor], config: ViTConfig) -> Converted:
    """timm's state dict in Penstock's names and shapes; names that the model lacks are kept.

    Positions keep the grid they were trained on. If timm's learned tokens have no positions (`no_embed_class`), they
    get positions of zeros, which is the same model.
    """
    made = _converted(state, config, _timm_names(config))
    positions = made.state.get(POSITIONS)
    if positions is not None and config.has_class_token and math.isqrt(len(positions)) ** 2 == len(positions):
        made.state[POSITIONS] = torch.cat(
            [positions.new_zeros(1 + config.distilled, config.width), positions]
        )
    return made


def _timm_names(config: ViTConfig) -> Names:
    if config.stem != "patchify":
        raise ConfigError(
            "timm's VisionTransformer has no convolutional stem, so a model with model.stem=conv cannot be written in "
            "its names; save it in Penstock's format with save_pretrained."
        )
    if config.experts:
        raise ConfigError(
            "timm's VisionTransformer has no mixtures of experts, so a model with model.experts cannot be written in "
            "its names; save it in Penstock's format with save_pretrained."
        )
    norm = "norm" if config.classifier == "token" or config.pool_norm == "before" else "fc_norm"
    ends = {
        "stem.proj": "patch_embed.proj", "class_token": "cls_token", "distil_token": "dist_token",
        POSITIONS: "pos_embed", "encoder.embedding_norm": "norm_pre", "norm": norm, "head": "head",
        "distil_head": "head_dist",
    }  # fmt: skip
    parts = {
        "norm1": "norm1", "attention.q_norm": "attn.q_norm", "attention.k_norm": "attn.k_norm",
        "attention.out": "attn.proj", "branch1.scale": "ls1.gamma", "norm2": "norm2", "mlp.up": "mlp.fc1",
        "mlp.down": "mlp.fc2", "branch2.scale": "ls2.gamma",
    }  # fmt: skip
    return _names(config, ends, "blocks.{i}.", parts, ("attn.qkv",))


def resize_positions(positions: Tensor, tokens: int, *, learned: int, antialias: bool = True) -> Tensor:
    """Bicubic interpolation of (tokens', D) on its square grid to (tokens, D), in fp32.

    The rows of the `learned` tokens, such as the class token, come first and are not changed. timm uses `antialias`;
    transformers does not, nor does Penstock for weights from there.

    Raises ConfigError when either number of tokens is no square grid.
    """
    if positions.shape[0] == tokens:
        return positions
    old, new = (math.isqrt(max(n - learned, 0)) for n in (positions.shape[0], tokens))
    if not old or old * old + learned != positions.shape[0] or new * new + learned != tokens:
        raise ConfigError(
            f"Position embeddings of {positions.shape[0]} tokens cannot be resized to {tokens}: without {learned} "
            "learned tokens, both numbers must be squares. Check that model.classifier and model.distilled are as they "
            "were in training."
        )
    grid = positions[learned:].float().T.reshape(1, -1, old, old)
    grid = F.interpolate(grid, size=(new, new), mode="bicubic", align_corners=False, antialias=antialias)
    patches = grid.reshape(-1, new * new).T.to(positions.dtype)
    return torch.cat([positions[:learned], patches])
