"""Tensors to and from one safetensors file, hashed on the way and checked before anything is trusted.

The format is Hugging Face's (https://github.com/huggingface/safetensors): eight bytes that give the
header's length, a JSON header with a dtype, a shape and two offsets per tensor, then the bytes. The
library's own writer wants all tensors in memory at once and gives no checksum; this one streams, so saving
needs the memory of the largest tensor only, views into one flat buffer are written as what they are, and
the checksum is of what was meant to be written rather than of what the disk gave back. Files are read with
the library.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from penstock.errors import CheckpointError

_NAMES: dict[torch.dtype, str] = {
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
_ITEM_BYTES = {name: dtype.itemsize for dtype, name in _NAMES.items()}
_HEADER_LIMIT = 100_000_000
"""Bytes of header that are believed; the reference implementation has the same bound."""


@dataclass(frozen=True, slots=True)
class Written:
    """What a file is: its size in bytes and the sha256 of its content, in hex."""

    bytes: int
    sha256: str


def write_file(path: Path, chunks: Any) -> Written:
    """Write the byte-like `chunks` to `path`, hashed on the way, and force them to the disk."""
    digest = hashlib.sha256()
    size = 0
    with path.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return Written(size, digest.hexdigest())


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Written:
    """Write `tensors` (on any device, of any strides) to `path` as safetensors, fsynced."""
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise TypeError(f"Tensor '{name}' is of {tensor.dtype}, which the checkpoint format cannot hold.")
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # keeps the data aligned

    def chunks() -> Any:
        yield struct.pack("<Q", len(text))
        yield text
        for tensor in tensors.values():
            yield _bytes_of(tensor)

    return write_file(path, chunks())


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file into CPU tensors, its header checked first.

    Raises:
        CheckpointError: the header does not describe the file exactly.
    """
    check_header(path)
    return dict(load_file(path, device="cpu"))


def check_header(path: Path) -> None:
    """Refuse a file whose header is too large, no JSON, or does not cover its bytes exactly once.

    Nothing is allocated by the header's word: its length is held against the file's size before it is read.
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
    spans = sorted(_span(name, entry, refuse) for name, entry in header.items())
    end = 0
    for start, stop, name in spans:
        if start != end:
            raise refuse(f"tensor '{name}' starts at byte {start} where {end} is due: an overlap or a hole")
        end = stop
    if end != size - 8 - length:
        raise refuse(f"its tensors end at byte {end} of {size - 8 - length}")


def _span(name: str, entry: Any, refuse: Any) -> tuple[int, int, str]:
    """(start, stop, name) of one header entry, whose shape and dtype must agree with them."""
    try:
        item = _ITEM_BYTES[entry["dtype"]]
        shape = [int(length) for length in entry["shape"]]
        start, stop = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError):
        raise refuse(f"the header's entry for '{name}' is malformed") from None
    count = 1
    for length in shape:
        count *= length
    if min([start, *shape], default=0) < 0 or stop - start != count * item:
        raise refuse(f"tensor '{name}' has shape {shape} but {stop - start} bytes")
    return start, stop, name
