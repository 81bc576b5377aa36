"""Sharded tensors as an optimizer sees them: each rank works on its own rows, and only the norm is everybody's.

Parameters that `fully_shard` has shared out are torch's DTensors. Nothing here imports that part of torch: while nobody
has, no tensor can be one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from penstock.optim.layout import local

MOVED = "_penstock_moved"
"""Attribute of a sharded parameter: called with its new place, flat and padded, when its rows are moved elsewhere."""


def _sharded(tensor: Tensor) -> Any:
    """The tensor as a DTensor; None where it is none."""
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)
    return tensor if kind is not None and isinstance(tensor, kind) else None


def sharing(tensor: Tensor) -> Hashable:
    """What tensors must share to be worked on as one: their mesh and how they lie on it; None for plain ones."""
    sharded = _sharded(tensor)
    return None if sharded is None else (sharded.device_mesh, tuple(sharded.placements))


def room(tensor: Tensor) -> int:
    """Elements that a rank needs for its rows: as many on each, whoever has fewer is padded, as all-gather wants it."""
    sharded = _sharded(tensor)
    if sharded is None:
        return tensor.numel()
    parts = 1
    for size, placement in zip(sharded.device_mesh.shape, sharded.placements):
        parts *= size if placement.is_shard() else 1
    if any(placement.is_shard() and placement.dim != 0 for placement in sharded.placements):
        return local(tensor).numel()
    rows = int(sharded.shape[0]) if sharded.ndim else 1
    return -(-rows // parts) * int(sharded.numel() // max(rows, 1))


def flat_like(tensor: Tensor, flat: Tensor) -> Tensor:
    """A flat buffer of rows of tensors that lie like `tensor`, as one tensor that is sharded so."""
    sharded = _sharded(tensor)
    if sharded is None:
        return flat
    made: Tensor = type(sharded).from_local(flat, sharded.device_mesh, sharded.placements, run_check=False)
    return made


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
                if placement.is_shard():
                    distributed.all_reduce(square, group=first.device_mesh.get_group(dimension))
        squares.append(square)
    device = squares[0].device
    return torch.stack([square.to(device, non_blocking=True) for square in squares]).sum().sqrt()
