"""Quantised models in the layout of the package compressed-tensors, with which transformers opens them.

A linear NAME of transformers' model, with N outputs, K inputs and G groups of inputs, is stored as

    int8          NAME.weight         int8 (N, K)               numbers from −127 to 127
                  NAME.weight_scale   fp32 (N, 1)
                  NAME.input_scale    fp32 (1,)                 unless each token has a scale of its own
    int8_weights  NAME.weight_packed  int32 (N, ⌈K/4⌉)          number + 128, the first in the lowest byte
                  NAME.weight_scale   fp32 (N, 1)
                  NAME.weight_shape   int64 (2,)                N and K
    int4          NAME.weight_packed  int32 (N, ⌈K/8⌉)          number, the first in the lowest four bits
                  NAME.weight_scale   fp32 (N, G)
                  NAME.weight_zero_point  int32 (⌈N/8⌉, G)      the number that is 0, packed along N
                  NAME.weight_shape   int64 (2,)

and config.json says under `quantization_config` which linears these are, by patterns of their names. `models.rounded`
reads them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from penstock.config.formats import StoredFormat
from penstock.config.model import ModelConfig, TextConfig, ViTConfig
from penstock.config.theirs.read import CHANNELS, GROUPS, METHOD
from penstock.errors import ConfigError
from penstock.models.convert.names import text_library, text_to_hf
from penstock.models.convert.vit import to_hf
from penstock.models.rounded import RoundedWeight, packed_words, zero_points

_NUMBER = re.compile(r"\.(\d+)\.")
"""Matches the number of the block in a linear's name."""
Rounded = Mapping[str, tuple[StoredFormat, RoundedWeight]]
_TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
_ONE = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}
_PACKED = "pack-quantized"
_SCHEMES: dict[tuple[StoredFormat, bool], dict[str, Any]] = {
    ("int8", False): {"weights": CHANNELS, "input_activations": _TOKENS, "format": "int-quantized"},
    ("int8", True): {"weights": CHANNELS, "input_activations": _ONE, "format": "int-quantized"},
    ("int8_weights", False): {"weights": CHANNELS, "input_activations": None, "format": _PACKED},
    ("int4", False): {"weights": GROUPS, "input_activations": None, "format": _PACKED},
}
"""The package's settings for a format, keyed by the format and whether all inputs share one scale."""


def compressed_tensors(config: ModelConfig, rounded: Rounded) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The `quantization_config` of a model's config.json, and the tensors of its quantised linears, by the names of
    transformers.

    Raises ConfigError for a linear that the layout cannot hold: one of experts, one that transformers stores
    transposed, or one in 4 bits without a number for zero.
    """
    tensors: dict[str, Tensor] = {}
    names: dict[tuple[StoredFormat, bool], list[tuple[str, ...]]] = defaultdict(list)
    _require_linears(config, rounded)
    for linear, (form, weight) in rounded.items():
        parts = {"numbers": weight.numbers, "scales": weight.scales}
        if form == "int4":
            parts["zeros"] = zero_points(linear, weight)
        # One linear of ours may be several of theirs, each with some of its rows.
        rows = {part: _in_library(config, linear, tensor) for part, tensor in parts.items()}
        for name in rows["numbers"]:
            tensors |= _stored(
                name, form, {part: own[name] for part, own in rows.items()}, weight.input_scale
            )
        names[form, weight.input_scale is not None] += _modules(config, linear, weight.numbers)
    groups = {
        f"group_{number}": {"targets": _patterns(config, modules)} | _SCHEMES[scheme]
        for number, (scheme, modules) in enumerate(names.items())
    }
    layouts = {group["format"] for group in groups.values()}
    # compressed-tensors 0.20 does not load zero points of weights that it is to decompress later.
    at_once = {"dequantize": True} if ("int4", False) in names else {}
    return {
        "quant_method": METHOD,
        "format": layouts.pop() if len(layouts) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [],
        **at_once,
    }, tensors


def _require_linears(config: ModelConfig, rounded: Rounded) -> None:
    problem = ""
    if isinstance(config, TextConfig) and any(
        entry.transposed for entry in text_library(config).names(config).values()
    ):
        model_type = text_library(config).model_type
        problem = f"transformers' {model_type} stores linears transposed, in a class that is not compressed"
    for name, (form, weight) in rounded.items():
        if weight.numbers.ndim > 2:
            problem = f"{name} is of several experts, which the layout does not have"
        elif form == "int8_weights" and weight.numbers.shape[1] % 4:
            problem = f"{name} has {weight.numbers.shape[1]} inputs, which do not fill words of four numbers"
    if problem:
        raise ConfigError(f"{METHOD} cannot hold the model: {problem}. Write values with --to transformers.")


def _in_library(config: ModelConfig, linear: str, tensor: Tensor) -> dict[str, Tensor]:
    """A matrix with one row per output of our linear, as the rows of transformers' linears, by their names."""
    state = {f"{linear}.weight": tensor.float()}
    converted = (
        text_to_hf(state, config) if isinstance(config, TextConfig) else to_hf(state, cast(ViTConfig, config))
    )
    return {
        name.removesuffix(".weight"): rows.to(tensor.dtype)
        for name, rows in converted.items()
        if name.endswith(".weight")
    }


