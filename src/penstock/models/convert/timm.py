"""Names and shapes of timm's VisionTransformer."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from penstock.config.model import ViTConfig
from penstock.errors import ConfigError
from penstock.models.convert.qkv import by_head, by_kind

# Within a block, Penstock's name and timm's.
_BLOCK = {
    "norm1.weight": "norm1.weight",
    "norm1.bias": "norm1.bias",
    "attention.qkv.weight": "attn.qkv.weight",
    "attention.qkv.bias": "attn.qkv.bias",
    "attention.q_norm.weight": "attn.q_norm.weight",
    "attention.q_norm.bias": "attn.q_norm.bias",
    "attention.k_norm.weight": "attn.k_norm.weight",
    "attention.k_norm.bias": "attn.k_norm.bias",
    "attention.out.weight": "attn.proj.weight",
    "attention.out.bias": "attn.proj.bias",
    "branch1.scale": "ls1.gamma",
    "norm2.weight": "norm2.weight",
    "norm2.bias": "norm2.bias",
    "mlp.up.weight": "mlp.fc1.weight",
    "mlp.up.bias": "mlp.fc1.bias",
    "mlp.down.weight": "mlp.fc2.weight",
    "mlp.down.bias": "mlp.fc2.bias",
    "branch2.scale": "ls2.gamma",
}


def _names(config: ViTConfig) -> dict[str, str]:
    """Penstock's name to timm's, for every parameter that either may have."""
    if config.stem != "patchify":
        raise ConfigError(
            "timm's VisionTransformer has no convolutional stem, so weights of model.stem 'conv' cannot take "
            "its names; save them in Penstock's own with save_pretrained."
        )
    norm = "fc_norm" if config.classifier == "pooled" and config.pool_norm == "after" else "norm"
    names = {
        "stem.proj.weight": "patch_embed.proj.weight",
        "stem.proj.bias": "patch_embed.proj.bias",
        "class_token": "cls_token",
        "positions": "pos_embed",
        "norm.weight": f"{norm}.weight",
        "norm.bias": f"{norm}.bias",
        "head.weight": "head.weight",
        "head.bias": "head.bias",
    }
    for i in range(config.depth):
        names |= {f"blocks.{i}.{ours}": f"blocks.{i}.{theirs}" for ours, theirs in _BLOCK.items()}
    return names


def to_timm(state: Mapping[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """Penstock's state dict in timm's names and shapes. Raises ConfigError where timm has no such model."""
    names, out = _names(config), {}
    kernel = (config.width, config.channels, config.patch_size, config.patch_size)
    for name, tensor in state.items():
        if name == "stem.proj.weight":
            tensor = tensor.reshape(kernel)
        elif ".attention.qkv." in name:
            tensor = by_kind(tensor, config.heads)
        elif name in ("positions", "class_token"):
            tensor = tensor.reshape(1, -1, config.width)
        out[names[name]] = tensor
    return out


def from_timm(state: Mapping[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """timm's state dict in Penstock's names and shapes; names that the model lacks are kept as they are.

    Positions keep the grid they were learned on. Where timm's class token has no position (`no_embed_class`),
    it gets one of zeros, which is the same model.
    """
    ours = {theirs: name for name, theirs in _names(config).items()}
    out = {}
    for theirs, tensor in state.items():
        name = ours.get(theirs, theirs)
        if name == "stem.proj.weight":
            tensor = tensor.flatten(1)
        elif ".attention.qkv." in name:
            tensor = by_head(tensor, config.heads)
        elif name == "positions":
            tensor = tensor.reshape(-1, tensor.shape[-1])
            if "cls_token" in state and math.isqrt(len(tensor)) ** 2 == len(tensor):
                tensor = torch.cat([torch.zeros_like(tensor[:1]), tensor])
        elif name == "class_token":
            tensor = tensor.flatten()
        out[name] = tensor
    return out
