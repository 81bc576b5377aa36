"""The vision models of transformers that are tuned to tell images apart, as data: DINOv2
and 3, and the towers of CLIP and SigLIP.

An option of a config.json is one of our fields, or has a value that must be, or changes nothing that a model computes;
any other is refused by name unless it is off.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from typing import Any

from penstock.boundary.files import shown
from penstock.config.activations import ACTIVATIONS, GATED_NAMES, PLAIN_NAMES, UNGATED, Mlp
from penstock.config.convert import shown_value
from penstock.config.layer import Rotary
from penstock.config.load import from_dict, to_dict
from penstock.config.model import ViTConfig
from penstock.config.theirs.library import FREE
from penstock.config.theirs.names import Names, WeightPlaces
from penstock.errors import ConfigError

log = logging.getLogger(__name__)
_FREE = FREE | {
    "projection_dim",
    "vision_use_head",
    "apply_layernorm",
    "out_features",
    "out_indices",
    "reshape_hidden_states",
    "stage_names",
    "use_mask_token",
}
_OWN = ("drop_path", "classifier", "class_token", "pool_norm")
"""Fields of ours that config.json keeps under `penstock`, because transformers has no option for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backbone:
    """One family of transformers' vision models."""

    model_type: str
    base: ViTConfig
    """Settings that hold for all of theirs, where no option says otherwise."""
    options: Mapping[str, tuple[Any, str]]
    """transformers' default, and our field."""
    must: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Options that must have one of these values; the first is written."""
    names: Callable[[ViTConfig], Names]
    mark: str
    """A regular expression for a name that no weights of the families after it have."""
    gate: str = ""
    """The option for a gated perceptron, where there is one."""
    gated: Mapping[str, Mlp] = field(default_factory=dict)
    """Gated activations by the word for their gate's, where not all are `swiglu`."""
    unapplied: tuple[str, ...] = ()
    """Options of training alone, which a warning says are not applied."""
    tower: str
    """The class without a head for classes. Its vector of an image is that of `base.classifier`."""
    classes: tuple[str, Mapping[str, Any]] = ("", {})
    """The class with one, and our settings of what that reads; none: there is no such class."""
    prefix: str
    """The prefix of the tower's weights beside such a head, or in a state dict."""
    whole: str = ""
    """The model_type of models of images and texts that the tower is in, which the class with a head is of."""
    antialias: bool = False
    """Whether positions are interpolated with antialiasing."""


def _dino_names(config: ViTConfig) -> Names:
    here, block = "encoder.layer.{i}.", "encoder.blocks.{i}."
    inner = ("query", "key", "value")
    gated = config.mlp in UNGATED
    width, patch = config.width, config.patch_size
    return {
        "stem.proj.weight": WeightPlaces(
            ("embeddings.patch_embeddings.projection.weight",), shape=(width, -1, patch, patch)
        ),
        "stem.proj": WeightPlaces(("embeddings.patch_embeddings.projection",)),
        "class_token": WeightPlaces(("embeddings.cls_token",), shape=(1, 1, -1)),
        "registers": WeightPlaces(("embeddings.register_tokens",), shape=(1, -1, width)),
        "encoder.places.weight": WeightPlaces(("embeddings.position_embeddings",), shape=(1, -1, width)),
        block + "norm1": WeightPlaces((here + "norm1",)),
        block + "attention.qkv": WeightPlaces(
            tuple(f"{here}attention.attention.{one}" for one in inner), "heads"
        ),
        block + "attention.out": WeightPlaces((here + "attention.output.dense",)),
        block + "branch1.scale": WeightPlaces((here + "layer_scale1.lambda1",)),
        block + "norm2": WeightPlaces((here + "norm2",)),
        block + "mlp.up": WeightPlaces((here + ("mlp.weights_in" if gated else "mlp.fc1"),)),
        block + "mlp.down": WeightPlaces((here + ("mlp.weights_out" if gated else "mlp.fc2"),)),
        block + "branch2.scale": WeightPlaces((here + "layer_scale2.lambda1",)),
        "norm": WeightPlaces(("layernorm",)),
        "head": WeightPlaces(("classifier",)),
    }


