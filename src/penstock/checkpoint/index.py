"""The index of a checkpoint, `tensors.json`: which file holds each part of each tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from penstock.boundary.files import quoted
from penstock.boundary.weights import TensorInfo, read_header
from penstock.checkpoint.manifest import refusal
from penstock.checkpoint.snapshot import Piece
from penstock.tensorfile import DTYPES, dtype_name


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, stored in the files of one rank."""

    rank: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: its dtype by safetensors' name, its shape, and the boxes that together fill it exactly."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch's object."""
        return DTYPES[self.dtype]


_CELLS = 1 << 22
"""Most cells of the grid on which a tensor's boxes are marked. Layouts cut tensors by a grid, so they need few."""

Index = Mapping[str, Entry]
"""Entries by `set/name`."""


def file_name(group: str, rank: int, world: int, suffix: str = "safetensors") -> str:
    """The file in which rank `rank` of `world` keeps its part of the set `group`."""
    return f"{group}.{suffix}" if world == 1 else f"{group}-{rank}-of-{world}.{suffix}"


def key_of(name: str, entry: Entry, chunk: Chunk) -> str:
    """Name of a chunk in its file; for a whole tensor its own name."""
    plain = name.partition("/")[2]
    return plain if chunk.sizes == entry.shape else f"{plain}@{','.join(map(str, chunk.offsets))}"


class Held(NamedTuple):
    """A box of a tensor that a rank holds."""

    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def held_pieces(pieces: Mapping[str, Sequence[Piece]]) -> dict[str, list[Held]]:
    """The pieces of each tensor that this rank holds, without empty ones, such as the fourth rank's of 3 rows. Raises
    TypeError for a dtype that checkpoints do not support."""
    return {
        name: [
            Held(
                dtype_name(name, piece.values.dtype),
                tuple(piece.shape),
                tuple(piece.offsets),
                tuple(piece.values.shape),
            )
            for piece in boxes
            if piece.values.numel() > 0 or piece.shape.numel() == 0
        ]
        for name, boxes in pieces.items()
    }


def assign_chunks(ranks: Sequence[Mapping[str, Sequence[Held]]]) -> dict[str, Entry]:
    """Assign each piece to a rank that writes it, given the pieces that each rank holds. A piece that several ranks
    hold is written once, by the rank with the fewest bytes to write so far. Raises ValueError if the pieces do not fill
    a tensor, or ranks hold different tensors under one name."""
    holders: dict[str, dict[Held, list[int]]] = {}
    for rank, pieces in enumerate(ranks):
        for name, held_pieces in pieces.items():
            for piece in held_pieces:
                holders.setdefault(name, {}).setdefault(piece, []).append(rank)
    load = [0] * len(ranks)
    index = {}
    for name, boxes in holders.items():
        chunks = []
        for box, candidates in boxes.items():
            writer = min(candidates, key=load.__getitem__)
            load[writer] += math.prod(box.sizes) * DTYPES[box.dtype].itemsize
            chunks.append(Chunk(writer, box.offsets, box.sizes))
        first = next(iter(boxes))
        if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(first.shape):
            raise ValueError(
                f"The ranks do not hold the tensor '{name}' of shape {first.shape} exactly once."
            )
        index[name] = Entry(first.dtype, first.shape, tuple(chunks))
    return index


def to_json(index: Index) -> dict[str, Any]:
    """The index in the form in which it is written; a chunk is [rank, offsets, sizes]."""
    return {
        name: {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "chunks": [[chunk.rank, chunk.offsets, chunk.sizes] for chunk in entry.chunks],
        }
        for name, entry in index.items()
    }


def read_index(path: Path, document: Mapping[str, Any], files: Iterable[str], world: int) -> dict[str, Entry]:
    """The index of the checkpoint directory `path`, checked against the headers of its tensor files.

    Every chunk must be in a file that the manifest lists, with the dtype and shape that the index states. Every tensor
    must be filled exactly once. Every tensor in a file must be listed. So no more memory is ever allocated than there
    are bytes on the disk. Raises CheckpointError if one of these conditions is violated.
    """
    unlisted = {
        (file, key): info
        for file in files
        if file.endswith(".safetensors")
        for key, info in read_header(path / file, remedy="").items()
    }
    index = {}
    for name, value in document.items():
        try:
            entry = _entry(value)
            problem = _problem(name, entry, world, unlisted)
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
            problem = "is malformed"
        if problem:
            raise refusal(path, f"the index's entry for {quoted(name)} {problem}.")
        index[name] = entry
    if unlisted:
        file, key = min(unlisted)
        raise refusal(path, f"{file} holds '{key}', which the index does not list.")
    return index


def _entry(value: Any) -> Entry:
    def whole(numbers: Any) -> tuple[int, ...]:
        if len(numbers) > 64 or not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError
        return tuple(numbers)

    chunks = tuple(
        Chunk(whole([rank])[0], whole(offsets), whole(sizes)) for rank, offsets, sizes in value["chunks"]
    )
    if value["dtype"] not in DTYPES:
        raise ValueError
    return Entry(value["dtype"], whole(value["shape"]), chunks)


def _problem(name: str, entry: Entry, world: int, unlisted: dict[tuple[str, str], TensorInfo]) -> str | None:
    """The fault of an entry, or None. Removes its chunks from `unlisted`, the tensors of files by file and name."""
    for chunk in entry.chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(entry.shape) or chunk.rank >= world:
            return "is malformed"
        if any(o + s > n for o, s, n in zip(chunk.offsets, chunk.sizes, entry.shape)):
            return "has a chunk beyond its shape"
        file, key = file_name(name.partition("/")[0], chunk.rank, world), key_of(name, entry, chunk)
        info = unlisted.pop((file, key), None)
        if info is None:
            return f"names a chunk {quoted(key)} that {quoted(file)} does not hold"
        if (info.dtype, info.shape) != (entry.dtype, chunk.sizes):
            return f"says {entry.dtype} {chunk.sizes} where {file} holds {info.dtype} {info.shape}"
    volume = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
    if volume != math.prod(entry.shape):
        return f"has chunks of {volume} elements for a shape of {math.prod(entry.shape)}"
    return None if _fill(entry.chunks, entry.shape) else "has chunks that overlap"


def _fill(chunks: Sequence[Chunk], shape: tuple[int, ...]) -> bool:
    """Whether boxes within a shape cover all of it. They are marked on the grid of all their edges."""
    boxes = [[(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes)] for chunk in chunks]
    edges = [{0, size, *(edge for box in boxes for edge in box[dim])} for dim, size in enumerate(shape)]
    cells = [len(each) - 1 for each in edges]
    if math.prod(cells) > _CELLS:
        return False
    places = [{edge: place for place, edge in enumerate(sorted(each))} for each in edges]
    covered = np.zeros(cells, bool)
    for box in boxes:
        covered[tuple(slice(place[start], place[end]) for place, (start, end) in zip(places, box))] = True
    return bool(covered.all())
