"""Shards to and from files through torch.distributed.checkpoint (DCP), whose planners do the resharding.

DCP's own storage writes `.metadata`, a pickle that runs code when it is read, and pickles what is not a tensor. Its
Hugging Face storage holds a whole file in memory, takes no checksum, and took three times as long to write 640 MB.
Here tensors are safetensors, one file per rank and set, and the metadata is `tensors.json`. Nothing else is accepted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from penstock.checkpoint.disk import Written, write_file
from penstock.checkpoint.index import Index, chunk_key, file_name, index_of, key_of, metadata_of, to_json
from penstock.checkpoint.snapshot import Piece
from penstock.checkpoint.tensorfile import Pending, write_tensors
from penstock.errors import CheckpointError

INDEX = "tensors.json"


class PieceSaver(DefaultSavePlanner):
    """Plans which rank writes which piece. What several ranks hold is written once, by the rank with least to write."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The values of a piece."""
        piece: Piece = self.state_dict[index.fqn]
        return piece.values


class PieceLoader(DefaultLoadPlanner):
    """Plans which parts of which chunks fill the pieces that this rank wants."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """The default method would look for state on devices."""
        self.state_dict = self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Where the values of a piece go."""
        piece: Piece = self.state_dict[index.fqn]
        return piece.values


class ShardWriter(StorageWriter):
    """Writes one rank's pieces into the directory `folder`, and on rank 0 the index of all."""

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        self.folder = folder
        self.rank = rank
        self.world = world
        self.files: dict[str, Written] = {}
        """The files that this rank has written."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the plan's chunks, a file for each set; each tensor is fetched when its turn comes."""
        outgoing: dict[str, list[Pending]] = {}
        results = []
        for item in plan.items:
            data = item.tensor_data
            assert data is not None, item.index.fqn
            sizes, offsets = data.chunk.sizes, data.chunk.offsets
            outgoing.setdefault(item.index.fqn.partition("/")[0], []).append(
                Pending(
                    chunk_key(item.index.fqn, data.size, offsets, sizes),
                    data.properties.dtype,
                    sizes,
                    partial(_values, planner, item),
                )
            )
            size = sizes.numel() * data.properties.dtype.itemsize
            results.append(WriteResult(MetadataIndex(item.index.fqn, offsets), size, self.rank))
        for group, tensors in outgoing.items():
            name = file_name(group, self.rank, self.world)
            self.files[name] = write_tensors(self.folder / name, tensors)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index."""
        ranks = {result.index: result.storage_data for written in results for result in written}
        self.write_json(INDEX, to_json(index_of(metadata, ranks)))

    def write_json(self, name: str, document: Any) -> None:
        """Write a document of the checkpoint, as one of this rank's files."""
        text = json.dumps(document, separators=(",", ":")).encode()
        self.files[name] = write_file(self.folder / name, [text])

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do: a writer is for one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the commit protocol has made the folder."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Unchanged."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """False: DCP never chooses this writer by an address."""
        return False

    def storage_meta(self) -> StorageMeta | None:
        """None."""
        return None


def _values(planner: SavePlanner, item: WriteItem) -> Tensor:
    values = planner.resolve_data(item)
    assert isinstance(values, Tensor), item.index.fqn
    return values


def write_alone(writer: ShardWriter, pieces: Mapping[str, Piece]) -> None:
    """Do what `torch.distributed.checkpoint.save` does, for one process without a process group."""
    planner = PieceSaver()
    planner.set_up_planner(dict(pieces), is_coordinator=True)
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    results = writer.write_data(planner.finish_plan(plans[0]), planner).value()
    writer.finish(metadata, [results])


def read_pieces(folder: Path, index: Index, world: int, pieces: Mapping[str, Piece]) -> None:
    """Fill `pieces` with what the checkpoint directory `folder` holds of them, however many ranks wrote it.

    Each rank reads what it needs and nothing is agreed upon, so this is not collective.

    Raises:
        CheckpointError: a file cannot be read.
    """
    planner = PieceLoader()
    planner.set_up_planner(dict(pieces), metadata_of(index))
    places = {
        MetadataIndex(name, chunk.offsets): (chunk.rank, key_of(name, entry, chunk))
        for name, entry in index.items()
        for chunk in entry.chunks
    }
    by_file: dict[Path, list[tuple[str, ReadItem]]] = {}
    for item in planner.finish_plan(planner.create_local_plan()).items:
        assert item.type == LoadItemType.TENSOR, item.dest_index.fqn
        rank, key = places[item.storage_index]
        file = folder / file_name(item.dest_index.fqn.partition("/")[0], rank, world)
        by_file.setdefault(file, []).append((key, item))
    for file, wanted in by_file.items():
        try:
            _fill(file, wanted, planner)
        except (OSError, SafetensorError) as problem:
            raise CheckpointError(f"{file} is refused: {problem}.") from problem


@torch.no_grad()
def _fill(file: Path, wanted: list[tuple[str, ReadItem]], planner: LoadPlanner) -> None:
    with safe_open(file, framework="pt", device="cpu") as opened:
        for key, item in wanted:
            if len(item.lengths):
                box = tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths))
                values = opened.get_slice(key)[box]
            else:
                values = opened.get_tensor(key)
            target = planner.resolve_tensor(item).detach()
            target.copy_(values)
            planner.commit_tensor(item, target)
