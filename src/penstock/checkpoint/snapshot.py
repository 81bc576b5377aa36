"""A snapshot of a run, which a checkpoint saves, and the pieces of its tensors that a rank holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from penstock.checkpoint.tree import pack
from penstock.shards import boxes

LOCAL = "local"
RESERVED = {LOCAL, "manifest", "tensors", "state", "config"}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a run at one step, from one rank's view.

    `weights` maps sets of tensors by Penstock's parameter names: `weights` itself, and `ema` if an average is kept.
    `state` maps names to trees (see `penstock.checkpoint.tree`) that are the same on all ranks: optimizer, scaler,
    loader position and so on; the optimizer's in the form of `by_name`, so that it can be read on another number of
    ranks. Tensors of both may be DTensors, of which each rank saves and reads its own part; any other tensor must be
    the same on all ranks.

    `local` is a tree of this rank alone, such as its random generators. It cannot be split over a different number of
    ranks; then it is empty after loading.
    """

    step: int
    weights: Mapping[str, Mapping[str, Tensor]]
    state: Mapping[str, Any]
    config: Mapping[str, Any]
    plan: str = ""
    local: Mapping[str, Any] = field(default_factory=dict)
    world: int = 1
    """Number of ranks that saved it. Set by loading; saving uses the actual number."""


@dataclass(frozen=True, slots=True)
class Piece:
    """This rank's part of a tensor of `shape`: `values` begins at `offsets` in it. A whole tensor is one piece.

    It needs no device mesh, so a copy on the host can be saved instead of a tensor on a device.
    """

    values: Tensor
    shape: torch.Size
    offsets: torch.Size


def pieces_of(tensor: Tensor, local: Tensor | None = None) -> list[Piece]:
    """This rank's parts of `tensor`, sharing its memory; for a DTensor `local` may replace its own local tensor. Raises
    TypeError for a DTensor whose values are not final (a Partial placement)."""
    if not isinstance(tensor, DTensor):
        return [Piece(tensor.detach(), tensor.shape, torch.Size([0] * tensor.ndim))]
    if any(placement.is_partial() for placement in tensor.placements):
        raise TypeError(
            f"A DTensor of placements {tensor.placements} has no values to save; redistribute it."
        )
    here = tensor.to_local().detach() if local is None else local
    return [Piece(box.within(here), tensor.shape, torch.Size(box.offsets)) for box in boxes(tensor)]


@dataclass(frozen=True, slots=True)
class Parts:
    """A snapshot split up: its tensors as pieces by `set/name`, the rest as JSON documents."""

    step: int
    plan: str
    pieces: Mapping[str, Sequence[Piece]]
    config: Mapping[str, Any]
    document: Mapping[str, Any]
    """State common to all ranks; rank 0 writes it."""
    local: Mapping[str, Any]
    """State of this rank alone."""

    def whole_bytes(self) -> int:
        """Bytes of all tensors as whole ones."""
        firsts = [pieces[0] for pieces in self.pieces.values() if pieces]
        return sum(piece.shape.numel() * piece.values.element_size() for piece in firsts)


def take_apart(snapshot: Snapshot, rank: int = 0) -> Parts:
    """Split `snapshot` of rank `rank`; nothing is copied."""
    pieces = {
        f"{group}/{name}": pieces_of(tensor)
        for group, tensors in snapshot.weights.items()
        for name, tensor in tensors.items()
    }
    state: dict[str, Any] = {}
    for name, tree in snapshot.state.items():
        state[name], tensors = pack(tree, name)
        pieces |= {f"{name}/{path}": pieces_of(tensor) for path, tensor in tensors.items()}
    local, tensors = pack(dict(snapshot.local), str(rank))
    pieces |= {f"{LOCAL}/{path}": pieces_of(tensor) for path, tensor in tensors.items()}
    clashing = RESERVED & {*snapshot.weights, *snapshot.state} | {*snapshot.weights} & {*snapshot.state}
    if clashing:
        raise ValueError(
            f"A checkpoint has files of its own, or two parts, called {', '.join(sorted(clashing))}."
        )
    document = {
        "weights": {name: list(tensors) for name, tensors in snapshot.weights.items()},
        "state": state,
    }
    return Parts(snapshot.step, snapshot.plan, pieces, dict(snapshot.config), document, local)
