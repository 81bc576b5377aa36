"""Tensors to one safetensors file, hashed while they are written.

The format is Hugging Face's, and `penstock.boundary.weights` checks what a header says. The library reads the files.
Writing is ours: it streams, so that saving needs the memory of the largest tensor only; views into one flat buffer are
written as what they are; and the checksum is of what was meant to be written, not of what the disk gave back.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.boundary import weights
from penstock.disk import Written, write_file

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, word) for name, (word, _) in weights.DTYPES.items()}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


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
