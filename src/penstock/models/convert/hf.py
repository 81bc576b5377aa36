"""The config.json of transformers' ViT."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from penstock.config.model import ViTConfig
from penstock.errors import ConfigError
from penstock.models.convert.vit import require_representable

log = logging.getLogger(__name__)

_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
# Other names that transformers has for the same functions.
_ACTIVATIONS_READ = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


def hf_config(config: ViTConfig) -> dict[str, Any]:
    """The config.json of transformers' ViTForImageClassification. Raises ConfigError if it has no such
    model.
    """
    require_representable(config)
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