def _stored(
    name: str, form: StoredFormat, parts: Mapping[str, Tensor], input_scale: Tensor | None
) -> dict[str, Tensor]:
    numbers, tensors = parts["numbers"], {f"{name}.weight_scale": parts["scales"].contiguous()}
    if form == "int8":
        tensors[f"{name}.weight"] = numbers.contiguous()
        return tensors if input_scale is None else tensors | {f"{name}.input_scale": input_scale.reshape(1)}
    tensors[f"{name}.weight_shape"] = numbers.new_tensor(numbers.shape, dtype=torch.int64)
    if form == "int8_weights":
        return tensors | {f"{name}.weight_packed": packed_words(numbers.to(torch.int16) + 128, 8)}
    zeros = packed_words(parts["zeros"].t(), 4).t().contiguous()
    return tensors | {f"{name}.weight_packed": packed_words(numbers, 4), f"{name}.weight_zero_point": zeros}


def _modules(config: ModelConfig, linear: str, numbers: Tensor) -> list[tuple[str, ...]]:
    """The linears of transformers' model that correspond to one of ours, each by its name in the file, and by its name
    in the model if that differs."""
    like = torch.empty(numbers.shape, device="meta")
    stored = _in_library(config, linear, like)
    if isinstance(config, ViTConfig):
        others = [
            name.removesuffix(".weight") for name in to_hf({f"{linear}.weight": like}, config, modules=True)
        ]
        return [*zip(stored, others, strict=True)]
    return [(name,) for name in stored]


def _patterns(config: ModelConfig, names: Iterable[tuple[str, ...]]) -> list[str]:
    """Regular expressions that match the linears, with or without the prefix of a model with a head. Names that differ
    only in the number of the block share one."""
    prefix = text_library(config).prefix if isinstance(config, TextConfig) else "vit."
    blocks: dict[tuple[tuple[str, str], ...], list[str]] = defaultdict(list)
    for spellings in names:
        parts = [_NUMBER.split(name.removeprefix(prefix), maxsplit=1) for name in spellings]
        blocks[tuple((before, after) for before, _, after in parts)].append(parts[0][1])
    return [
        rf"re:(.*\.)?({'|'.join(_pattern(*ends, numbers) for ends in spellings)})$"
        for spellings, numbers in blocks.items()
    ]


def _pattern(before: str, after: str, numbers: list[str]) -> str:
    return rf"{re.escape(before)}\.({'|'.join(numbers)})\.{re.escape(after)}"
