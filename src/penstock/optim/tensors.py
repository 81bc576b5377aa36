"""Tensors in the form that optimizers need: the local shard of a DTensor, and dense memory as one flat range; and
helpers for the steps of our optimizers.

Parameters that `fully_shard` has sharded are torch's DTensors. Each rank works on its own rows, and only the norm
covers all ranks. Nothing here imports torch's DTensor module: without the import, no tensor is a DTensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from penstock.shards import cut_like
from penstock.shards import room as padded_room

MOVED = "_penstock_moved"
"""Attribute of a sharded parameter: a function to call with its new storage, flat and padded, when its rows move."""


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """All parameters that an optimizer trains."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _sharded(tensor: Tensor) -> Any:
    """The tensor, if it is a DTensor; else None."""
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)
    return tensor if kind is not None and isinstance(tensor, kind) else None


def local(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor; any other tensor itself. Call it without recording gradients."""
    sharded = _sharded(tensor)
    return tensor if sharded is None else sharded.to_local()


def whole(parameter: Tensor, part: Tensor) -> Tensor:
    """The DTensor like `parameter` whose local shard is `part`; `part` itself if the parameter is not a DTensor."""
    sharded = _sharded(parameter.detach())
    if sharded is None:
        return part
    shape, stride = sharded.shape, sharded.stride()
    dtensor: Tensor = type(sharded).from_local(
        part, sharded.device_mesh, sharded.placements, run_check=False, shape=shape, stride=stride
    )
    return dtensor


def flat_like(tensor: Tensor, flat: Tensor) -> Tensor:
    """A flat buffer with local rows of tensors that are sharded like `tensor`, as one DTensor."""
    sharded = _sharded(tensor)
    if sharded is None:
        return flat
    from torch.distributed.tensor import Shard

    # Whichever dimension of the tensors is sharded, a flat buffer has only one.
    placements = [placement if placement.is_replicate() else Shard(0) for placement in sharded.placements]
    rows: Tensor = type(sharded).from_local(flat, sharded.device_mesh, placements, run_check=False)
    return rows


def alike(parameter: Tensor, value: Tensor) -> Tensor:
    """`value`, sharded like `parameter`."""
    sharded = _sharded(parameter.detach())
    if sharded is None or _sharded(value) is not None:
        return value
    return whole(parameter, cut_like(sharded, value.to(local(parameter).device)))


def sharing(tensor: Tensor) -> Hashable:
    """The properties that tensors must share to be handled as one: mesh and placements; None for plain tensors."""
    sharded = _sharded(tensor)
    return None if sharded is None else (sharded.device_mesh, tuple(sharded.placements))


def mesh_of(tensor: Tensor) -> Hashable:
    """The mesh that a DTensor is sharded over; None for a plain tensor."""
    sharded = _sharded(tensor)
    return None if sharded is None else sharded.device_mesh


def room(tensor: Tensor) -> int:
    """Number of elements that a rank needs for its rows: padded to the same number on each rank, for all-gather."""
    sharded = _sharded(tensor)
    return tensor.numel() if sharded is None else padded_room(sharded)


def place(parameter: Tensor, view: Tensor, slot: Tensor) -> None:
    """Store a parameter's values in `view`, the beginning of the flat `slot` of `room(parameter)` elements."""
    sharded = _sharded(parameter)
    if sharded is None:
        parameter.data = view
        return
    sharded._local_tensor = view
    moved: Callable[[Tensor], None] | None = getattr(parameter, MOVED, None)
    if moved is not None:
        moved(slot)


def whole_norm(tensors: Sequence[Tensor], norm: Callable[[list[Tensor]], Tensor]) -> Tensor:
    """The 2-norm over all ranks of tensors, some of them sharded; `norm` computes the norm of plain tensors.

    One all-reduce of a single number per kind of sharding, on the device.
    """
    kinds: dict[Hashable, list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(sharing(tensor), []).append(tensor)
    squares = []
    for kind, alike in kinds.items():
        square = norm([local(tensor) for tensor in alike]).square()
        if kind is not None:
            first = _sharded(alike[0])
            for dimension, placement in enumerate(first.placements):
                # `is_shard` is false for rows sharded over two mesh dimensions.
                if not placement.is_replicate():
                    distributed.all_reduce(square, group=first.device_mesh.get_group(dimension))
        squares.append(square)
    device = squares[0].device
    return torch.stack([square.to(device, non_blocking=True) for square in squares]).sum().sqrt()


def dense(tensor: Tensor) -> bool:
    """Whether the elements fill a contiguous range of memory, in any order."""
    extent = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride()), key=lambda pair: pair[1]):
        if size > 1:
            if stride != extent:
                return False
            extent *= size
    return True


def flat(tensor: Tensor) -> Tensor:
    """A dense tensor as a flat view of its memory: (N)."""
    if tensor.dim() == 1:
        return tensor
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def ordered(gradient: Tensor, weight: Tensor) -> Tensor:
    """The gradient in the weight's memory order, copied if it has another."""
    if gradient.is_contiguous() and weight.is_contiguous():
        return gradient
    same = all(g == w for size, g, w in zip(weight.shape, gradient.stride(), weight.stride()) if size > 1)
    return gradient if same else torch.empty_like(weight, dtype=gradient.dtype).copy_(gradient)


def step_scalar(optimizer: Any, name: str, device: torch.device) -> Tensor | None:
    """A scalar that GradScaler or `clipped_step` sets on an optimizer during a step, on a device, if it is set."""
    value: Tensor | None = getattr(optimizer, name, None)
    # A value that is copied from a GPU to the host must have arrived before it is read.
    waits = device.type == "cpu"
    return value if value is None else value.to(device, torch.float32, non_blocking=not waits).view(())


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """The loss that the closure of an optimizer's step returns, with gradients recorded; None without a closure."""
    with torch.enable_grad():
        return closure and closure()


def adamw_step(optimizer: torch.optim.AdamW, closure: Callable[[], Any] | None = None) -> Any:
    """torch's own step of AdamW, for an optimizer of a class derived from it."""
    update: Any = torch.optim.AdamW.step
    # Once an AdamW was built, its step calls the hooks, but the derived class's step already does.
    return (update.__wrapped__ if getattr(update, "hooked", False) else update)(optimizer, closure)