def _dino3_names(config: ViTConfig) -> Names:
    here, block, patch = "layer.{i}.", "encoder.blocks.{i}.", config.patch_size
    up = (here + "mlp.gate_proj", here + "mlp.up_proj") if config.mlp in UNGATED else (here + "mlp.up_proj",)
    return {
        **_dino_names(config),
        "stem.proj.weight": WeightPlaces(
            ("embeddings.patch_embeddings.weight",), shape=(config.width, -1, patch, patch)
        ),
        "stem.proj": WeightPlaces(("embeddings.patch_embeddings",)),
        block + "norm1": WeightPlaces((here + "norm1",)),
        block + "attention.qkv": WeightPlaces(tuple(f"{here}attention.{one}_proj" for one in "qkv"), "heads"),
        block + "attention.shift": WeightPlaces(
            tuple(f"{here}attention.{one}_proj" for one in "qv"), "heads"
        ),
        block + "attention.out": WeightPlaces((here + "attention.o_proj",)),
        block + "branch1.scale": WeightPlaces((here + "layer_scale1.lambda1",)),
        block + "norm2": WeightPlaces((here + "norm2",)),
        block + "mlp.up": WeightPlaces(up, "rows"),
        block + "mlp.down": WeightPlaces((here + "mlp.down_proj",)),
        block + "branch2.scale": WeightPlaces((here + "layer_scale2.lambda1",)),
        "norm": WeightPlaces(("norm",)),
    }


def _tower_names(config: ViTConfig) -> Names:
    here, block, pool = "encoder.layers.{i}.", "encoder.blocks.{i}.", "attention_pool."
    patch = config.patch_size
    return {
        "stem.proj.weight": WeightPlaces(
            ("embeddings.patch_embedding.weight",), shape=(config.width, -1, patch, patch)
        ),
        "stem.proj": WeightPlaces(("embeddings.patch_embedding",)),
        "class_token": WeightPlaces(("embeddings.class_embedding",)),
        "encoder.places": WeightPlaces(("embeddings.position_embedding",)),
        "encoder.embedding_norm": WeightPlaces(("pre_layrnorm",)),
        block + "norm1": WeightPlaces((here + "layer_norm1",)),
        block + "attention.qkv": WeightPlaces(tuple(f"{here}self_attn.{one}_proj" for one in "qkv"), "heads"),
        block + "attention.out": WeightPlaces((here + "self_attn.out_proj",)),
        block + "norm2": WeightPlaces((here + "layer_norm2",)),
        block + "mlp.up": WeightPlaces((here + "mlp.fc1",)),
        block + "mlp.down": WeightPlaces((here + "mlp.fc2",)),
        "norm": WeightPlaces(("post_layernorm",)),
        pool + "query": WeightPlaces(("head.probe",), shape=(1, 1, -1)),
        pool + "attention.q": WeightPlaces(("head.attention.q_proj",)),
        pool + "attention.kv": WeightPlaces(("head.attention.k_proj", "head.attention.v_proj"), "heads"),
        pool + "attention.out": WeightPlaces(("head.attention.out_proj",)),
        pool + "norm": WeightPlaces(("head.layernorm",)),
        pool + "mlp.up": WeightPlaces(("head.mlp.fc1",)),
        pool + "mlp.down": WeightPlaces(("head.mlp.fc2",)),
        "head": WeightPlaces(("classifier",)),
    }


_SIZES: dict[str, tuple[Any, str]] = {
    "hidden_size": (768, "width"), "num_hidden_layers": (12, "depth"), "num_attention_heads": (12, "heads"),
    "num_channels": (3, "channels"), "image_size": (224, "image_size"),
}  # fmt: skip
_DINO: dict[str, Any] = {
    "must": {"hidden_dropout_prob": (0.0,), "drop_path_rate": (0.0,)},
    "names": _dino_names, "gate": "use_swiglu_ffn",
}  # fmt: skip
_DINO_OPTIONS: dict[str, tuple[Any, str]] = {
    **_SIZES, "mlp_ratio": (4, "mlp_width"), "hidden_act": ("gelu", "mlp"),
    "attention_probs_dropout_prob": (0.0, "attention_dropout"), "layer_norm_eps": (1e-6, "norm_eps"),
    "qkv_bias": (True, "qkv_bias"), "layerscale_value": (1.0, "layer_scale"),
}  # fmt: skip
_TOWER_OPTIONS: dict[str, tuple[Any, str]] = {
    **_SIZES, "intermediate_size": (3072, "mlp_width"), "attention_dropout": (0.0, "attention_dropout"),
}  # fmt: skip

