"""Tensor files are true safetensors, and a header is believed only where the file bears it out."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.checkpoint.tensorfile import Pending, TensorInfo, read_header, write_tensors
from penstock.disk import Written
from penstock.errors import CheckpointError


def tensors() -> dict[str, torch.Tensor]:
    flat = torch.arange(24, dtype=torch.float32)
    return {
        "view": flat[:12].view(3, 4),
        "neighbour": flat[12:],
        "strided": flat.view(4, 6).t(),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.zeros(0, 5),
        "half": torch.randn(7).to(torch.bfloat16),
        "flags": torch.tensor([True, False]),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "ids": torch.tensor([-1, 2**40]),
    }


def save(path: Path, tensors: dict[str, torch.Tensor]) -> Written:
    return write_tensors(path, [Pending(n, t.dtype, t.shape, lambda t=t: t) for n, t in tensors.items()])  # type: ignore[misc]


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    expected = tensors()
    written = save(path, expected)
    raw = path.read_bytes()
    assert (written.bytes, written.sha256) == (len(raw), hashlib.sha256(raw).hexdigest())
    read = load_file(path)
    assert read.keys() == expected.keys()
    for name, tensor in read.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name]), name


def test_a_header_is_that_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.randn(3, 4), "b": torch.arange(3)}, path, metadata={"format": "pt"})
    assert read_header(path) == {"a": TensorInfo("F32", (3, 4)), "b": TensorInfo("I64", (3,))}


def _file(path: Path, header: Any, data: bytes, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def _entry(start: int, stop: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    ("header", "data", "length", "reason"),
    [
        ({}, b"", 2**62, "header too large"),
        (b"{", b"", None, "invalid JSON"),
        (b"[" * 100_000, b"", None, "invalid JSON"),
        (b"[]", b"", None, "invalid JSON"),
        ({"a": _entry(0, 8, [2]), "b": _entry(4, 12, [2])}, bytes(12), None, "invalid offset"),  # overlap
        ({"a": _entry(0, 4, [1]), "b": _entry(8, 12, [1])}, bytes(12), None, "invalid offset"),  # hole
        ({"a": _entry(0, 8, [2])}, bytes(12), None, "not fully covered"),
        ({"a": _entry(0, 16, [4])}, bytes(12), None, "not fully covered"),
        ({"a": _entry(0, 12, [2])}, bytes(12), None, "invalid shape"),
        ({"a": _entry(0, 12, [-1, -3])}, bytes(12), None, "invalid value"),
        ({"a": _entry(0, 0, [2**40, 2**40, 0])}, b"", None, "overflow"),
        ({"a": _entry(0, 12, [3], "F33")}, bytes(12), None, "unknown variant"),
        ({"a": _entry(0, 3, [3], "F8_E4M3")}, bytes(3), None, "is of dtype F8_E4M3"),
        ({"a": 1}, b"", None, "invalid type"),
    ],
)
def test_headers_that_lie_are_refused(
    tmp_path: Path, header: Any, data: bytes, length: int | None, reason: str
) -> None:
    path = _file(tmp_path / "a.safetensors", header, data, length)
    with pytest.raises(CheckpointError, match=reason):
        read_header(path)


def test_a_file_too_short_for_a_header_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"1234")
    with pytest.raises(CheckpointError, match="header too small"):
        read_header(tmp_path / "a.safetensors")


def test_a_dtype_the_format_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"'c' is of torch\.complex64"):
        save(tmp_path / "a.safetensors", {"c": torch.zeros(2, dtype=torch.complex64)})
