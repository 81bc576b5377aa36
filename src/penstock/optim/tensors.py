"""Tensors as an optimizer works on them: the local shard of a DTensor, and dense memory as one flat stretch; and what
the steps of our optimizers share.

Parameters that `fully_shard` has sharded are torch's DTensors. Each rank works on its own rows, and only the norm is
that of all ranks. Nothing here imports that part of torch: while nobody has, no tensor can be a DTensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from penstock.shards import cut_like
from penstock.shards import room as padded_room

MOVED = "_penstock_moved"
"""Attribute of a sharded parameter: called with its new place, flat and padded, when its rows are moved elsewhere."""


def _sharded(tensor: Tensor) -> Any:
    """The tensor, if it is a DTensor; else None."""
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)
    return tensor if kind is not None and isinstance(tensor, kind) else None


def local(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor; any other tensor itself. Call it while no gradients are recorded."""
    sharded = _sharded(tensor)
    return tensor if sharded is None else sharded.to_local()


def whole(parameter: Tensor, part: Tensor) -> Tensor:
    """The DTensor like `parameter` whose shard here is `part`; `part` itself where the parameter is none."""
    sharded = _sharded(parameter.detach())
    if sharded is None:
        return part
    shape, stride = sharded.shape, sharded.stride()
    made: Tensor = type(sharded).from_local(
        part, sharded.device_mesh, sharded.placements, run_check=False, shape=shape, stride=stride
    )
    return made


def flat_like(tensor: Tensor, flat: Tensor) -> Tensor:
    """A flat buffer of rows of tensors that are sharded like `tensor`, as one tensor that is sharded so."""
    sharded = _sharded(tensor)
    if sharded is None:
        return flat
    from torch.distributed.tensor import Shard

    # Whichever dimension of the tensors is sharded, a flat buffer has one.
    placements = [placement if placement.is_replicate() else Shard(0) for placement in sharded.placements]
    rows: Tensor = type(sharded).from_local(flat, sharded.device_mesh, placements, run_check=False)
    return rows


def alike(parameter: Tensor, value: Tensor) -> Tensor:
    """`value`, sharded as `parameter` is."""
    sharded = _sharded(parameter.detach())
    if sharded is None or _sharded(value) is not None:
        return value
    return whole(parameter, cut_like(sharded, value.to(local(parameter).device)))


def sharing(tensor: Tensor) -> Hashable:
    """The properties that tensors must share to be worked on as one: mesh and placements; None for plain ones."""
    sharded = _sharded(tensor)
    return None if sharded is None else (sharded.device_mesh, tuple(sharded.placements))


def mesh_of(tensor: Tensor) -> Hashable:
    """The mesh that a DTensor is sharded over; None for a plain tensor."""
    sharded = _sharded(tensor)
    return None if sharded is None else sharded.device_mesh


def room(tensor: Tensor) -> int:
    """Elements that a rank needs for its rows: the same number on each rank, padded, as all-gather needs it."""
    sharded = _sharded(tensor)
    return tensor.numel() if sharded is None else padded_room(sharded)


def place(parameter: Tensor, view: Tensor, slot: Tensor) -> None:
    """Let a parameter's values lie in `view`, which begins the flat `slot` of `room(parameter)` elements."""
    sharded = _sharded(parameter)
    if sharded is None:
        parameter.data = view
        return
    sharded._local_tensor = view
    moved: Callable[[Tensor], None] | None = getattr(parameter, MOVED, None)
    if moved is not None:
        moved(slot)


def whole_norm(tensors: Sequence[Tensor], norm: Callable[[list[Tensor]], Tensor]) -> Tensor:
    """The 2-norm over all ranks of tensors of which some are sharded; `norm` takes that of plain ones.

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
                if not placement.is_replicate():  # `is_shard` is false of rows that two dimensions share
                    distributed.all_reduce(square, group=first.device_mesh.get_group(dimension))
        squares.append(square)
    device = squares[0].device
    return torch.stack([square.to(device, non_blocking=True) for square in squares]).sum().sqrt()


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
    return gradient if same else torch.empty_like(weight, dtype=gradient.dtype).copy_(gradient)


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """The loss that the closure of an optimizer's step returns, with gradients recorded; None without a closure."""
    with torch.enable_grad():
        return closure and closure()


def adamw_step(optimizer: torch.optim.AdamW, closure: Callable[[], Any] | None = None) -> Any:
    """torch's own step of AdamW, for an optimizer of a class derived from it."""
    update: Any = torch.optim.AdamW.step
    # Once somebody has built an AdamW, its step calls the hooks, as that of the derived class does already.
    return (update.__wrapped__ if getattr(update, "hooked", False) else update)(optimizer, closure)
