"""Names, shapes and configuration of transformers' ViT.

Files on the hub carry the names of transformers 4 (`vit.encoder.layer.0.attention.attention.query.weight`),
and version 5 still writes them, though its modules are named otherwise
(`vit.layers.0.attention.q_proj.weight`). Both are read; the former are written.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.config.model import ViTConfig
from penstock.errors import ConfigError
from penstock.models.convert.qkv import by_head, by_kind

log = logging.getLogger(__name__)

_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
# Other names that transformers has for the same functions.
_ACTIVATIONS_READ = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}

_OUTER = {
    "stem.proj": "vit.embeddings.patch_embeddings.projection",
    "norm": "vit.layernorm",
    "head": "classifier",
}
_BLOCK = {
    "norm1": "layernorm_before",
    "attention.out": "attention.output.dense",
    "norm2": "layernorm_after",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
}
_QKV = ("query", "key", "value")
# Within a block, transformers 5's module names and the names in files.
_MODULES = {
    "attention.q_proj": "attention.attention.query",
    "attention.k_proj": "attention.attention.key",
    "attention.v_proj": "attention.attention.value",
    "attention.o_proj": "attention.output.dense",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}


def unrepresentable(config: ViTConfig) -> list[str]:
    """What of a model transformers' ViT does not have, as sentences; empty if it has all."""
    checks = {
        "model.classifier 'pooled'": config.classifier == "pooled",
        "model.stem 'conv'": config.stem == "conv",
        "model.qk_norm": config.qk_norm,
        "model.layer_scale": config.layer_scale is not None,
    }
    return [f"transformers' ViT has no counterpart of {what}." for what, present in checks.items() if present]


def _require_representable(config: ViTConfig) -> None:
    problems = unrepresentable(config)
    if problems:
        raise ConfigError([*problems, "Save such a model in Penstock's own names with save_pretrained."])


