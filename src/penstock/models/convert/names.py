"""Weights in the names and shapes of transformers' text models and back, by the tables of `config.theirs.names`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.config.model import TextConfig
from penstock.config.theirs.names import Names, WeightPlaces, stack_of
from penstock.dtypes import FLOATS


def _places(name: str, table: Names) -> tuple[WeightPlaces, tuple[str, ...]]:
    """The entry for one of our parameters, and the names of theirs."""
    number = re.search(r"\.blocks\.(\d+)\.", name)
    pattern = re.sub(r"\.blocks\.\d+\.", ".blocks.{i}.", name)
    i = number.group(1) if number else ""
    if pattern in table:
        return table[pattern], tuple(each.replace("{i}", i) for each in table[pattern].names)
    module, _, kind = pattern.rpartition(".")
    # Blocks that differ from the others have entries of their own.
    entry = table.get(name.rpartition(".")[0]) or table[module]
    return entry, tuple(f"{each.replace('{i}', i)}.{kind}" for each in entry.names)


def to_library(state: Mapping[str, Tensor], config: TextConfig, table: Names) -> dict[str, Tensor]:
    """Our state dict in transformers' names and shapes; what is tied appears once."""
    converted: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if tensor.is_floating_point() and (name != "head.weight" or not shares_head(config)):
            converted |= _in_library(name, tensor, config, table)
    return converted


def _in_library(name: str, tensor: Tensor, config: TextConfig, table: Names) -> dict[str, Tensor]:
    """One of our weights in transformers' names and shapes."""
    entry, names = _places(name, table)
    if entry.form == "experts":
        names = tuple(each.replace("{e}", str(e)) for e in range(len(tensor)) for each in names)
    parts = _split(tensor, name, entry, config)
    if len(names) == 1 and len(parts) > 1:
        parts = [torch.cat(parts)]
    if names == ("final_logits_bias",):
        parts = [parts[0][None]]
    turned = (part.T if entry.transposed and part.ndim == 2 else part for part in parts)
    return dict(zip(names, turned))


class Converted(NamedTuple):
    """transformers' state dict in our names and shapes."""

    state: dict[str, Tensor]
    """A name of ours for which theirs lack a weight, or have one that does not fit, is absent."""
    misfits: dict[str, str]
    """For a name of ours, the sentence about the weight of theirs that does not fit."""
    left: list[str]
    """Which of theirs were not used."""


def from_library(
    state: Mapping[str, Tensor], config: TextConfig, table: Names, expected: Mapping[str, Tensor]
) -> Converted:
    """transformers' state dict in our names and shapes, `expected` being ours. Each weight is held to the shape and
    the type that it must have there, before anything is made of it.
    """
    weights, misfits, used = dict[str, Tensor](), dict[str, str](), set[str]()
    for name, tensor in expected.items():
        if name == "head.weight" and shares_head(config):
            continue
        if not tensor.is_floating_point():
            weights[name] = torch.zeros_like(tensor)  # visits of experts, of which nothing is known
            continue
        wanted = _in_library(name, tensor.to("meta"), config, table)
        if not wanted.keys() <= state.keys():
            continue
        used |= wanted.keys()
        wrong = [problem for key in wanted if (problem := misfit(key, state[key], wanted[key]))]
        if wrong:
            misfits[name] = wrong[0]
            continue
        entry, _ = _places(name, table)
        parts = [state[key] for key in wanted]
        parts = [part.T if entry.transposed and part.ndim == 2 else part for part in parts]
        weights[name] = _joined(parts, name, entry, config)
    if shares_head(config) and "tokens.weight" in weights:
        weights["head.weight"] = weights["tokens.weight"]
    elif shares_head(config) and "tokens.weight" in misfits:
        misfits["head.weight"] = misfits["tokens.weight"]
    return Converted(weights, misfits, [name for name in state if name not in used])


def misfit(name: str, given: Tensor, expected: Tensor) -> str | None:
    """Why a weight cannot be the model's, as a sentence. One type of floating-point numbers may become another;
    anything else would be cast without a word.
    """
    if given.shape != expected.shape:
        return f"{name} is {tuple(given.shape)}, but the model's is {tuple(expected.shape)}."
    if given.is_complex() or (given.dtype in FLOATS) is not expected.is_floating_point():
        return f"{name} is of {given.dtype}, but the model's is of {expected.dtype}; give floating-point weights."
    return None


def shares_head(config: TextConfig) -> bool:
    """Whether the weight of the head is the table of tokens."""
    return bool(config.graph.tied)


def _sizes(name: str, config: TextConfig) -> tuple[int, list[int]]:
    """Features of a head, and how many heads queries, keys and values have for each head of keys."""
    stack = stack_of(config, name.partition(".")[0])
    return stack.head_width, [1, 1] if ".cross.kv." in name else [stack.heads // stack.kv, 1, 1]


def _split(tensor: Tensor, name: str, entry: WeightPlaces, config: TextConfig) -> list[Tensor]:
    if entry.unused:
        return [torch.cat([tensor.new_zeros(entry.unused, tensor.shape[1]), tensor])]
    if entry.form == "rows":
        return list(tensor.chunk(len(entry.names)))
    if entry.form == "experts":
        return [part for one in tensor.unbind(0) for part in one.chunk(len(entry.names))]
    if entry.form == "same":
        return [tensor]
    features, each = _sizes(name, config)
    groups = tensor.view(-1, sum(each), features, *tensor.shape[1:]).split_with_sizes(each, dim=1)
    return [part.flatten(0, 2).contiguous() for part in groups]


def _joined(parts: list[Tensor], name: str, entry: WeightPlaces, config: TextConfig) -> Tensor:
    if entry.unused:
        return parts[0][entry.unused :]
    if entry.form == "rows":
        return torch.cat(parts)
    if entry.form == "experts":
        count = len(entry.names)
        return torch.stack([torch.cat(parts[at : at + count]) for at in range(0, len(parts), count)])
    if entry.form == "same":
        return parts[0][0] if entry.names == ("final_logits_bias",) else parts[0]
    features, each = _sizes(name, config)
    if len(parts) == 1:
        heads = parts[0].shape[0] // features // sum(each)
        parts = list(parts[0].split_with_sizes([heads * n * features for n in each]))
    groups = [part.reshape(-1, n, features, *part.shape[1:]) for part, n in zip(parts, each)]
    return torch.cat(groups, dim=1).flatten(0, 2)


def left_over(names: list[str], ignored: str) -> tuple[list[str], list[str]]:
    """The weights that no module of ours takes: those that may be left out, by a regular expression, and the others."""
    free = [name for name in names if re.search(ignored, name)]
    return free, [name for name in names if name not in free]