BACKBONES: tuple[Backbone, ...] = (
    Backbone(
        model_type="dinov3_vit",
        base=ViTConfig(class_token=True, positions="axial", key_bias=False, rotary=Rotary(base=100.0)),
        options={
            **_TOWER_OPTIONS, "hidden_size": (384, "width"), "num_attention_heads": (6, "heads"),
            "intermediate_size": (1536, "mlp_width"), "patch_size": (16, "patch_size"), "hidden_act": ("gelu", "mlp"),
            "layer_norm_eps": (1e-5, "norm_eps"), "rope_theta": (100.0, "rotary.base"),
            "query_bias": (True, "qkv_bias"), "value_bias": (True, "qkv_bias"), "key_bias": (False, "key_bias"),
            "proj_bias": (True, "bias"), "mlp_bias": (True, "bias"), "layerscale_value": (1.0, "layer_scale"),
            "num_register_tokens": (0, "registers"),
        },
        must={"drop_path_rate": (0.0,)}, unapplied=("pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale"),
        gate="use_gated_mlp", gated=GATED_NAMES, tower="DINOv3ViTModel", prefix="model.",
        mark=r"embeddings\.patch_embeddings\.weight$", names=_dino3_names,
    ),
    Backbone(
        model_type="dinov2_with_registers", base=ViTConfig(class_token=True),
        options={**_DINO_OPTIONS, "patch_size": (16, "patch_size"), "num_register_tokens": (4, "registers")},
        tower="Dinov2WithRegistersModel", classes=("Dinov2WithRegistersForImageClassification", {"classifier": "both"}),
        prefix="dinov2_with_registers.", mark=r"embeddings\.register_tokens$", antialias=True, **_DINO,
    ),
    Backbone(
        model_type="dinov2", base=ViTConfig(class_token=True),
        options={**_DINO_OPTIONS, "patch_size": (14, "patch_size")},
        tower="Dinov2Model", classes=("Dinov2ForImageClassification", {"classifier": "both"}), prefix="dinov2.",
        mark=r"layer_scale1\.lambda1$", **_DINO,
    ),
    Backbone(
        model_type="clip_vision_model", whole="clip",
        base=ViTConfig(class_token=True, stem_bias=False, embedding_norm=True),
        options={
            **_TOWER_OPTIONS, "patch_size": (32, "patch_size"), "hidden_act": ("quick_gelu", "mlp"),
            "layer_norm_eps": (1e-5, "norm_eps"),
        },
        tower="CLIPVisionModel",
        classes=("CLIPForImageClassification", {"classifier": "pooled", "class_token": True, "pool_norm": "none"}),
        prefix="vision_model.", mark=r"embeddings\.class_embedding$", names=_tower_names,
    ),
    Backbone(
        model_type="siglip_vision_model", whole="siglip", base=ViTConfig(classifier="attention"),
        options={
            **_TOWER_OPTIONS, "patch_size": (16, "patch_size"), "hidden_act": ("gelu_pytorch_tanh", "mlp"),
            "layer_norm_eps": (1e-6, "norm_eps"),
        },
        tower="SiglipVisionModel", classes=("SiglipForImageClassification", {"classifier": "pooled"}),
        prefix="vision_model.", mark=r"embeddings\.patch_embedding\.weight$", names=_tower_names,
    ),
)  # fmt: skip


def backbone_of(model_type: Any) -> Backbone | None:
    """The entry of a config.json's model_type; None for one of another kind of model."""
    return next((one for one in BACKBONES if model_type and model_type in (one.model_type, one.whole)), None)


def backbone_in(names: Iterable[str]) -> Backbone | None:
    """The family that weights of these names are of; None for those of another kind of model."""
    every = list(names)
    return next((one for one in BACKBONES if any(re.search(one.mark, name) for name in every)), None)


def read_backbone(values: Mapping[str, Any]) -> ViTConfig:
    """The model that a config.json of transformers describes; what is absent has transformers' default. Of a model
    without classes it is the one that tells `num_labels` apart by the vector that the tower makes of an image.

    Raises ConfigError with every option that our models cannot honour.
    """
    one = backbone_of(values.get("model_type"))
    assert one is not None
    inner = values
    if values["model_type"] == one.whole:
        parts = (values.get("vision_config"), values.get("vision_config_dict"))
        inner = {name: value for part in parts if isinstance(part, dict) for name, value in part.items()}
        log.info("Of %s the part for images is read, and the part for texts is left out.", one.whole)
    problems = list(_refused(inner, one))
    given = {option: inner.get(option, default) for option, (default, _) in one.options.items()}
    for option in ("image_size", "patch_size"):
        sides = given[option] if isinstance(given[option], list | tuple) else [given[option]]
        if any(side != sides[0] for side in sides) or not sides:
            problems.append(
                f"config.json has {option} {shown_value(given[option])}, but Penstock's ViT takes square images and "
                "patches."
            )
        given[option] = next(iter(sides), None)
    side, patch = given["image_size"], given["patch_size"]
    if isinstance(side, int) and isinstance(patch, int) and 0 < patch < side and side % patch:
        given["image_size"] = side - side % patch
        log.warning(
            "Patches of %s pixels cover %s of an image's %s; it is read as a model of images of that size.",
            patch, given["image_size"], side,
        )  # fmt: skip
    activation, gated = given["hidden_act"], bool(one.gate) and inner.get(one.gate) is True
    if not isinstance(activation, str) or activation not in PLAIN_NAMES:
        known = ", ".join(PLAIN_NAMES)
        problems.append(f"config.json has hidden_act {shown_value(activation)}; known are {known}.")
    if "mlp_ratio" in given:
        given["mlp_ratio"] = _hidden(given["hidden_size"], given["mlp_ratio"], gated=gated)
    if problems:
        raise ConfigError(problems)
    given["hidden_act"] = one.gated.get(activation, "swiglu") if gated else PLAIN_NAMES[activation]
    settings: dict[str, Any] = {}
    for option, (_, path) in one.options.items():
        if settings.setdefault(path, given[option]) != given[option]:
            problems.append(
                f"config.json has {option} {shown_value(given[option])}, but another value of an option that is "
                f"model.{path} here too; Penstock's model has one for both."
            )
    if problems:
        raise ConfigError(problems)
    if "rotary.base" in settings:
        settings["rotary"] = {"base": settings.pop("rotary.base")}
    for option in (one_of for one_of in one.unapplied if inner.get(one_of)):
        log.warning("%s %s of config.json is not applied in training.", option, shown_value(inner[option]))
    labels, kinds = values.get("id2label"), values.get("architectures")
    settings["classes"] = len(labels) if isinstance(labels, dict) and labels else values.get("num_labels", 2)
    if isinstance(kinds, list) and one.classes[0] in kinds:
        settings |= one.classes[1]
    elif inner.get("vision_use_head") is False:
        settings["classifier"] = "pooled"
    own = values.get("penstock")
    settings |= {name: own[name] for name in _OWN if isinstance(own, dict) and name in own}
    return from_dict(ViTConfig, to_dict(one.base) | settings, origin="config.json")


