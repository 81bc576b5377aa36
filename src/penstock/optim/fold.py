"""Dividing gradients and skipping a step inside an optimizer's own kernel, through the interface of torch's GradScaler,
with workarounds for bugs in torch's kernels. Bugs are detected by trying, not by version."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Optimizer


def folds(optimizer: Optimizer) -> bool:
    """Whether the optimizer's kernel itself divides gradients by `grad_scale` and skips the step on `found_inf`."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and not spoils_momentum(optimizer)


@contextmanager
def folded(
    optimizer: Optimizer, *, grad_scale: Tensor | None = None, found_inf: Tensor | None = None
) -> Iterator[None]:
    """Within this context, a step divides gradients by `grad_scale`, and is skipped if `found_inf` is 1; both 0-d fp32.

    Both are set for one step as the attributes that torch's GradScaler sets on fused optimizers.
    """
    if found_inf is not None:
        begin_momentum(optimizer)
    attributes = {"grad_scale": grad_scale, "found_inf": found_inf}
    attributes = {name: value for name, value in attributes.items() if value is not None}
    for name, value in attributes.items():
        setattr(optimizer, name, value)
    try:
        yield
    finally:
        for name in attributes:
            delattr(optimizer, name)


def steps_by_sgd(optimizer: Optimizer) -> bool:
    """Whether the update is torch's SGD, in flat buffers or not."""
    return issubclass(getattr(optimizer, "_class", type(optimizer)), SGD)


def spoils_momentum(optimizer: Optimizer) -> bool:
    """Whether a skipped fused step would still change the momentum.

    On CUDA torch's fused SGD applies `found_inf` to the weights but not to the momentum buffer, which an overflow then
    fills with infinities (reported by others for torch 2.11; the CPU kernel is correct). With dampening the first step
    differs from all others, so that `begin_momentum` cannot prepare it.
    """
    if not steps_by_sgd(optimizer):
        return False
    return any(
        any(p.is_cuda or (group.get("dampening") and not optimizer.state.get(p)) for p in group["params"])
        for group in optimizer.param_groups
        if group.get("momentum")
    )


def begin_momentum(optimizer: Optimizer) -> None:
    """Create the momentum buffers that the next fused step would create, filled with zeros.

    torch's fused SGD creates a buffer with `empty_like` and lets its kernel fill it, which the kernel does not do in a
    skipped step: an overflow in the first step leaves uninitialised memory. Starting from zeros, the first step has the
    same result, except with dampening; see `spoils_momentum`.
    """
    if not isinstance(optimizer, SGD):
        return
    for group in optimizer.param_groups:
        if not group["momentum"] or not group["fused"] or group["dampening"]:
            continue
        for parameter in group["params"]:
            if parameter.grad is not None and optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.grad)


@cache
def fused_sgd_works(dtype: torch.dtype) -> bool:
    """Whether fused SGD on a CPU updates weights of this dtype.

    Up to torch 2.13 it leaves all but the last few elements of a half-precision tensor unchanged (pytorch issue
    191763).
    """
    weight = Parameter(torch.ones(256, dtype=dtype))
    weight.grad = torch.ones_like(weight)
    SGD([weight], lr=0.5, fused=True).step()
    return bool((weight == 0.5).all())


def loses_updates(optimizer: Optimizer) -> bool:
    """Whether a step of this optimizer would silently not update weights."""
    return steps_by_sgd(optimizer) and any(
        group.get("fused") and any(_broken(p) for p in group["params"]) for group in optimizer.param_groups
    )


def _broken(parameter: Tensor) -> bool:
    half = parameter.dtype in (torch.float16, torch.bfloat16)
    return half and parameter.device.type == "cpu" and not fused_sgd_works(parameter.dtype)
