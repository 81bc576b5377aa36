"""Tensor files are true safetensors."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from penstock.checkpoint.tensorfile import Pending, write_tensors
from penstock.disk import Written


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


def test_a_dtype_the_format_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"'c' is of torch\.complex64"):
        save(tmp_path / "a.safetensors", {"c": torch.zeros(2, dtype=torch.complex64)})
