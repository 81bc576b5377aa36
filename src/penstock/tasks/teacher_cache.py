"""A teacher's outputs on disk, by what the teacher was given: what was computed once is read in later epochs and runs.

The file is a sequence of records, one for each sample: a hash of its inputs (16 bytes), the number of its type, the
output's rows and columns (4 bytes each, little-endian), and its elements. A record that was cut off ends the file.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from penstock.errors import ConfigError

_HEADER = struct.Struct("<16sIII")
_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class TeacherCache:
    """The outputs of one teacher in one file, which one process at a time writes."""

    def __init__(
        self, folder: Path, teacher: str, weights: Path, dtype: torch.dtype | None, rank: int
    ) -> None:
        """`weights` is the folder of the teacher's weights, `dtype` the type that it computes in."""
        stamps = [
            (file.name, file.stat().st_size, file.stat().st_mtime_ns)
            for file in weights.glob("*.safetensors")
        ]
        name = hashlib.blake2b(repr((teacher, sorted(stamps), dtype)).encode(), digest_size=8).hexdigest()
        folder.mkdir(parents=True, exist_ok=True)
        self.computed = 0
        """Samples that the teacher has computed; the others were read."""
        self._places: dict[bytes, tuple[int, int, int, int]] = {}
        """Where the elements of each output begin, the number of its type, its rows and its columns."""
        self._path = folder / f"{name}-{rank}.bin"
        self._end = 0
        if self._path.exists():
            with self._path.open("r+b") as file:
                self._end = self._scan(file)
                file.truncate(self._end)

    def _scan(self, file: BinaryIO) -> int:
        """Read the headers of all records; returns where the last whole one ends."""
        end, size = 0, os.fstat(file.fileno()).st_size
        while end + _HEADER.size <= size:
            key, kind, rows, columns = _HEADER.unpack(os.pread(file.fileno(), _HEADER.size, end))
            begin = end + _HEADER.size
            after = begin + rows * columns * (_TYPES[kind].itemsize if kind < len(_TYPES) else size)
            if after > size:
                break
            self._places[key] = begin, kind, rows, columns
            end = after
        return end

    def outputs(self, inputs: Mapping[str, Any], compute: Callable[[], Tensor]) -> Tensor:
        """The teacher's outputs for samples with these inputs, (B, C) or (B, N, D): read where all are known, else what
        `compute` returns.

        Raises ConfigError for outputs that are not one for each sample.
        """
        keys, device = _keys(inputs)
        if all(key in self._places for key in keys):
            with self._path.open("rb") as file:
                stored = torch.stack([self._read(file, key) for key in keys]).to(device)
            return stored.squeeze(1) if stored.shape[1] == 1 else stored
        made = compute()
        if made.ndim not in (2, 3) or len(made) != len(keys) or made.dtype not in _TYPES:
            raise ConfigError(
                "recipe.teacher_cache keeps an output of each sample, and this task asks the teacher for others; leave "
                "it out."
            )
        self.computed += len(keys)
        with self._path.open("ab") as file:
            for key, one in zip(keys, made.detach().cpu(), strict=True):
                if key not in self._places:
                    self._write(file, key, one if one.ndim == 2 else one[None])
        return made

    def _write(self, file: BinaryIO, key: bytes, rows: Tensor) -> None:
        record = _TYPES.index(rows.dtype), *rows.shape
        file.write(_HEADER.pack(key, *record))
        file.write(rows.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        begin = self._end + _HEADER.size
        self._places[key] = begin, *record
        self._end = begin + rows.numel() * rows.dtype.itemsize

    def _read(self, file: BinaryIO, key: bytes) -> Tensor:
        begin, kind, rows, columns = self._places[key]
        dtype = _TYPES[kind]
        held = bytearray(os.pread(file.fileno(), rows * columns * dtype.itemsize, begin))
        return torch.frombuffer(held, dtype=dtype).view(rows, columns)


def _keys(inputs: Mapping[str, Any]) -> tuple[list[bytes], torch.device]:
    """A hash of each sample's inputs, and the device that these are on."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    first = next(iter(tensors.values()))
    keys = [hashlib.blake2b(digest_size=16) for _ in range(len(first))]
    for name, value in tensors.items():
        if len(value) != len(keys):
            raise ConfigError(
                f"recipe.teacher_cache knows samples by their inputs, and {name} is not one of each; leave it out."
            )
        header = f"{name} {tuple(value.shape[1:])} {value.dtype}".encode()
        raw = value.detach().cpu().contiguous().view(len(keys), -1).view(torch.uint8).numpy()
        for key, row in zip(keys, raw, strict=True):
            key.update(header)
            key.update(row.tobytes())
    return [key.digest() for key in keys], first.device
