"""Weights in the names and shapes of transformers' text models and back, by the tables of `config.theirs.names`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.config.model import EncoderConfig, TextConfig, ViTConfig, stacks
from penstock.config.theirs.library import Library
from penstock.config.theirs.names import Names, WeightPlaces, stack_of
from penstock.config.theirs.text import library_of, write_text_config
from penstock.dtypes import FLOATS
from penstock.errors import ConfigError
from penstock.models.embeddings import Sinusoidal
from penstock.models.experts import UNIT
from penstock.models.model import Model
from penstock.tensorfile import Pending


def _places(name: str, table: Names) -> tuple[WeightPlaces, tuple[str, ...]]:
    """The table's entry for one of our parameters, and transformers' names for it."""
    number = re.search(r"\.blocks\.(\d+)\.", name)
    pattern = re.sub(r"\.blocks\.\d+\.", ".blocks.{i}.", name)
    i = number.group(1) if number else ""
    if pattern in table:
        return table[pattern], tuple(each.replace("{i}", i) for each in table[pattern].names)
    module, _, kind = pattern.rpartition(".")
    # A block that differs from the rest has entries of its own.
    entry = table.get(name.rpartition(".")[0]) or table[module]
    return entry, tuple(f"{each.replace('{i}', i)}.{kind}" for each in entry.names)


def to_library(
    state: Mapping[str, Tensor], config: TextConfig | ViTConfig, table: Names
) -> dict[str, Tensor]:
    """Our state dict in transformers' names and shapes; a tied weight appears once."""
    converted: dict[str, Tensor] = {}
    for name, tensor in state.items():
        floats = tensor.is_floating_point() or name.endswith(".correction")
        if floats and (name != "head.weight" or not shares_head(config)):
            converted |= in_library(name, tensor, config, table)
    return converted


def in_library(name: str, tensor: Tensor, config: TextConfig | ViTConfig, table: Names) -> dict[str, Tensor]:
    """One of our weights in transformers' names and shapes."""
    entry, names = _places(name, table)
    if entry.form == "experts":
        names = tuple(each.replace("{e}", str(e)) for e in range(len(tensor)) for each in names)
    parts = _split(tensor, name, entry, config)
    if len(names) == 1 and len(parts) > 1:
        parts = [torch.cat(parts)]
    if entry.shape:
        parts = [part.reshape(entry.shape) for part in parts]
    turned = (part.mT if entry.transposed and part.ndim > 1 else part for part in parts)
    return dict(zip(names, turned))


class Converted(NamedTuple):
    """transformers' state dict in our names and shapes."""

    state: dict[str, Tensor]
    """Only our names for which transformers' state dict has weights that fit."""
    misfits: dict[str, str]
    """By our name, a sentence that says why transformers' weight does not fit."""
    left: list[str]
    """Names of transformers' weights that were not used."""


def from_library(
    state: Mapping[str, Tensor], config: TextConfig | ViTConfig, table: Names, expected: Mapping[str, Tensor]
) -> Converted:
    """transformers' state dict in the names and shapes of our state dict `expected`. The shape and the type of each
    weight are checked before it is converted.
    """
    weights, misfits, used = dict[str, Tensor](), dict[str, str](), set[str]()
    for name, tensor in expected.items():
        if name == "head.weight" and shares_head(config):
            continue
        if not tensor.is_floating_point() and not name.endswith(".correction"):
            weights[name] = torch.zeros_like(tensor)  # visits of experts, which the weights do not contain
            continue
        wanted = in_library(name, tensor.to("meta"), config, table)
        if not wanted.keys() <= state.keys():
            continue
        used |= wanted.keys()
        wrong = [problem for key in wanted if (problem := misfit(key, state[key], wanted[key]))]
        if wrong:
            misfits[name] = wrong[0]
            continue
        entry, _ = _places(name, table)
        parts = [state[key] for key in wanted]
        parts = [part.mT if entry.transposed and part.ndim > 1 else part for part in parts]
        joined = _joined(parts, name, entry, config)
        weights[name] = joined.reshape(tensor.shape) if entry.shape else joined
    if shares_head(config) and "tokens.weight" in weights:
        weights["head.weight"] = weights["tokens.weight"]
    elif shares_head(config) and "tokens.weight" in misfits:
        misfits["head.weight"] = misfits["tokens.weight"]
    return Converted(weights, misfits, [name for name in state if name not in used])


