"""Text models' weights in transformers' names and shapes and back, by the tables of `names`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, partial

import torch
from torch import Tensor

from penstock.config.model import EncoderConfig, TextConfig, stacks
from penstock.config.theirs.libraries import Library
from penstock.config.theirs.text import library_of, write_text_config
from penstock.errors import ConfigError
from penstock.models.convert.names import Converted, from_library, left_over, to_library
from penstock.models.model import Model
from penstock.models.positions import Sinusoidal
from penstock.tensorfile import Pending


def text_to_hf(state: Mapping[str, Tensor], config: TextConfig) -> dict[str, Tensor]:
    """Our state dict as transformers' model of this configuration is stored. Raises ConfigError if there is none."""
    library = text_library(config)
    converted = to_library(state, config, library.names(config))
    tokens = converted.get("model.shared.weight")
    if "output_bias" in library.own and not config.output_bias and tokens is not None:
        # Their model always has a bias. It goes with the table of tokens, because `state` may be one weight.
        converted["final_logits_bias"] = tokens.new_zeros(1, config.vocabulary)
    if isinstance(config, EncoderConfig) and config.head == "none":
        return {name.removeprefix(library.prefix): tensor for name, tensor in converted.items()}
    return converted


def text_pending(state: Mapping[str, Tensor], config: TextConfig) -> list[Pending]:
    """The result of `text_to_hf`, each weight of which is made of ours when it is fetched, and not kept."""

    def made(key: str, name: str) -> Tensor:
        return text_to_hf({name: state[name]}, config)[key]

    return [
        Pending(key, like.dtype, like.shape, partial(made, key, name))
        for name, tensor in state.items()
        for key, like in text_to_hf({name: tensor.to("meta")}, config).items()
    ]


@cache
def text_library(config: TextConfig) -> Library:
    """The library of transformers whose model it is. Raises ConfigError if there is none."""
    return library_of(write_text_config(config)["model_type"])


def text_from_hf(state: Mapping[str, Tensor], model: Model) -> tuple[Converted, list[str]]:
    """transformers' state dict in our names and shapes, whose `left` have no place in the model; and those of theirs
    that were left out because the model does not need them. With or without the prefix of the base model.

    Meta tensors do as well as real ones: what only values can tell is then taken to be right.
    """
    library = text_library(model.config)
    heads = "|".join(map(re.escape, (library.prefix or "\0", *library.heads)))
    if library.prefix:
        full = {name: re.sub(rf"^(?!{heads})", library.prefix, name) for name in state}
        if twice := [name for name in full if full[name] != name and full[name] in state]:
            raise ConfigError(f"The weights hold both {twice[0]} and {full[twice[0]]}; keep one of the two.")
        state = {full[name]: tensor for name, tensor in state.items()}
    converted = from_library(state, model.config, library.names(model.config), model.state_dict())
    # transformers' state dicts hold what is tied under each of its names.
    tokens = converted.state.get("tokens.weight")
    left = [name for name in converted.left if tokens is None or not _equal(state[name], tokens)]
    free, others = left_over(left, library.ignored)
    bias = state.get("final_logits_bias")
    if bias is not None and "final_logits_bias" in free and not bias.is_meta and bool((bias != 0).any()):
        raise ConfigError(
            "The weights have a final_logits_bias that is not zero, but the model has no bias of its outputs; set "
            "model.output_bias to true."
        )
    for name in (name for name in free if name.endswith("embed_positions.weight")):
        _require_sinusoids(name, state[name], stacks(model.config)[0].width)
    return converted._replace(left=others), free


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
