"""The vision models of transformers, as classifiers, which `presets/backbones.toml` describes."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from operator import attrgetter
from typing import Any

from penstock.config.activations import ACTIVATIONS, GATED_NAMES, PLAIN_NAMES, UNGATED, Mlp
from penstock.config.convert import shown_value
from penstock.config.load import from_dict
from penstock.config.model import ViTConfig
from penstock.config.shipped import read_shipped, with_forms
from penstock.config.theirs.library import FREE, differences, refused, settled_stack
from penstock.config.theirs.names import Names, WeightPlaces
from penstock.errors import ConfigError

log = logging.getLogger(__name__)

_FREE = FREE | {
    "apply_layernorm", "dropout", "encoder_stride", "out_features", "out_indices", "pooler_act",
    "pooler_output_size", "problem_type", "projection_dim", "reshape_hidden_states", "stage_names",
    "tie_word_embeddings", "use_mask_token", "vision_use_head",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Backbone:
    """One family of transformers' vision models. Options are as in `Library`."""

    model_type: str
    whole: str = ""
    """The model_type of the image-text model that contains the tower, and to which the class with a head belongs."""
    base: ViTConfig
    """Settings of all models of the family, unless an option says otherwise."""
    options: Mapping[str, Sequence[Any]]
    """For each option, transformers' default, and our field."""
    must: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    unapplied: Sequence[str] = ()
    """Options for training only; a warning says that they are not applied."""
    stored_fields: Sequence[str] = ("drop_path", "classifier", "class_token", "pool_norm")
    """Our fields that config.json stores under `penstock`, because transformers has no option for them."""
    gate: str = ""
    """The option for a gated perceptron, if there is one."""
    gated: Mapping[str, Mlp] = field(default_factory=dict)
    """Gated activations by the word for the gate's function, if not all are `swiglu`."""
    gated_parts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Our names of a gated perceptron's weights that differ, with theirs, whose rows are concatenated."""
    stem: str = ""
    """Name of the convolution that embeds patches as tokens."""
    block: str = ""
    """Prefix of the weights of block `{i}`."""
    inner: Sequence[str] = ()
    """Names of queries, keys and values in a block."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """Our names of a block's other parts, with theirs."""
    ends: Mapping[str, str] = field(default_factory=dict)
    """Names of the parts before and after the blocks."""
    mark: str = r"(?!)"
    """A regular expression for the name of a weight that families after this one do not have."""
    tower: str = ""
    """The class without a head for classes. Its vector of an image is that of `base.classifier`."""
    classes: Sequence[Any] = ("", {})
    """The class with a head, and our settings for the head's input; none: there is no such class."""
    prefix: str = ""
    """Prefix of the tower's weights in a model with a head, or in a state dict."""
    antialias: bool = False
    """Whether positions are interpolated with antialiasing."""

    def names(self, config: ViTConfig) -> Names:
        """Where the weights of a model are stored, without the prefix."""
        width, patch, block = config.width, config.patch_size, "encoder.blocks.{i}."
        shapes = dict.fromkeys(_OF_ONE_SAMPLE, (1, -1, width))
        stored = {block + part: self.block + name for part, name in self.parts.items()}
        table = {
            part: WeightPlaces((name,), shape=shapes.get(name, ()))
            for part, name in {**stored, **self.ends}.items()
        }
        queries, keys, values = (self.block + name for name in self.inner)
        table |= {
            "stem.proj": WeightPlaces((self.stem,)),
            "stem.proj.weight": WeightPlaces((f"{self.stem}.weight",), shape=(width, -1, patch, patch)),
            block + "attention.qkv": WeightPlaces((queries, keys, values), "heads"),
            block + "attention.shift.weight": WeightPlaces((f"{queries}.bias", f"{values}.bias"), "heads"),
            "attention_pool.attention.kv": WeightPlaces(_POOL_PAIR, "heads"),
        }
        for part, names in self.gated_parts.items() if config.mlp in UNGATED else ():
            table[block + part] = WeightPlaces(tuple(self.block + name for name in names), "rows")
        return table


