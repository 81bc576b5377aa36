"""Tensors to safetensors files, hashed while they are written: one file, or a model's folder of several.

The format is Hugging Face's, and `penstock.boundary.weights` checks what a header says. The library reads the files.
Writing is our own: it streams, so that saving needs memory only for the largest tensor; views into one flat buffer are
written as single tensors; and the checksum is of the intended bytes, not of bytes read back from the disk.

Note [Replacing weights]
    While new weights are written to a folder that holds a model's weights, complete weights can be read there at every
    moment, even if the writer is killed. New files are written next to the old ones. When all are on the disk, a single
    rename, of `model.safetensors` or of the index, makes them current. Then the old files are removed. If an old file
    has a name that a new one needs, the index first refers to a second link to it.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from penstock.boundary import weights
from penstock.boundary.files import why
from penstock.config.convert import Range, require
from penstock.disk import Written, sync_folder, write_file
from penstock.errors import CheckpointError, EnvironmentProblem
from penstock.leftovers import replace_file

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, word) for name, (word, _) in weights.DTYPES.items()}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000
"""Maximum bytes of one file of a model, as in huggingface_hub."""
_BEFORE = ".before"
"""Appended to the name, before the suffix, of an old file that is kept until the next export is complete."""
_EXPORTED = re.compile(rf"model(-\d{{5,}}-of-\d{{5,}}({re.escape(_BEFORE)})?)?\.safetensors")
"""Pattern of the names of files that an export writes."""


def dtype_name(tensor: str, dtype: torch.dtype) -> str:
    """The safetensors name of a tensor's dtype. Raises TypeError for a dtype that checkpoints do not support."""
    if dtype not in DTYPE_NAMES:
        raise TypeError(f"Tensor '{tensor}' is of {dtype}, which the checkpoint format cannot hold.")
    return DTYPE_NAMES[dtype]


@dataclass(frozen=True, slots=True)
class Pending:
    """A tensor to be written. `fetch` returns it when it is needed, on any device, with any strides."""

    name: str
    dtype: torch.dtype
    shape: Sequence[int]
    fetch: Callable[[], Tensor]

    @property
    def bytes(self) -> int:
        """The tensor's size in a file."""
        return math.prod(self.shape) * self.dtype.itemsize


def pending(state: Mapping[str, Tensor]) -> list[Pending]:
    """Existing tensors as `Pending` tensors."""
    return [Pending(name, t.dtype, t.shape, lambda t=t: t) for name, t in state.items()]  # type: ignore[misc]


def write_tensors(
    path: Path, tensors: Iterable[Pending], metadata: Mapping[str, str] | None = None
) -> Written:
    """Write `tensors` to `path` as safetensors, one at a time in memory, and force them to the disk."""
    tensors = list(tensors)
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": dtype_name(tensor.name, tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.bytes],
        }
        offset += tensor.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # keeps the data aligned

    def chunks() -> Iterator[bytes | memoryview]:
        yield struct.pack("<Q", len(text)) + text
        for tensor in tensors:
            fetched = tensor.fetch()
            assert (fetched.dtype, list(fetched.shape)) == (tensor.dtype, list(tensor.shape)), tensor.name
            yield fetched.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data

    return write_file(path, chunks())


def write_model(
    folder: Path, tensors: Iterable[Pending], *, shard_bytes: int = SHARD_BYTES,
    before_read: Callable[[], object] = lambda: None,
) -> list[Path]:  # fmt: skip
    """Write a model's weights in Hugging Face's layout: `model.safetensors`, or, if larger than `shard_bytes`, several
    numbered files of at most that size (but at least one tensor) and `model.safetensors.index.json`. One tensor at a
    time is in memory. Each file appears whole or not at all, the index last. Existing weights in the folder are
    replaced: see Note [Replacing weights]. `before_read` is called when all new tensors are on the disk but the old
    ones are still current; it writes the files that belong to the new ones. Returns the files, the index last.

    Raises:
        ConfigError: `shard_bytes` is below 1. OSError: the disk is full, or fails.
        EnvironmentProblem: the folder has weights in the same number of files, and the file system has no links.
    """
    require("shard_bytes", shard_bytes, Annotated[int, Range(1, 1 << 60)])
    shards = _split(tensors, shard_bytes)
    count = len(shards)
    names = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    folder.mkdir(parents=True, exist_ok=True)
    if count == 1:
        names = [WEIGHTS]

        def whole(path: Path) -> None:
            write_tensors(path, shards[0], {"format": "pt"})
            before_read()

        replace_file(folder / WEIGHTS, whole)
        sync_folder(folder)
        (folder / INDEX).unlink(missing_ok=True)  # before the files that it names
    else:
        _keep_readable(folder, names)
        for name, shard in zip(names, shards):
            replace_file(folder / name, lambda path: write_tensors(path, shard, {"format": "pt"}))  # noqa: B023 (called at once)
        before_read()
        places = {tensor.name: name for name, shard in zip(names, shards) for tensor in shard}
        size = sum(tensor.bytes for shard in shards for tensor in shard)
        _write_index(folder, {"metadata": {"total_size": size}, "weight_map": places})
        names.append(INDEX)
    sync_folder(folder)
    for path in folder.iterdir():
        if _EXPORTED.fullmatch(path.name) and path.name not in names and path.is_file():
            path.unlink()
    return [folder / name for name in names]


def _split(tensors: Iterable[Pending], shard_bytes: int) -> list[list[Pending]]:
    shards: list[list[Pending]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.bytes
    return shards


def _write_index(folder: Path, index: Mapping[str, Any]) -> None:
    text = json.dumps(index, indent=2) + "\n"
    replace_file(folder / INDEX, lambda path: write_file(path, [text.encode()]))


def _keep_readable(folder: Path, names: Sequence[str]) -> None:
    """If the folder's index names files that are about to be replaced, link them under second names, and let the index
    use these: the old weights can be read until the new index exists.
    """
    try:
        index = weights.read_index(folder / INDEX, remedy="Export again.")
    except CheckpointError:
        return  # there is no index, or no usable one
    places: dict[str, str] = index["weight_map"]
    second_names = {
        name: f"{name.removesuffix('.safetensors')}{_BEFORE}.safetensors"
        for name in names
        if name in places.values() and (folder / name).is_file()
    }
    if not second_names:
        return
    for name, other in second_names.items():
        (folder / other).unlink(missing_ok=True)  # left by a writer that was killed before the index named it
        try:
            os.link(folder / name, folder / other)
        except OSError as problem:
            raise EnvironmentProblem(
                f"{folder} holds weights in files of the same names. Until the new weights are complete a second link "
                f"would keep these files, but it cannot be made: {why(problem)}. Export to another folder."
            ) from problem
    renamed = {tensor: second_names.get(name, name) for tensor, name in places.items()}
    _write_index(folder, {**index, "weight_map": renamed})
    sync_folder(folder)
