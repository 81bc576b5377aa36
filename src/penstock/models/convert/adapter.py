"""Adapters alone, in peft's format: a few megabytes, for users who have the base weights already."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from penstock.config.model import ModelConfig, TextConfig
from penstock.config.run import Lora
from penstock.errors import ConfigError
from penstock.models.convert.names import text_to_hf
from penstock.models.lora import FIRST, SECOND, scale_of

_PEFT = "base_model.model."


def adapter_files(
    state: Mapping[str, Tensor], config: ModelConfig, lora: Lora, base: str | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of `adapter_model.safetensors` and the values of `adapter_config.json`, for the adapters in a state
    dict: in transformers' names if it has such a model, else in Penstock's. If one of our linears is several linears
    there, each gets its rows of B, and all of A. `base` names the weights that the adapters were trained with.
    """
    tensors, modules, turned = dict[str, Tensor](), list[str](), False
    for key in (key for key in state if key.endswith(f".{SECOND}.weight")):
        name = key.removesuffix(f".{SECOND}.weight")
        first, second = state[f"{name}.{FIRST}.weight"], state[key]
        parts, transposed = _in_their_names(name, second, config)
        turned |= transposed
        for module, rows in parts.items():
            modules.append(module)
            tensors[f"{_PEFT}{module}.lora_A.weight"] = first
            tensors[f"{_PEFT}{module}.lora_B.weight"] = rows.contiguous()
    values = {
        "peft_type": "LORA", "base_model_name_or_path": base, "r": lora.rank, "lora_alpha": lora.rank * scale_of(lora),
        "lora_dropout": lora.dropout, "target_modules": modules, "fan_in_fan_out": turned, "bias": "none",
        "inference_mode": True,
    }  # fmt: skip
    return tensors, values


def _in_their_names(name: str, second: Tensor, config: ModelConfig) -> tuple[dict[str, Tensor], bool]:
    """The rows of B (out, rank) keyed by the linear that they adapt, and whether its weight is stored as (in, out)."""
    if isinstance(config, TextConfig):
        with suppress(ConfigError):  # transformers has no such model
            weight = f"{name}.weight"
            converted = text_to_hf({weight: second}, config)
            inputs = sum(second.shape) + 1  # more than a linear has outputs
            like = text_to_hf({weight: torch.empty(len(second), inputs, device="meta")}, config)
            turned = any(len(each) == inputs for each in like.values())
            rows = {
                key.removesuffix(".weight"): part.T if turned else part for key, part in converted.items()
            }
            return rows, turned
    return {name: second}, False