_POOL_PAIR = ("head.attention.k_proj", "head.attention.v_proj")
_OF_ONE_SAMPLE = (
    "embeddings.cls_token", "embeddings.register_tokens", "embeddings.position_embeddings", "head.probe",
)  # fmt: skip
"""Tensors that are stored with a first dimension of 1."""


def _read(model_type: str, settings: dict[str, Any]) -> Backbone:
    """A family from its table."""
    settings["base"] = from_dict(ViTConfig, settings.get("base", {}), origin=f"backbones.toml, {model_type}")
    if "gated" in settings:
        settings["gated"] = GATED_NAMES
    return Backbone(model_type=model_type, **settings)


_TABLES = read_shipped("backbones")
BACKBONES = tuple(_read(name, with_forms(of, _TABLES["forms"])) for name, of in _TABLES["backbones"].items())


def backbone_of(model_type: Any) -> Backbone | None:
    """The entry for a config.json's model_type; None for other kinds of models."""
    return next((one for one in BACKBONES if model_type and model_type in (one.model_type, one.whole)), None)


def backbone_in(names: Iterable[str]) -> Backbone | None:
    """The family whose weights have these names; None for other kinds of models."""
    every = list(names)
    return next((one for one in BACKBONES if any(re.search(one.mark, name) for name in every)), None)


def config_from_hf(values: Mapping[str, Any]) -> ViTConfig:
    """The model that a config.json of transformers describes; what is absent has transformers' default. A tower without
    a head for classes gets one, over its vector of an image, with a ViT's default number of classes.

    Raises ConfigError for another model_type, and with every option that our models cannot honour.
    """
    model_type = values.get("model_type", "vit")
    if (one := backbone_of(model_type)) is None:
        known = ", ".join(each.model_type for each in BACKBONES)
        raise ConfigError(f"config.json is of model_type {shown_value(model_type)}; known are {known}.")
    inner = values
    if model_type == one.whole:
        parts = (values.get("vision_config"), values.get("vision_config_dict"))
        inner = {name: value for part in parts if isinstance(part, dict) for name, value in part.items()}
        log.info("Of %s the half for images is read, and the half for texts is left out.", one.whole)
    settings: dict[str, Any] = {}
    problems = list(refused(inner, {*one.options, *one.unapplied, *_FREE, one.gate}, one.must))
    for option, (default, path) in one.options.items():
        value = _here(option, inner.get(option, default), inner, one, problems)
        if settings.setdefault(path, value) != value:
            problems.append(
                f"config.json has {option} {shown_value(value)}, but another value of an option that is model.{path} "
                "here too; Penstock's model has one for both."
            )
    if problems:
        raise ConfigError(problems)
    for option in filter(inner.get, one.unapplied):
        log.warning("%s %s of config.json is not applied in training.", option, shown_value(inner[option]))
    side, patch = settings["image_size"], settings["patch_size"]
    if isinstance(side, int) and isinstance(patch, int) and 0 < patch < side and side % patch:
        settings["image_size"] = side - side % patch
        log.warning("Patches cover %s of an image's %s pixels: those are read.", settings["image_size"], side)
    labels, kinds, own = (values.get(name) for name in ("id2label", "architectures", "penstock"))
    if isinstance(labels, dict) and labels:
        settings["classes"] = len(labels)
    if not one.tower or (isinstance(kinds, list) and one.classes[0] in kinds):
        settings = {"classes": values.get("num_labels", 2), **settings, **one.classes[1]}
    elif inner.get("vision_use_head") is False:
        settings["classifier"] = "pooled"
    settings |= {name: own[name] for name in one.stored_fields if isinstance(own, dict) and name in own}
    return from_dict(ViTConfig, settings, base=one.base, origin="config.json")