def misfit(name: str, given: Tensor, expected: Tensor) -> str | None:
    """A sentence that says why a weight does not fit the model. Floating-point types may be converted into one another;
    any other difference of type is refused, because the cast would be silent.
    """
    if given.shape != expected.shape:
        return f"{name} is {tuple(given.shape)}, but the model's is {tuple(expected.shape)}."
    if given.is_complex() or (given.dtype in FLOATS) is not expected.is_floating_point():
        return f"{name} is of {given.dtype}, but the model's is of {expected.dtype}; give floating-point weights."
    return None


def shares_head(config: TextConfig | ViTConfig) -> bool:
    """Whether the weight of the head is the table of tokens."""
    return bool(config.graph.tied)


def _sizes(name: str, config: TextConfig | ViTConfig) -> tuple[int, list[int]]:
    """Features of a head, and the number of heads of queries, of keys and of values per KV head."""
    stack = stack_of(config, name.partition(".")[0])
    layer = stack.layers[0]
    each = [layer.queries_per_key, 1, 1]
    return layer.head_width, each[1:] if ".kv." in name else each[:2] if ".shift." in name else each


def _split(tensor: Tensor, name: str, entry: WeightPlaces, config: TextConfig | ViTConfig) -> list[Tensor]:
    if entry.unused:
        return [torch.cat([tensor.new_zeros(entry.unused, tensor.shape[1]), tensor])]
    if entry.form == "rows":
        return list(tensor.chunk(len(entry.names)))
    if entry.form == "experts":
        return [part for one in tensor.unbind(0) for part in one.chunk(len(entry.names))]
    if entry.form == "turns":
        return [torch.stack(tensor.chunk(2, dim=1), dim=2).flatten(1, 2)]
    if entry.form == "units":
        return [(tensor.double() * UNIT).float()]
    if entry.form == "same":
        return [tensor]
    features, each = _sizes(name, config)
    groups = tensor.view(-1, sum(each), features, *tensor.shape[1:]).split_with_sizes(each, dim=1)
    return [part.flatten(0, 2).contiguous() for part in groups]


def _joined(parts: list[Tensor], name: str, entry: WeightPlaces, config: TextConfig | ViTConfig) -> Tensor:
    if entry.unused:
        return parts[0][entry.unused :]
    if entry.form == "rows":
        return torch.cat(parts)
    if entry.form == "experts":
        count = len(entry.names)
        return torch.stack([torch.cat(parts[at : at + count]) for at in range(0, len(parts), count)])
    if entry.form == "turns":
        return torch.cat([parts[0][:, ::2], parts[0][:, 1::2]], dim=1)
    if entry.form == "units":
        return (parts[0].double() / UNIT).round().to(torch.int64)
    if entry.form == "same":
        return parts[0]
    features, each = _sizes(name, config)
    if len(parts) == 1:
        heads = parts[0].shape[0] // features // sum(each)
        parts = list(parts[0].split_with_sizes([heads * n * features for n in each]))
    groups = [part.reshape(-1, n, features, *part.shape[1:]) for part, n in zip(parts, each)]
    return torch.cat(groups, dim=1).flatten(0, 2)


# -- weights under other names than those of the tables in `names`


