"""The config.json of transformers' ViT."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.boundary.files import quoted
from penstock.config.activations import ACTIVATIONS, PLAIN_NAMES, UNGATED
from penstock.config.convert import Count, Positive, Probability
from penstock.config.kinds import field_types
from penstock.config.load import from_dict
from penstock.config.model import PRESETS, Pixels, ViTConfig
from penstock.config.theirs.backbones import written_as
from penstock.errors import ConfigError

log = logging.getLogger(__name__)

_NAMES = {
    "image_size": "image_size", "patch_size": "patch_size", "num_channels": "channels",
    "hidden_size": "width", "num_hidden_layers": "depth", "num_attention_heads": "heads",
    "intermediate_size": "mlp_width", "hidden_dropout_prob": "dropout", "layer_norm_eps": "norm_eps",
    "qkv_bias": "qkv_bias",
}  # fmt: skip
"""Our fields by transformers' names, for fields that both have."""
_TIMM_SIZES = {
    "tiny": "vit-ti16", "small": "vit-s16", "base": "vit-b16", "large": "vit-l16", "huge": "vit-h14",
    "giant": "vit-g14",
}  # fmt: skip
"""Presets of the same width and depth, by timm's names of sizes."""
_TIMM_BACKBONES = {
    "dinov2": ("14", "()", "dinov2-{}14", {"small": "s", "base": "b", "large": "l", "giant": "g"}),
    "dinov3": ("16", "()", "dinov3-vit{}16", {"small": "s", "base": "b", "large": "l"}),
    "siglip": ("[1-9][0-9]?", "_([0-9]{1,4})", "siglip-{}", {"base": "b16", "so400m": "so400m14"}),
    "clip": ("[1-9][0-9]?", "_([0-9]{1,4})", "clip-vit-{}", {"base": "b32", "large": "l14"}),
}
"""Kinds of backbones: patch and image sizes in timm's names, and presets by timm's names of sizes."""
_TIMM = re.compile(
    rf"(?:vit|deit)_(?P<size>{'|'.join(_TIMM_SIZES)})(?P<distilled>_distilled)?"
    r"_patch(?P<patch>[1-9]\d?)_(?P<pixels>[1-9]\d{1,3})(?:\.(?P<tag>\w+))?"
)
_PLAIN = (
    "norm", "norm_first", "first_norm", "norm_bias", "bias", "positions", "attention_scale", "parallel", "window",
    "sinks", "sandwich_norms", "branch_norms", "norm_zero_centred", "score_cap",
)  # fmt: skip
"""Fields for which transformers' ViT supports only the default."""


def unrepresentable(config: ViTConfig) -> list[str]:
    """The features of a model that transformers' ViT lacks, as sentences; empty if there are none."""
    checks = {
        f"model.classifier {config.classifier!r}": config.classifier != "token",
        "model.distilled": config.distilled, "model.stem 'conv'": config.stem == "conv",
        "model.qk_norm": config.qk_norm, "model.layer_scale": config.layer_scale is not None,
        "model.registers": config.registers > 0, "model.stem_bias": not config.stem_bias,
        "model.embedding_norm": config.embedding_norm, "model.key_bias": not config.key_bias,
        "model.class_token": config.class_token is False, "model.experts": config.experts > 0,
        "model.kv_heads": config.kv_heads not in (None, config.heads),
        "model.head_features": config.layers[0].head_width * config.heads != config.width,
        "model.unequal": config.layers != replace(config, unequal=()).layers,
        f"model.mlp {config.mlp!r}": config.mlp in UNGATED,
    }  # fmt: skip
    plain = ViTConfig()
    checks |= {f"model.{name}": getattr(config, name) != getattr(plain, name) for name in _PLAIN}
    return [f"transformers' ViT has no counterpart of {what}." for what, present in checks.items() if present]


def require_representable(config: ViTConfig) -> None:
    """Raise ConfigError with all features that transformers' ViT lacks."""
    problems = unrepresentable(config)
    if problems:
        raise ConfigError([*problems, "Save such a model in Penstock's own names with save_pretrained."])


def hf_config(config: ViTConfig) -> dict[str, Any]:
    """The config.json of transformers' ViTForImageClassification, or of the model of `backbones` that computes the
    same. Raises ConfigError if it has no such model.
    """
    if unrepresentable(config) and (written := written_as(config)):
        return written[1]
    require_representable(config)
    labels = {i: f"LABEL_{i}" for i in range(config.classes)}
    return {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        **{option: getattr(config, name) for option, name in _NAMES.items()},
        "hidden_act": "gelu_pytorch_tanh" if config.mlp == "gelu_tanh" else ACTIVATIONS[config.mlp].names[0],
        "attention_probs_dropout_prob": 0.0,
        "initializer_range": 0.02,
        "encoder_stride": config.patch_size,
        "id2label": {str(i): label for i, label in labels.items()},
        "label2id": {label: i for i, label in labels.items()},
        # Features without a field in transformers' configuration.
        "penstock": {"drop_path": config.drop_path},
    }