def to_hf(state: Mapping[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """Penstock's state dict as transformers' ViTForImageClassification is stored. Raises ConfigError if it
    has no such model."""
    _require_representable(config)
    kernel = (config.width, config.channels, config.patch_size, config.patch_size)
    out: dict[str, Tensor] = {
        "vit.embeddings.cls_token": state["class_token"].reshape(1, 1, -1),
        "vit.embeddings.position_embeddings": state["positions"].unsqueeze(0),
    }
    for name, tensor in state.items():
        module, _, kind = name.rpartition(".")
        if module == "stem.proj":
            out[f"{_OUTER[module]}.{kind}"] = tensor.reshape(kernel) if kind == "weight" else tensor
        elif module in _OUTER:
            out[f"{_OUTER[module]}.{kind}"] = tensor
        elif module.startswith("blocks."):
            _, index, inner = module.split(".", 2)
            block = f"vit.encoder.layer.{index}"
            if inner == "attention.qkv":
                for part, rows in zip(_QKV, by_kind(tensor, config.heads).chunk(3)):
                    out[f"{block}.attention.attention.{part}.{kind}"] = rows.contiguous()
            else:
                out[f"{block}.{_BLOCK[inner]}.{kind}"] = tensor
    return out


def from_hf(state: Mapping[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """A state dict of ViTForImageClassification or ViTModel, of either naming, in Penstock's names and
    shapes.

    Positions keep the grid they were learned on; names that the model lacks are kept as they are.
    """
    _require_representable(config)
    state = {_file_name(name): tensor for name, tensor in state.items()}
    outer = {theirs: ours for ours, theirs in _OUTER.items()}
    inner = {theirs: ours for ours, theirs in _BLOCK.items()}
    out: dict[str, Tensor] = {}
    for name, tensor in state.items():
        module, _, kind = name.rpartition(".")
        block = re.fullmatch(r"vit\.encoder\.layer\.(\d+)\.(.+)", module)
        if name == "vit.embeddings.cls_token":
            out["class_token"] = tensor.flatten()
        elif name == "vit.embeddings.position_embeddings":
            out["positions"] = tensor.squeeze(0)
        elif module in outer:
            ours = outer[module]
            out[f"{ours}.{kind}"] = tensor.flatten(1) if (ours, kind) == ("stem.proj", "weight") else tensor
        elif block and block[2] in inner:
            out[f"blocks.{block[1]}.{inner[block[2]]}.{kind}"] = tensor
        elif block and block[2] == "attention.attention.query":
            parts = [state.get(name.replace(".query.", f".{part}.")) for part in _QKV]
            whole = [part for part in parts if part is not None]
            if len(whole) == 3:
                out[f"blocks.{block[1]}.attention.qkv.{kind}"] = by_head(torch.cat(whole), config.heads)
        elif not (block and block[2] in ("attention.attention.key", "attention.attention.value")):
            out[name] = tensor
    return out


def _file_name(name: str) -> str:
    """The name in files, of a name there or in transformers 5's modules, with or without the prefix
    `vit.`.
    """
    name = re.sub(r"^(?!vit\.|classifier\.)", "vit.", name)
    found = re.fullmatch(r"vit\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
    if not found:
        return name
    index, module, kind = found.groups()
    return f"vit.encoder.layer.{index}.{_MODULES.get(module, module)}.{kind}"


def hf_config(config: ViTConfig) -> dict[str, Any]:
    """The config.json of transformers' ViTForImageClassification. Raises ConfigError if it has no such
    model.
    """
    _require_representable(config)
    labels = {i: f"LABEL_{i}" for i in range(config.classes)}
    return {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "num_channels": config.channels,
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "intermediate_size": config.mlp_width,
        "hidden_act": _ACTIVATIONS[config.mlp],
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": config.norm_eps,
        "qkv_bias": config.qkv_bias,
        "initializer_range": 0.02,
        "encoder_stride": config.patch_size,
        "id2label": {str(i): label for i, label in labels.items()},
        "label2id": {label: i for i, label in labels.items()},
        # What transformers' configuration has no field for.
        "penstock": {"drop_path": config.drop_path},
    }


def config_from_hf(values: Mapping[str, Any]) -> ViTConfig:
    """The model that a config.json of `model_type` vit describes; what is absent has transformers' default.

    Raises ConfigError for another model type, or for what Penstock's ViT does not have.
    """
    problems = []
    if values.get("model_type", "vit") != "vit":
        problems.append(f"config.json is of model_type {values['model_type']!r}; only 'vit' can be read.")
    activation = _ACTIVATIONS_READ.get(values.get("hidden_act", "gelu"))
    if activation is None:
        problems.append(
            f"config.json has hidden_act {values['hidden_act']!r}; known are {', '.join(_ACTIVATIONS_READ)}."
        )
    if problems:
        raise ConfigError(problems)
    if values.get("attention_probs_dropout_prob", 0.0):
        log.warning(
            "attention_probs_dropout_prob %s is not applied: Penstock drops after the dense layers only.",
            values["attention_probs_dropout_prob"],
        )
    return ViTConfig(
        image_size=_side(values, "image_size", 224),
        patch_size=_side(values, "patch_size", 16),
        channels=values.get("num_channels", 3),
        width=values.get("hidden_size", 768),
        depth=values.get("num_hidden_layers", 12),
        heads=values.get("num_attention_heads", 12),
        mlp_width=values.get("intermediate_size", 3072),
        classes=len(values["id2label"]) if "id2label" in values else values.get("num_labels", 2),
        mlp="gelu_tanh" if activation == "gelu_tanh" else "gelu",
        qkv_bias=values.get("qkv_bias", True),
        drop_path=values.get("penstock", {}).get("drop_path", 0.0),
        dropout=values.get("hidden_dropout_prob", 0.0),
        norm_eps=values.get("layer_norm_eps", 1e-12),
    )


def _side(values: Mapping[str, Any], key: str, default: int) -> int:
    """A size that may be given as one number or as two, which must then be equal."""
    value = values.get(key, default)
    if isinstance(value, int):
        return value
    if isinstance(value, list | tuple) and len(set(value)) == 1 and isinstance(value[0], int):
        return value[0]
    raise ConfigError(f"config.json has {key} {value!r}, but Penstock's ViT takes square images and patches.")
