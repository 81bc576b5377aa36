"""Kernels of torch that do not do what they say, found out by trying them rather than by version."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Optimizer


def steps_by_sgd(optimizer: Optimizer) -> bool:
    """Whether the update is torch's SGD, be it in flat buffers."""
    return issubclass(getattr(optimizer, "_class", type(optimizer)), SGD)


def spoils_momentum(optimizer: Optimizer) -> bool:
    """Whether a fused step that must be skipped would move the momentum all the same.

    On CUDA torch's fused SGD honours `found_inf` for weights and not for the momentum buffer, which an overflow then
    fills with infinities (seen by others with torch 2.11; the CPU's kernel is right).
    """
    if not steps_by_sgd(optimizer):
        return False
    return any(
        group.get("momentum") and any(p.is_cuda for p in group["params"]) for group in optimizer.param_groups
    )


@cache
def fused_sgd_works(dtype: torch.dtype) -> bool:
    """Whether fused SGD on a CPU updates weights of this type.

    Up to torch 2.13 it leaves all of a half-width tensor but the last few numbers as they were (pytorch issue 191763).
    """
    weight = Parameter(torch.ones(256, dtype=dtype))
    weight.grad = torch.ones_like(weight)
    SGD([weight], lr=0.5, fused=True).step()
    return bool((weight == 0.5).all())


def loses_updates(optimizer: Optimizer) -> bool:
    """Whether a step of this optimizer would silently leave weights as they are."""
    return steps_by_sgd(optimizer) and any(
        group.get("fused") and any(_broken(p) for p in group["params"]) for group in optimizer.param_groups
    )


def _broken(parameter: Tensor) -> bool:
    half = parameter.dtype in (torch.float16, torch.bfloat16)
    return half and parameter.device.type == "cpu" and not fused_sgd_works(parameter.dtype)
