"""Tensors as the memory they are: shards of DTensors that lie here, and flat views of dense tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def local(tensor: Tensor) -> Tensor:
    """The shard of a DTensor that lies here; any other tensor itself. To be called without gradients being recorded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(parameter: Tensor, local: Tensor) -> Tensor:
    """`local` as a DTensor like `parameter`, if that is one."""
    whole: Any = parameter.detach()
    if not hasattr(whole, "to_local"):
        return local
    shape, stride = whole.shape, whole.stride()
    mesh, placements = whole.device_mesh, whole.placements
    made: Tensor = type(whole).from_local(
        local, mesh, placements, run_check=False, shape=shape, stride=stride
    )
    return made


def alike(parameter: Tensor, value: Tensor) -> Tensor:
    """`value`, shared out over devices as `parameter` is."""
    whole: Any = parameter.detach()
    if hasattr(whole, "to_local") and not hasattr(value, "to_local"):
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(value.to(local(parameter).device), whole.device_mesh, whole.placements)
    return value


def dense(tensor: Tensor) -> bool:
    """Whether the elements fill a stretch of memory, in whatever order."""
    extent = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride()), key=lambda pair: pair[1]):
        if size > 1:
            if stride != extent:
                return False
            extent *= size
    return True


def flat(tensor: Tensor) -> Tensor:
    """A dense tensor as the stretch of memory it is: (N)."""
    if tensor.dim() == 1:
        return tensor
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def ordered(gradient: Tensor, weight: Tensor) -> Tensor:
    """The gradient in the weight's order of memory, copied if it has another."""
    if gradient.is_contiguous() and weight.is_contiguous():
        return gradient
    same = all(g == w for size, g, w in zip(weight.shape, gradient.stride(), weight.stride()) if size > 1)
    if same:
        return gradient
    return torch.empty_like(weight, dtype=gradient.dtype).copy_(gradient)