def _hidden(width: Any, ratio: Any, *, gated: bool) -> Any:
    """Hidden features by a ratio, of which a gated perceptron has two thirds, in multiples of 8."""
    if not isinstance(width, int) or not isinstance(ratio, int | float):
        return ratio  # which no width is
    return (int(int(width * ratio) * 2 / 3) + 7) // 8 * 8 if gated else int(width * ratio)


def _refused(values: Mapping[str, Any], one: Backbone) -> Iterator[str]:
    """Each option that has no place in our models, or another value than they have."""
    known = {*one.options, *_FREE, *one.unapplied, one.gate}
    for option, value in values.items():
        if option in one.must:
            if value not in one.must[option]:
                yield (
                    f"config.json has {option} {shown_value(value)}, but Penstock's model has "
                    f"{one.must[option][0]!r} only."
                )
        elif option not in known and not option.startswith("_") and value not in (None, False, {}, [], ""):
            yield (
                f"config.json has {shown(option)} {shown_value(value)}, of which Penstock does not know what it "
                "changes; remove it if it changes nothing that the model computes."
            )


@cache
def written_as(config: ViTConfig) -> tuple[Backbone, dict[str, Any]] | None:
    """The family that computes the same as a model, and its config.json; None where there is none."""
    for one in reversed(BACKBONES):  # one without registers before one that may have none
        values = _values(config, one)
        try:
            same = values is not None and read_backbone(values) == config
        except ConfigError:
            same = False
        if same:
            assert values is not None
            return one, values
    return None


def _values(config: ViTConfig, one: Backbone) -> dict[str, Any] | None:
    """A config.json that may be of a model; None where none can be."""
    gated = config.mlp in UNGATED
    plain = UNGATED.get(config.mlp, config.mlp)
    values = {option: attrgetter(path)(config) for option, (_, path) in one.options.items()}
    values["hidden_act"] = "gelu_pytorch_tanh" if plain == "gelu_tanh" else ACTIVATIONS[plain].names[0]
    if "mlp_ratio" in values:
        ratios = (
            ratio for ratio in range(1, 17) if _hidden(config.width, ratio, gated=gated) == config.mlp_width
        )
        values["mlp_ratio"] = next(ratios, None)
        values["hidden_act"] = "gelu" if gated else values["hidden_act"]
    if None in values.values() or (gated and not one.gate):
        return None
    classes = bool(one.classes[0]) and all(
        getattr(config, name) == value for name, value in one.classes[1].items()
    )
    own = {name: getattr(config, name) for name in _OWN}
    labels = {str(i): f"LABEL_{i}" for i in range(config.classes)}
    tower = {
        "model_type": one.model_type,
        **values,
        **({one.gate: gated} if one.gate else {}),
        **{option: allowed[0] for option, allowed in one.must.items()},
        **({"vision_use_head": config.classifier == "attention"} if one.whole == "siglip" else {}),
        "initializer_range": 0.02,
    }
    return {
        "architectures": [one.classes[0] if classes else one.tower],
        **({"model_type": one.whole, "vision_config": tower} if classes and one.whole else tower),
        "id2label": labels,
        "label2id": {label: int(i) for i, label in labels.items()},
        # What transformers' configuration has no field for.
        "penstock": own,
    }
