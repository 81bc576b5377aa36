"""Tensors to and from one safetensors file, hashed on the way and checked before anything is trusted.

The format is Hugging Face's (https://github.com/huggingface/safetensors): eight bytes that give the
header's length, a JSON header with a dtype, a shape and two offsets per tensor, then the bytes. The
library's own writer wants all tensors in memory at once and gives no checksum; this one streams, so saving
needs the memory of the largest tensor only, views into one flat buffer are written as what they are, and
the checksum is of what was meant to be written rather than of what the disk gave back. Files are read with
the library.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from penstock.checkpoint.disk import Written, write_file
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
_HEADER_LIMIT = 100_000_000
"""Bytes of header that are believed; the reference implementation has the same bound."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A tensor that is to be written; `fetch` gives it when its turn has come, on any device, of any strides."""

    name: str
    dtype: torch.dtype
    shape: Sequence[int]
    fetch: Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Held:
    """What a file's header says of one tensor. `start` and `stop` count bytes from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Written:
    """Write `tensors` (on any device, of any strides) to `path` as safetensors, fsynced."""
    outgoing = [Outgoing(name, t.dtype, t.shape, partial(_itself, t)) for name, t in tensors.items()]
    return write_tensors(path, outgoing, metadata)


def write_tensors(
    path: Path, tensors: Iterable[Outgoing], metadata: Mapping[str, str] | None = None
) -> Written:
    """As `save_tensors`, for tensors of which one at a time is in memory."""
    tensors = list(tensors)
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for tensor in tensors:
        if tensor.dtype not in DTYPE_NAMES:
            raise TypeError(
                f"Tensor '{tensor.name}' is of {tensor.dtype}, which the checkpoint format cannot hold."
            )
        size = math.prod(tensor.shape) * tensor.dtype.itemsize
        header[tensor.name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # keeps the data aligned

    def chunks() -> Any:
        yield struct.pack("<Q", len(text))
        yield text
        for tensor in tensors:
            fetched = tensor.fetch()
            assert (fetched.dtype, list(fetched.shape)) == (tensor.dtype, list(tensor.shape)), tensor.name
            yield _bytes_of(fetched)

    return write_file(path, chunks())


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file into CPU tensors, its header checked first.

    Raises:
        CheckpointError: the header does not describe the file exactly.
    """
    read_header(path)
    return dict(load_file(path, device="cpu"))


def read_header(path: Path) -> dict[str, Held]:
    """The header of a safetensors file that is not too large, is JSON, and covers the file's bytes exactly once.

    Nothing is allocated by the header's word: its length is held against the file's size before it is read.

    Raises:
        CheckpointError: it is none of that.
    """

    def refuse(reason: str) -> CheckpointError:
        return CheckpointError(f"{path} is refused: {reason}.")

    size = path.stat().st_size
    if size < 8:
        raise refuse(f"it has {size} bytes, too few for a safetensors file")
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(_HEADER_LIMIT, size - 8):
            raise refuse(f"its header claims {length} bytes in a file of {size}")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError):
            raise refuse("its header is no JSON") from None
    if not isinstance(header, dict):
        raise refuse("its header is no table of tensors")
    header.pop("__metadata__", None)
    held = {name: _held(name, entry, refuse) for name, entry in header.items()}
    end = 0
    for name, entry in sorted(held.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            raise refuse(
                f"tensor '{name}' starts at byte {entry.start} where {end} is due: an overlap or a hole"
            )
        end = entry.stop
    if end != size - 8 - length:
        raise refuse(f"its tensors end at byte {end} of {size - 8 - length}")
    return held


def _held(name: str, entry: Any, refuse: Callable[[str], CheckpointError]) -> Held:
    """One header entry, whose shape and dtype must agree with its span."""
    try:
        item = DTYPES[entry["dtype"]].itemsize
        shape = tuple(int(length) for length in entry["shape"])
        start, stop = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError, OverflowError):
        raise refuse(f"the header's entry for '{name}' is malformed") from None
    if min([start, *shape], default=0) < 0 or stop - start != math.prod(shape) * item:
        raise refuse(f"tensor '{name}' has shape {list(shape)} but {stop - start} bytes")
    return Held(entry["dtype"], shape, start, stop)