def _here(option: str, value: Any, inner: Mapping[str, Any], one: Backbone, problems: list[str]) -> Any:
    """The value of our field for an option's value; a pair of equal sizes becomes one number."""
    gated = bool(one.gate) and inner.get(one.gate) is True
    if value is None:
        problems.append(f"config.json has {option} null, but needs a value; leave it out for the default.")
    if option == "hidden_act":
        if not isinstance(value, str) or value not in PLAIN_NAMES:
            known = ", ".join(PLAIN_NAMES)
            problems.append(f"config.json has hidden_act {shown_value(value)}; known are {known}.")
            return None
        return one.gated.get(value, "swiglu") if gated else PLAIN_NAMES[value]
    if option == "mlp_ratio":
        return _hidden(inner.get("hidden_size", one.options["hidden_size"][0]), value, gated=gated)
    if isinstance(value, list | tuple) and value:
        if any(side != value[0] for side in value):
            problems.append(
                f"config.json has {option} {shown_value(value)}, but Penstock's ViT takes square images and patches."
            )
        return value[0]
    return value


def _hidden(width: Any, ratio: Any, *, gated: bool) -> Any:
    """Hidden features from a ratio; a gated perceptron has two thirds of them, in multiples of 8."""
    if not isinstance(width, int) or not isinstance(ratio, int | float):
        return ratio  # no width is that large
    return (int(int(width * ratio) * 2 / 3) + 7) // 8 * 8 if gated else int(width * ratio)


@cache
def written_as(config: ViTConfig) -> tuple[Backbone, dict[str, Any]] | None:
    """The family that computes the same as a model, and its config.json; None if there is none."""
    # The plain ViT first, which stores the fewest fields of ours; then families without registers before others.
    for one in sorted(
        BACKBONES, key=lambda one: (one.model_type != "vit", "num_register_tokens" in one.options)
    ):
        values = _values(config, one)
        try:
            if settled_stack(config_from_hf(values)) == settled_stack(config):
                return one, values
        except ConfigError:
            continue
    return None


def hf_config(config: ViTConfig) -> dict[str, Any]:
    """The config.json of the model of transformers that computes the same. Raises ConfigError if there is none."""
    if written := written_as(config):
        return written[1]
    raise ConfigError(_lacks(config))


def require_vit(config: ViTConfig) -> None:
    """Raise ConfigError, with all that it lacks, if transformers' plain ViT does not compute the same."""
    if (written := written_as(config)) is None or written[0].model_type != "vit":
        raise ConfigError(_lacks(config))


def _lacks(config: ViTConfig) -> list[str]:
    vit = backbone_of("vit")
    assert vit is not None
    try:
        readable = config_from_hf(_values(config, vit))
        missing = [*differences(settled_stack(config), settled_stack(readable))]
    except ConfigError:  # all other sizes can be read back
        missing = ["model.head_features"]
    lacks = [f"transformers' vit has no {each}." for each in missing]
    return [*lacks, "Save such a model in Penstock's own names with save_pretrained."]


def _values(config: ViTConfig, one: Backbone) -> dict[str, Any]:
    """The config.json of a model, if it can be of this family."""
    gated, plain = config.mlp in UNGATED, UNGATED.get(config.mlp, config.mlp)
    dropped = replace(config, attention_dropout=config.weights_dropout)
    values = {option: attrgetter(path)(dropped) for option, (_, path) in one.options.items()}
    values |= {option: allowed[0] for option, allowed in one.must.items()}
    if "hidden_act" in one.options:
        values["hidden_act"] = "gelu_pytorch_tanh" if plain == "gelu_tanh" else ACTIVATIONS[plain].names[0]
    if "mlp_ratio" in values:
        made = (n for n in range(1, 17) if _hidden(config.width, n, gated=gated) == config.mlp_width)
        values |= {"mlp_ratio": next(made, None)} | ({"hidden_act": "gelu"} if gated else {})
    if one.whole == "siglip":
        values["vision_use_head"] = config.classifier == "attention"
    tower = {"model_type": one.model_type, **values, **({one.gate: gated} if one.gate else {})}
    classes = bool(one.classes[0]) and all(
        getattr(config, name) == value for name, value in one.classes[1].items()
    )
    return {
        "architectures": [one.classes[0] if classes else one.tower],
        **({"model_type": one.whole, "vision_config": tower} if classes and one.whole else tower),
        "id2label": {str(i): f"LABEL_{i}" for i in range(config.classes)},
        "label2id": {f"LABEL_{i}": i for i in range(config.classes)},
        "penstock": {name: getattr(config, name) for name in one.stored_fields},
    }
