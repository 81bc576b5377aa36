"""Reads and writes chunks of tensors in a checkpoint's files, for any number of ranks on either side.

Tensors are safetensors, one file per rank and set; `tensors.json` is the index. torch.distributed.checkpoint is not
used: it writes `.metadata`, a pickle that runs code when it is read, and pickles everything but tensors. Its Hugging
Face storage holds a whole file in memory, has no checksums, and took three times as long to write 640 MB.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.checkpoint.index import Chunk, Index, file_name, key_of
from penstock.checkpoint.snapshot import Piece
from penstock.disk import Written, write_file
from penstock.errors import CheckpointError
from penstock.tensorfile import pending, write_tensors


def write_json(path: Path, document: Any) -> Written:
    """Write a JSON document of a checkpoint."""
    return write_file(path, [json.dumps(document, separators=(",", ":")).encode()])


def write_chunks(
    folder: Path, index: Index, world: int, pieces: Mapping[str, Sequence[Piece]], *, rank: int
) -> dict[str, Written]:
    """Write the pieces that `index` assigns to rank `rank` of `world`, which holds `pieces`: a file for each set."""
    files: dict[str, dict[str, Tensor]] = {}
    for name, entry in index.items():
        file = file_name(name.partition("/")[0], rank, world)
        values = {tuple(piece.offsets): piece.values for piece in pieces.get(name, ())}
        for chunk in entry.chunks:
            if chunk.rank == rank:
                files.setdefault(file, {})[key_of(name, entry, chunk)] = values[chunk.offsets]
    return {file: write_tensors(folder / file, pending(tensors)) for file, tensors in files.items()}


def read_pieces(folder: Path, index: Index, world: int, pieces: Mapping[str, Sequence[Piece]]) -> None:
    """Fill `pieces` from the checkpoint directory `folder`.

    Each rank reads what it needs without communication, so this is not collective. Raises CheckpointError if a file
    cannot be read.
    """
    readings: dict[Path, list[tuple[str, tuple[slice, ...], Tensor]]] = {}
    for name, parts in pieces.items():
        entry = index[name]
        for piece, chunk in itertools.product(parts, entry.chunks):
            box = _overlap(chunk, piece)
            if box is not None:
                file = folder / file_name(name.partition("/")[0], chunk.rank, world)
                target = piece.values[_within(box, piece.offsets)]
                reading = (key_of(name, entry, chunk), _within(box, chunk.offsets), target)
                readings.setdefault(file, []).append(reading)
    for file, boxes in readings.items():
        try:
            _fill(file, boxes)
        except (OSError, SafetensorError) as problem:
            raise CheckpointError(f"{file} is refused: {problem}.") from problem


def _overlap(chunk: Chunk, piece: Piece) -> list[tuple[int, int]] | None:
    """For each dimension, start and end of the elements that chunk and piece have in common; None if there are none."""
    box = [
        (max(first, other), min(first + size, other + length))
        for first, size, other, length in zip(chunk.offsets, chunk.sizes, piece.offsets, piece.values.shape)
    ]
    return box if all(start < stop for start, stop in box) else None


def _within(box: list[tuple[int, int]], offsets: tuple[int, ...]) -> tuple[slice, ...]:
    """The box `box` as slices of a part of the tensor that begins at `offsets`."""
    return tuple(slice(start - offset, stop - offset) for (start, stop), offset in zip(box, offsets))


@torch.no_grad()
def _fill(file: Path, boxes: list[tuple[str, tuple[slice, ...], Tensor]]) -> None:
    with safe_open(file, framework="pt", device="cpu") as opened:
        for key, box, target in boxes:
            target.copy_(opened.get_slice(key)[box] if box else opened.get_tensor(key))
