"""Tensors to and from one safetensors file, hashed while they are written and checked before they are believed.

The format is Hugging Face's (https://github.com/huggingface/safetensors): eight bytes that give the header's length,
a JSON header with a dtype, a shape and two offsets per tensor, then the bytes. The library reads the files, and
refuses a header that does not cover the file's bytes exactly once. Writing is ours: it streams, so that saving needs
the memory of the largest tensor only; views into one flat buffer are written as what they are; and the checksum is of
what was meant to be written, not of what the disk gave back.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.disk import Written, write_file
from penstock.errors import CheckpointError

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def dtype_name(tensor: str, dtype: torch.dtype) -> str:
    """What safetensors calls the dtype of a tensor. Raises TypeError for one that no checkpoint holds."""
    if dtype not in DTYPE_NAMES:
        raise TypeError(f"Tensor '{tensor}' is of {dtype}, which the checkpoint format cannot hold.")
    return DTYPE_NAMES[dtype]


@dataclass(frozen=True, slots=True)
class Pending:
    """A tensor that is to be written. `fetch` gives it when its turn has come, on any device, of any strides."""

    name: str
    dtype: torch.dtype
    shape: Sequence[int]
    fetch: Callable[[], Tensor]


class TensorInfo(NamedTuple):
    """What a file's header says of one tensor; the dtype by safetensors' name."""

    dtype: str
    shape: tuple[int, ...]


def write_tensors(
    path: Path, tensors: Iterable[Pending], metadata: Mapping[str, str] | None = None
) -> Written:
    """Write `tensors` to `path` as safetensors, one at a time in memory, and force them to the disk."""
    tensors = list(tensors)
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for tensor in tensors:
        size = math.prod(tensor.shape) * tensor.dtype.itemsize
        header[tensor.name] = {
            "dtype": dtype_name(tensor.name, tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # keeps the data aligned

    def chunks() -> Iterator[bytes | memoryview]:
        yield struct.pack("<Q", len(text)) + text
        for tensor in tensors:
            fetched = tensor.fetch()
            assert (fetched.dtype, list(fetched.shape)) == (tensor.dtype, list(tensor.shape)), tensor.name
            yield fetched.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data

    return write_file(path, chunks())


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Every tensor of a safetensors file. The library refuses a header that is too large, is no such JSON, or does
    not cover the file's bytes exactly once; it allocates nothing because the header says so.

    Raises:
        CheckpointError: it was refused, or a tensor is of a dtype that no checkpoint holds.
    """
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # it is no dict
            found = {name: TensorInfo(s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}
    except SafetensorError as problem:
        raise CheckpointError(f"{path} is refused: {problem}.") from None
    for name, info in found.items():
        if info.dtype not in DTYPES:
            raise CheckpointError(f"{path} is refused: tensor '{name}' is of dtype {info.dtype}.")
    return found
