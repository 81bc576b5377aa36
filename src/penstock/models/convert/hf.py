"""The config.json of transformers' ViT."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from penstock.config.model import ViTConfig
from penstock.config.stack import Mlp
from penstock.errors import ConfigError
from penstock.models.convert.vit import require_representable

log = logging.getLogger(__name__)

_NAMES = {
    "image_size": "image_size",
    "patch_size": "patch_size",
    "num_channels": "channels",
    "hidden_size": "width",
    "num_hidden_layers": "depth",
    "num_attention_heads": "heads",
    "intermediate_size": "mlp_width",
    "hidden_dropout_prob": "dropout",
    "layer_norm_eps": "norm_eps",
    "qkv_bias": "qkv_bias",
}
"""Fields that both have, by transformers' name."""
_DEFAULTS = {"norm_eps": 1e-12, "classes": 2}
"""Defaults of transformers that are not ours."""
_ACTIVATIONS: dict[str, Mlp] = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
}
"""Functions by transformers' names, of which the first is written."""


def hf_config(config: ViTConfig) -> dict[str, Any]:
    """The config.json of transformers' ViTForImageClassification. Raises ConfigError if it has no such
    model.
    """
    require_representable(config)
    labels = {i: f"LABEL_{i}" for i in range(config.classes)}
    return {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        **{theirs: getattr(config, ours) for theirs, ours in _NAMES.items()},
        "hidden_act": next(theirs for theirs, ours in _ACTIVATIONS.items() if ours == config.mlp),
        "attention_probs_dropout_prob": 0.0,
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
    activation = values.get("hidden_act", "gelu")
    if activation not in _ACTIVATIONS:
        problems.append(f"config.json has hidden_act {activation!r}; known are {', '.join(_ACTIVATIONS)}.")
    if problems:
        raise ConfigError(problems)
    if values.get("attention_probs_dropout_prob", 0.0):
        log.warning(
            "attention_probs_dropout_prob %s is not applied: Penstock drops after the dense layers only.",
            values["attention_probs_dropout_prob"],
        )
    found = {ours: values[theirs] for theirs, ours in _NAMES.items() if theirs in values}
    found |= {name: _side(values, name) for name in ("image_size", "patch_size") if name in values}
    if "id2label" in values or "num_labels" in values:
        found["classes"] = len(values["id2label"]) if "id2label" in values else values["num_labels"]
    drop_path = values.get("penstock", {}).get("drop_path", 0.0)
    return ViTConfig(**{**_DEFAULTS, **found}, mlp=_ACTIVATIONS[activation], drop_path=drop_path)


def _side(values: Mapping[str, Any], key: str) -> int:
    """A size that may be given as one number or as two, which must then be equal."""
    value = values[key]
    if isinstance(value, int):
        return value
    if isinstance(value, list | tuple) and len(set(value)) == 1 and isinstance(value[0], int):
        return value[0]
    raise ConfigError(f"config.json has {key} {value!r}, but Penstock's ViT takes square images and patches.")