_OLD = ((r"\bLayerNorm\.gamma$", "LayerNorm.weight"), (r"\bLayerNorm\.beta$", "LayerNorm.bias"))
"""TensorFlow's names of a norm's weights, which the first BERTs on the hub still have."""
_WORDS = "cls.predictions."
_ROBERTA = (
    (r"^roberta\.", "bert."), (r"^lm_head\.dense\.", _WORDS + "transform.dense."),
    (r"^lm_head\.layer_norm\.", _WORDS + "transform.LayerNorm."),
    (r"^lm_head\.decoder\.", _WORDS + "decoder."), (r"^lm_head\.bias$", _WORDS + "bias"),
    (r"^classifier\.dense\.", "bert.pooler.dense."), (r"^classifier\.out_proj\.", "classifier."),
)  # fmt: skip
_DISTILLED = (
    (r"^(distilbert\.)?embeddings\.", "bert.embeddings."),
    (r"^(distilbert\.)?transformer\.layer\.", "bert.encoder.layer."),
    (r"\.attention\.q_lin\.", ".attention.self.query."), (r"\.attention\.k_lin\.", ".attention.self.key."),
    (r"\.attention\.v_lin\.", ".attention.self.value."),
    (r"\.attention\.out_lin\.", ".attention.output.dense."),
    (r"\.sa_layer_norm\.", ".attention.output.LayerNorm."), (r"\.ffn\.lin1\.", ".intermediate.dense."),
    (r"\.ffn\.lin2\.", ".output.dense."), (r"\.output_layer_norm\.", ".output.LayerNorm."),
    (r"^vocab_transform\.", _WORDS + "transform.dense."),
    (r"^vocab_layer_norm\.", _WORDS + "transform.LayerNorm."),
    (r"^vocab_projector\.weight$", _WORDS + "decoder.weight"), (r"^vocab_projector\.bias$", _WORDS + "bias"),
    (r"^pre_classifier\.", "classifier.pre."),
)  # fmt: skip
_INSIDE = (
    (r"^(model\.)?language_model\.(model\.)?(?!lm_head)", "model."),
    (r"^language_model\.lm_head", "lm_head"),
)
_SPELLINGS: dict[str, tuple[str, Sequence[tuple[str, str]]]] = {
    "roberta": ("roberta.", _ROBERTA), "xlm-roberta": ("roberta.", _ROBERTA),
    "camembert": ("roberta.", _ROBERTA), "distilbert": ("distilbert.", _DISTILLED),
    "gemma3": ("language_model.", _INSIDE),
}  # fmt: skip
"""For each model_type, the prefix of names of a model with a head, and patterns with their replacements."""
_PLACES = "embeddings.position_embeddings.weight"
_TYPES = "bert.embeddings.token_type_embeddings.weight"


def respelled(state: Mapping[str, Tensor], model_type: Any = None) -> dict[str, Tensor]:
    """Weights under the names in the tables. `model_type` is the entry of their config.json; without it the names show
    which model the weights belong to, if they have a head.
    """
    kind = model_type if isinstance(model_type, str) and model_type in _SPELLINGS else None
    if kind is None:
        kinds = (
            one for one, (begin, _) in _SPELLINGS.items() if any(name.startswith(begin) for name in state)
        )
        kind = next(kinds, None)
    if kind is None:
        return {_renamed(name, _OLD): tensor for name, tensor in state.items()}
    changes = (*_OLD, *_SPELLINGS[kind][1])
    if "classifier.dense.weight" in state:  # a pooler next to it belongs to pretraining
        state = {name: tensor for name, tensor in state.items() if not name.startswith("roberta.pooler.")}
    named = {_renamed(name, changes): tensor for name, tensor in state.items()}
    unused = library_of(kind).shift
    for name in [name for name in named if name.endswith(_PLACES) and unused]:
        named[name] = named[name][unused:]
    if kind == "distilbert" and (tokens := named.get("bert.embeddings.word_embeddings.weight")) is not None:
        named[_TYPES] = tokens.new_zeros(1, *tokens.shape[1:])  # it has no segments
    return named


def _renamed(name: str, changes: Sequence[tuple[str, str]]) -> str:
    for pattern, new in changes:
        name = re.sub(pattern, new, name)
    return name


