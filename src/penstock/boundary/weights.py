"""Weights from outside: the header of a safetensors file is checked before anything is mapped or allocated.

The format is Hugging Face's (https://github.com/huggingface/safetensors): eight bytes that give the header's length,
a JSON header with a dtype, a shape and two offsets per tensor, then the bytes, each of which belongs to one tensor.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from penstock.boundary.files import AnyPath, open_regular, quoted, read_bytes, shown
from penstock.boundary.trees import Bounds, parse_json
from penstock.errors import CheckpointError

DTYPES: Final[Mapping[str, tuple[str, int]]] = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2), "I64": ("int64", 8),
    "I32": ("int32", 4), "I16": ("int16", 2), "I8": ("int8", 1), "U8": ("uint8", 1), "F8_E4M3": ("float8_e4m3fn", 1),
    "BOOL": ("bool", 1),
}  # fmt: skip
"""Each dtype's name in torch and its bytes, by its name in safetensors. Others (float4, complex …) are refused."""

_HEADER = Bounds(bytes=1 << 24, values=1 << 21)
"""About 150,000 tensors: more than any published file has."""
_INDEX = Bounds(bytes=1 << 25, values=1 << 19)
_NAME = 400
_DIMENSIONS = 64
"""Most dimensions of a tensor in torch and NumPy."""


class TensorInfo(NamedTuple):
    """A tensor's entry in a file's header; the dtype by safetensors' name."""

    dtype: str
    shape: tuple[int, ...]


class _Lie(Exception):
    """A fault in a header, to complete `<the file> is refused: ...`."""


def read_header(
    path: AnyPath, *, refused: str = "is refused", remedy: str = "Fetch or write it again."
) -> dict[str, TensorInfo]:
    """Every tensor of the safetensors file `path`.

    Raises CheckpointError where the header is not valid, a tensor has a dtype that weights do not have, or the tensors
    do not cover the file's bytes exactly once. The message is `PATH refused: reason. remedy`.
    """
    where = f"{shown(path)} {refused}"
    with open_regular(path, "The weights file", error=CheckpointError, remedy=remedy) as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(8)
        length = int.from_bytes(head, "little")
        if len(head) < 8 or length > size - 8:
            problem = "header too small" if len(head) < 8 else "header too large for the file"
            raise CheckpointError(f"{where}: {problem}. {remedy}")
        if length > _HEADER.bytes:
            raise CheckpointError(
                f"{where}: header too large: {length:,} bytes, and at most {_HEADER.bytes:,} are read. {remedy}"
            )
        text = file.read(length)
    header = parse_json(text, f"{where}: its header", error=CheckpointError, bounds=_HEADER, remedy=remedy)
    try:
        return _checked(header, size - 8 - length)
    except _Lie as lie:
        raise CheckpointError(f"{where}: {lie}. {remedy}") from None


def _checked(header: dict[str, Any], size: int) -> dict[str, TensorInfo]:
    """The tensors of a header, if they fill `size` bytes exactly once."""
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _Lie("its metadata is no table of text")
    tensors, places = {}, []
    for name, entry in header.items():
        if not 0 < len(name) <= _NAME or not name.isprintable():  # it is shown in messages
            raise _Lie(f"{quoted(name)} of {len(name):,} characters is no name of a tensor")
        info, place = _tensor(name, entry)
        tensors[name] = info
        places.append((*place, name))
    reached = 0
    for start, stop, name in sorted(places):
        if start != reached:
            raise _Lie(
                f"invalid offset of tensor '{name}': it begins at byte {start:,} instead of {reached:,}"
            )
        reached = stop
    if reached != size:
        raise _Lie(f"not fully covered: its tensors have {reached:,} bytes, and {size:,} follow its header")
    return tensors


def _tensor(name: str, entry: Any) -> tuple[TensorInfo, tuple[int, int]]:
    """One entry of a header: what the tensor is, and where it begins and ends."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _Lie(
            f"invalid type of tensor '{name}': it needs dtype, shape and data_offsets, and nothing else"
        )
    dtype, shape, place = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _Lie(f"tensor '{name}' is of dtype {quoted(dtype, 20)}; weights are {', '.join(DTYPES)}")
    for numbers in (shape, place):
        if not isinstance(numbers, list) or not all(type(n) is int and 0 <= n < 1 << 63 for n in numbers):
            raise _Lie(
                f"invalid value for tensor '{name}': {quoted(numbers, 40)} must be whole numbers from 0 on"
            )
    if len(shape) > _DIMENSIONS:
        raise _Lie(f"tensor '{name}' has {len(shape):,} dimensions, more than {_DIMENSIONS}")
    if math.prod(n or 1 for n in shape) >= 1 << 60:
        raise _Lie(f"overflow: the sizes of tensor '{name}' multiply to more than memory can be")
    if len(place) != 2 or place[1] - place[0] != math.prod(shape) * DTYPES[dtype][1]:
        raise _Lie(f"invalid shape of tensor '{name}': {shape} of {dtype} does not fill its bytes {place}")
    return TensorInfo(dtype, tuple(shape)), (place[0], place[1])


def read_index(path: Path, *, remedy: str) -> dict[str, Any]:
    """A `model.safetensors.index.json`, whose `weight_map` says which file of its folder holds each tensor.

    Raises CheckpointError if the file is not such an index, or names anything but safetensors files.
    """
    raw = read_bytes(path, "The index", limit=_INDEX.bytes, error=CheckpointError, remedy=remedy)
    where = f"The index {shown(path)}"
    index = parse_json(raw, where, error=CheckpointError, bounds=_INDEX, remedy=remedy)
    table = index.get("weight_map")
    if not isinstance(table, dict) or not table:
        raise CheckpointError(f"{where} names no files. {remedy}")
    for name in table.values():
        # A folder, nothing, the index itself and all that leads elsewhere have no such name.
        if not isinstance(name, str) or not name.endswith(".safetensors") or os.path.basename(name) != name:
            raise CheckpointError(
                f"{where} names {quoted(name)}, which is not in its folder as a safetensors file. {remedy}"
            )
    return index