@dataclass(frozen=True, kw_only=True)
class _ViTOptions:
    """The entries of a config.json that decide the model, with transformers' defaults."""

    model_type: str = "vit"
    hidden_act: str = "gelu"
    image_size: Pixels | tuple[Pixels, ...] = 224
    patch_size: Pixels | tuple[Pixels, ...] = 16
    num_channels: int = 3
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_dropout_prob: Probability = 0.0
    attention_probs_dropout_prob: Probability = 0.0
    layer_norm_eps: Positive = 1e-12
    qkv_bias: bool = True
    num_labels: Count = 2
    id2label: dict[str, str] | None = None
    penstock: dict[str, Probability] = field(default_factory=dict)


def config_from_hf(values: Mapping[str, Any]) -> ViTConfig:
    """The model that a config.json of `model_type` vit describes; what is absent has transformers' default.

    Raises ConfigError for another model type, or for what Penstock's ViT does not have.
    """
    known = {name: value for name, value in values.items() if name in field_types(_ViTOptions)}
    options = from_dict(_ViTOptions, known, origin="config.json")
    problems = []
    if options.model_type != "vit":
        problems.append(f"config.json is of model_type {quoted(options.model_type)}; only 'vit' can be read.")
    if options.hidden_act not in PLAIN_NAMES:
        known_ones = ", ".join(PLAIN_NAMES)
        problems.append(f"config.json has hidden_act {quoted(options.hidden_act)}; known are {known_ones}.")
    if problems:
        raise ConfigError(problems)
    if options.attention_probs_dropout_prob:
        log.warning(
            "attention_probs_dropout_prob %s is not applied: Penstock drops after the dense layers only.",
            options.attention_probs_dropout_prob,
        )
    settings = {setting: getattr(options, name) for name, setting in _NAMES.items()}
    settings |= {name: _side(options, name) for name in ("image_size", "patch_size")}
    settings["classes"] = options.num_labels if options.id2label is None else len(options.id2label)
    settings |= {"mlp": PLAIN_NAMES[options.hidden_act], "drop_path": options.penstock.get("drop_path", 0.0)}
    return from_dict(ViTConfig, settings, origin="config.json")


def timm_config(name: str) -> ViTConfig:
    """The model with the name `name` in timm, such as `vit_small_patch16_224.augreg_in1k`. Raises ConfigError for
    models other than its plain ViTs, and for a tag that does not tell the number of classes."""
    parts = _TIMM.fullmatch(name)
    if parts is None:
        if (backbone := _timm_backbone(name)) is not None:
            return backbone
        raise ConfigError(
            f"timm:{quoted(name)[1:-1]} is none of timm's models whose shape is known: vit_SIZE_patchP_PIXELS and "
            f"deit_SIZE_patchP_PIXELS, with SIZE {', '.join(_TIMM_SIZES)}, and ViTs of {', '.join(_TIMM_BACKBONES)}, "
            "such as vit_base_patch14_dinov2. Change one by --model.NAME VALUE, or measure timm's own module: "
            "penstock ladder --model my_module:factory."
        )
    tag, classes = parts["tag"] or "in1k", {"in1k": 1000, "augreg_in21k": 21843}
    if tag.rpartition("_")[2] == "in1k":
        tag = "in1k"
    if tag not in classes:
        raise ConfigError(
            f"timm:{name} has weights without a head for ImageNet's classes; leave .{tag} out, and set --model.classes."
        )
    base = PRESETS[_TIMM_SIZES[parts["size"]]]
    assert isinstance(base, ViTConfig)
    return replace(
        base, patch_size=int(parts["patch"]), image_size=int(parts["pixels"]), classes=classes[tag],
        distilled=parts["distilled"] is not None,
    )  # fmt: skip


def _timm_backbone(name: str) -> ViTConfig | None:
    """The backbone that timm calls `name`, such as `vit_base_patch14_reg4_dinov2.lvd142m`, with a head for ImageNet."""
    for kind, (patch, pixels, preset, sizes) in _TIMM_BACKBONES.items():
        form = rf"vit_({'|'.join(sizes)})_patch({patch})(_reg4)?_{kind}{pixels}(\..*)?"
        if (parts := re.fullmatch(form, name)) and (parts[3] is None or kind == "dinov2"):
            base = PRESETS[preset.format(sizes[parts[1]])]
            assert isinstance(base, ViTConfig)
            side, patch_size = int(parts[4] or (256 if kind == "dinov3" else base.image_size)), int(parts[2])
            return replace(
                base, patch_size=patch_size, image_size=side - side % patch_size,  # timm's names omit these
                registers=4 if parts[3] else base.registers, qkv_bias=kind != "dinov3",
            )  # fmt: skip
    return None


def _side(options: _ViTOptions, key: str) -> int:
    """A size, given as one number or as two equal ones."""
    value: int | tuple[int, ...] = getattr(options, key)
    sides = (value,) if isinstance(value, int) else value
    if len(set(sides)) != 1:
        raise ConfigError(
            f"config.json has {key} {list(sides[:9])}, but Penstock's ViT takes square images and patches."
        )
    return sides[0]
