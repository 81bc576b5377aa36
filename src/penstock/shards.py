"""The part of a whole tensor that this rank has, if several ranks shard it as a DTensor.

A dimension of the mesh cuts one dimension of the tensor, as `torch.chunk` does. Tensor or expert parallelism cuts
first, and a rank's part is cut again by `fully_shard`. If several matrices are concatenated in a weight, such as a gate
and an up projection, tensor parallelism cuts each of them, so that a rank's part is several boxes of the whole. In
torch's words that is a `_StridedShard` on the mesh dimension `tp`, with one piece per matrix.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

TENSOR, EXPERT = "tp", "ep"
FIRST = (TENSOR, EXPERT)
"""The mesh dimensions that cut first: ranks that split layers, and ranks that together hold every expert once."""


@dataclass(frozen=True, slots=True)
class Cut:
    """One mesh dimension's cut of a tensor's dimension `dim` into `count` parts; this rank has part `index`."""

    mesh_dim: int
    dim: int
    count: int
    index: int
    pieces: int = 1
    """Number of equal matrices along `dim`; each is cut."""

    def parts(self, size: int, index: int | None = None) -> list[tuple[int, int]]:
        """Start and length, piece by piece, of the part of `size` elements at `index` (default: this rank's)."""
        index = self.index if index is None else index
        whole = size // self.pieces
        step = -(-whole // self.count)
        start = min(index * step, whole)
        return [(piece * whole + start, min(step, whole - start)) for piece in range(self.pieces)]

    def length(self, size: int, index: int | None = None) -> int:
        """Number of elements, out of `size`, in the part at `index`."""
        return sum(length for _, length in self.parts(size, index))

    def of(self, tensor: Tensor) -> Tensor:
        """This rank's part of a tensor that has not been cut by this mesh dimension yet; it may share memory."""
        parts = [
            tensor.narrow(self.dim, start, length) for start, length in self.parts(tensor.shape[self.dim])
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


class Box(NamedTuple):
    """A part of the whole, and its start in this rank's part."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    starts: tuple[int, ...]

    def within(self, local: Tensor) -> Tensor:
        """A view of the box in this rank's part."""
        for dim, (start, size) in enumerate(zip(self.starts, self.sizes)):
            local = local.narrow(dim, start, size)
        return local


def cuts(tensor: Any) -> list[Cut]:
    """The cuts of a DTensor, in the order in which they were made."""
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    place = mesh.get_coordinate() or (0,) * mesh.ndim
    result = []
    for number, (name, placement) in enumerate(zip(names, tensor.placements)):
        if not (placement.is_replicate() or placement.is_partial()):
            pieces = int(getattr(placement, "split_factor", 1)) if name in FIRST else 1
            result.append(Cut(number, placement.dim, mesh.size(number), place[number], pieces))
    return sorted(result, key=lambda cut: names[cut.mesh_dim] not in FIRST)


def cut_like(tensor: Any, whole: Tensor) -> Tensor:
    """This rank's part of `whole`, cut like the DTensor; a contiguous copy."""
    for cut in cuts(tensor):
        whole = cut.of(whole)
    return whole.clone(memory_format=torch.contiguous_format)


def boxes(tensor: Any) -> Iterator[Box]:
    """The non-empty parts of the whole that a DTensor has on this rank."""
    runs = [[(0, size)] for size in tensor.shape]
    for cut in cuts(tensor):
        runs[cut.dim] = _chosen(runs[cut.dim], cut)
    for chosen in itertools.product(*(list(_placed(each)) for each in runs)):
        yield Box(*(tuple(part[i] for part in chosen) for i in range(3)))


def _chosen(runs: Sequence[tuple[int, int]], cut: Cut) -> list[tuple[int, int]]:
    """This rank's part, after a cut, of runs of indices, as runs of the whole."""
    remaining = []
    for start, length in cut.parts(sum(size for _, size in runs)):
        before = 0
        for first, size in runs:
            low, high = max(start, before), min(start + length, before + size)
            if low < high:
                remaining.append((first + low - before, high - low))
            before += size
    return remaining


def _placed(runs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Offset in the whole, length, and start here of each run."""
    here = 0
    for offset, length in runs:
        yield offset, length, here
        here += length


def room(tensor: Any) -> int:
    """Elements that `fully_shard` gathers from each rank for a DTensor: the size of the largest part, to which all are
    padded.
    """
    shape = list(tensor.shape)
    names = tensor.device_mesh.mesh_dim_names or ()
    for cut in cuts(tensor):
        split = bool(names) and names[cut.mesh_dim] in FIRST
        shape[cut.dim] = cut.length(shape[cut.dim], cut.index if split else 0)
    return torch.Size(shape).numel()


@torch.no_grad()
def whole_of(tensor: Tensor) -> Tensor:
    """A DTensor as a whole tensor; any other tensor itself. All its ranks must call this."""
    sharded: Any = tensor
    if not hasattr(sharded, "placements"):
        return tensor
    part: Tensor = sharded.to_local()
    for cut, size in reversed(_sized_cuts(sharded)):
        part = _united(part, cut, size, sharded.device_mesh.get_group(cut.mesh_dim))
    return part


def _sized_cuts(tensor: Any) -> list[tuple[Cut, int]]:
    """A DTensor's cuts, each with the local size of its dimension before the cut."""
    sized, shape = [], list(tensor.shape)
    for cut in cuts(tensor):
        sized.append((cut, shape[cut.dim]))
        shape[cut.dim] = cut.length(shape[cut.dim])
    return sized


def _place_of(owner: int, tensor: Any) -> list[int]:
    """Index in each cut of rank `owner`, out of the ranks that share a DTensor."""
    place: list[int] = []
    for cut in reversed(cuts(tensor)):
        owner, index = divmod(owner, cut.count)
        place.insert(0, index)
    return place


def gather_to(tensor: Any, part: Tensor, *, owner: int) -> Tensor | None:
    """Gather parts like a DTensor's own on its rank `owner`: the whole there, None elsewhere. All its ranks must call
    this."""
    mesh = tensor.device_mesh
    for (cut, size), index in zip(reversed(_sized_cuts(tensor)), reversed(_place_of(owner, tensor))):
        part = _united(part, cut, size, mesh.get_group(cut.mesh_dim), owner=index)
        if cut.index != index:
            return None
    return part


def scatter_from(tensor: Any, whole: Tensor | None, part: Tensor, *, owner: int) -> Tensor:
    """This rank's part of the `whole` on rank `owner`, cut like a DTensor, in the shape and type of `part`. All its
    ranks must call this."""
    shape, to = list(tensor.shape), _place_of(owner, tensor)
    here = [cut.index for cut in cuts(tensor)]
    for number, (cut, size) in enumerate(_sized_cuts(tensor)):
        lengths = [cut.length(size, index) for index in range(cut.count)]
        if here[number + 1 :] == to[number + 1 :]:  # the other ranks receive theirs by a later cut
            shape[cut.dim] = max(lengths)
            given, parts = part.new_empty(shape), None
            if whole is not None:
                parts = [given.new_zeros(shape) for _ in lengths]
                for index, (one, length) in enumerate(zip(parts, lengths)):
                    one.narrow(cut.dim, 0, length).copy_(replace(cut, index=index).of(whole))
            group = tensor.device_mesh.get_group(cut.mesh_dim)
            distributed.scatter(given, parts, group=group, group_src=to[number])
            whole = given.narrow(cut.dim, 0, lengths[cut.index])
        shape[cut.dim] = lengths[cut.index]
    assert whole is not None
    return whole


def _united(
    part: Tensor, cut: Cut, size: int, group: distributed.ProcessGroup, *, owner: int | None = None
) -> Tensor:
    """The concatenated parts of a dimension of `size` elements from all ranks of a cut; with `owner`, only there."""
    lengths = [cut.length(size, index) for index in range(cut.count)]
    shape = list(part.shape)
    shape[cut.dim] = max(lengths)
    padded = part.new_zeros(shape)
    padded.narrow(cut.dim, 0, part.shape[cut.dim]).copy_(part)
    every = [torch.empty_like(padded) for _ in lengths] if owner in (None, cut.index) else []
    if owner is None:
        distributed.all_gather(every, padded, group=group)
    else:
        distributed.gather(padded, every or None, group=group, group_dst=owner)
        if not every:
            return part
    every = [each.narrow(cut.dim, 0, length) for each, length in zip(every, lengths)]
    pieces = [each.chunk(cut.pieces, cut.dim) if cut.pieces > 1 else (each,) for each in every]
    return torch.cat([parts[piece] for piece in range(cut.pieces) for parts in pieces], cut.dim)