# -- text models' weights in transformers' names and shapes and back, by the tables of `names`


def text_to_hf(state: Mapping[str, Tensor], config: TextConfig) -> dict[str, Tensor]:
    """Our state dict in the names and shapes of transformers' model. Raises ConfigError if there is none."""
    library = text_library(config)
    converted = to_library(state, config, library.names(config))
    tokens = converted.get("model.shared.weight")
    if "output_bias" in library.stored_fields and not config.output_bias and tokens is not None:
        # Their model always has a bias. It is written with the table of tokens, because `state` may be one weight.
        converted["final_logits_bias"] = tokens.new_zeros(1, config.vocabulary)
    if isinstance(config, EncoderConfig) and config.head == "none":
        return {name.removeprefix(library.prefix): tensor for name, tensor in converted.items()}
    return converted


def text_pending(state: Mapping[str, Tensor], config: TextConfig) -> list[Pending]:
    """The result of `text_to_hf` as pending tensors: each is converted when it is fetched, and not kept."""

    def made(key: str, name: str) -> Tensor:
        return text_to_hf({name: state[name]}, config)[key]

    return [
        Pending(key, like.dtype, like.shape, partial(made, key, name))
        for name, tensor in state.items()
        for key, like in text_to_hf({name: tensor.to("meta")}, config).items()
    ]


@cache
def text_library(config: TextConfig) -> Library:
    """The entry of transformers' model that computes this configuration. Raises ConfigError if there is none."""
    return library_of(write_text_config(config)["model_type"])


def text_from_hf(state: Mapping[str, Tensor], model: Model) -> tuple[Converted, list[str]]:
    """transformers' state dict in our names and shapes, where `left` lists weights without a place in the model; and
    the names of weights left out because the model does not need them. Names may have the prefix of the base model or
    not. Tensors may be on the meta device; checks that need values are skipped for them.
    """
    library = text_library(model.config)
    heads = "|".join(map(re.escape, (library.prefix or "\0", *library.heads)))
    if library.prefix:
        full = {name: re.sub(rf"^(?!{heads})", library.prefix, name) for name in state}
        if twice := [name for name in full if full[name] != name and full[name] in state]:
            raise ConfigError(f"The weights hold both {twice[0]} and {full[twice[0]]}; keep one of the two.")
        state = {full[name]: tensor for name, tensor in state.items()}
    converted = from_library(state, model.config, library.names(model.config), model.state_dict())
    # transformers' state dicts hold a tied weight under each of its names.
    tokens = converted.state.get("tokens.weight")
    left = [name for name in converted.left if tokens is None or not _equal(state[name], tokens)]
    unneeded = library.ignored.replace("{depth}", str(stacks(model.config)[0].depth))
    free = [name for name in left if re.search(unneeded, name)]
    bias = state.get("final_logits_bias")
    if bias is not None and "final_logits_bias" in free and not bias.is_meta and bool((bias != 0).any()):
        raise ConfigError(
            "The weights have a final_logits_bias that is not zero, but the model has no bias of its outputs; set "
            "model.output_bias to true."
        )
    for name in (name for name in free if name.endswith("embed_positions.weight")):
        _require_sinusoids(name, state[name], stacks(model.config)[0].width)
    return converted._replace(left=[name for name in left if name not in free]), free


def _require_sinusoids(name: str, table: Tensor, width: int) -> None:
    if table.ndim != 2 or table.shape[1] != width:
        raise ConfigError(f"{name} is {tuple(table.shape)}, but the model's positions have {width} features.")
    if table.is_meta:
        return
    expected = Sinusoidal(width).forward(torch.arange(table.shape[0]))
    if not torch.allclose(table.float(), expected, atol=1e-2 if table.dtype != torch.float32 else 1e-4):
        raise ConfigError(
            f"{name} holds no sines and cosines, but the model computes its positions; retrain, or set "
            "model.encoder.positions and model.decoder.positions to learned."
        )


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return one.is_meta or torch.equal(one, other)
