"""What RemainderAdamW cannot take, refused by name before anything has changed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock.errors import CheckpointError, ConfigError
from penstock.optim import tensors


def check_convertible(optimizer: Optimizer) -> None:
    if not isinstance(optimizer, torch.optim.AdamW):
        raise ConfigError(
            f"The remainder form of master weights is part of AdamW, but the optimizer is "
            f"{type(optimizer).__name__}; use torch.optim.AdamW, or an fp32 copy as master weights."
        )
    for group in optimizer.param_groups:
        check_group(group)
        for parameter in group["params"]:
            check_parameter(parameter)
            if hasattr(parameter.detach(), "to_local"):
                raise ConfigError(
                    f"A Parameter of shape {tuple(parameter.shape)} is sharded already and cannot be turned to bf16 in "
                    "place; shard the bf16 model, build RemainderAdamW over it, and bring the fp32 weights with "
                    "set_fp32_weight."
                )
            if parameter.dtype != torch.float32:
                raise ConfigError(
                    f"A Parameter of shape {tuple(parameter.shape)} is {parameter.dtype}, but its exact fp32 weight "
                    "is needed; convert before the model is cast."
                )


def check_group(group: dict[str, Any]) -> None:
    problems = []
    if group.get("amsgrad"):
        problems.append(
            "RemainderAdamW has no amsgrad; set amsgrad=False, or use an fp32 copy as master weights."
        )
    if group.get("differentiable"):
        problems.append("RemainderAdamW updates in place and cannot be differentiable; leave it out.")
    if isinstance(group.get("lr"), Tensor):
        problems.append("RemainderAdamW takes lr as a number, not as a tensor; pass float(lr).")
    if any(isinstance(beta, Tensor) for beta in group.get("betas", ())):
        problems.append("RemainderAdamW takes betas as numbers, not as tensors; pass floats.")
    if not problems and "betas" in group:
        beta1, beta2 = group["betas"]
        if not (0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0):
            problems.append(f"betas are {group['betas']}, but each must be at least 0 and below 1.")
        problems += [
            f"{name} is {group[name]}, but must be at least 0."
            for name in ("lr", "eps", "weight_decay")
            if name in group and not group[name] >= 0.0
        ]
    if problems:
        raise ConfigError(problems)


def check_parameter(parameter: Tensor) -> None:
    if parameter.dtype not in (torch.bfloat16, torch.float32):
        raise ConfigError(
            f"A Parameter of shape {tuple(parameter.shape)} is {parameter.dtype}; RemainderAdamW updates bf16 weights "
            "(and fp32 ones as they are). fp16 has fewer exponents than fp32, so sixteen bits more do not complete "
            "it: use dtype=bf16, or an fp32 copy as master weights."
        )
    if not tensors.dense(tensors.local(parameter)):
        raise ConfigError(
            f"A Parameter of shape {tuple(parameter.shape)} and strides {tuple(parameter.stride())} has gaps or "
            "overlaps in memory; make it contiguous before building the optimizer."
        )


def stored(parameter: Tensor, name: str, value: Any, dtype: torch.dtype) -> Tensor:
    """An own copy of a stored tensor, laid out like the Parameter."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise CheckpointError(
            f"The stored {name} of a weight of shape {tuple(parameter.shape)} is {shape}; load the state of the same "
            "model."
        )
    if name == "remainder" and value.dtype != torch.int16:
        raise CheckpointError(
            f"The stored remainder of a weight of shape {tuple(parameter.shape)} is {value.dtype} in place of int16, "
            "so its bits are lost; something cast it on the way. Load the state that was saved."
        )
    made = torch.zeros_like(parameter.detach(), dtype=dtype)
    tensors.local(made).copy_(tensors.local(tensors.alike(parameter, value)))
    return made
