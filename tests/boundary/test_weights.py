"""The header of a weights file is believed only where the file bears it out."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from penstock.boundary.weights import TensorInfo, read_header, read_index
from penstock.errors import CheckpointError


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
        (b"{", b"", None, "not valid JSON"),
        (b"[" * 100_000, b"", None, "64 levels deep"),
        (b"[]", b"", None, "must hold a table"),
        (b"{}" + b" " * (1 << 24), b"", None, "header too large"),
        (b'{"a": 1, "a": 1}', b"", None, "twice"),
        ({"__metadata__": {"a": 1}}, b"", None, "metadata is no table of text"),
        ({"a" * 500: _entry(0, 4, [1])}, bytes(4), None, "of 500 characters is no name"),
        ({"a": _entry(0, 4, [1] * 200_000)}, bytes(4), None, "200,000 dimensions"),
        ({"a\r\U000c6bd6": _entry(0, 4, [1])}, bytes(4), None, "is no name"),
        ({"a": {**_entry(0, 4, [1]), "more": 1}}, bytes(4), None, "invalid type"),
        ({"a": _entry(4, 0, [1])}, bytes(4), None, "invalid shape"),
        ({"a": _entry(0, 12, [True, 3])}, bytes(12), None, "invalid value"),
        ({"a": _entry(0, 8, [1], "C64")}, bytes(8), None, "is of dtype 'C64'"),
        ({"a": _entry(0, 8, [2]), "b": _entry(4, 12, [2])}, bytes(12), None, "invalid offset"),  # overlap
        ({"a": _entry(0, 4, [1]), "b": _entry(8, 12, [1])}, bytes(12), None, "invalid offset"),  # hole
        ({"a": _entry(0, 8, [2])}, bytes(12), None, "not fully covered"),
        ({"a": _entry(0, 16, [4])}, bytes(12), None, "not fully covered"),
        ({"a": _entry(0, 12, [2])}, bytes(12), None, "invalid shape"),
        ({"a": _entry(0, 12, [-1, -3])}, bytes(12), None, "invalid value"),
        ({"a": _entry(0, 0, [2**40, 2**40, 0])}, b"", None, "overflow"),
        ({"a": _entry(0, 12, [3], "F33")}, bytes(12), None, "is of dtype 'F33'"),
        ({"a": _entry(0, 3, [3], "F8_E5M2")}, bytes(3), None, "is of dtype 'F8_E5M2'"),
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


@pytest.mark.parametrize(
    "name",
    ["../a.safetensors", "..", ".", "", "sub/a.safetensors", "index.json", "/etc/a.safetensors", 5, None, []],
)
def test_an_index_names_safetensors_files_of_its_folder_only(tmp_path: Path, name: Any) -> None:
    path = tmp_path / "index.json"
    path.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="not in its folder"):
        read_index(path, remedy="")


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": ["a"]}, {"weight_map": 3}])
def test_an_index_of_nothing_is_refused(tmp_path: Path, index: Any) -> None:
    path = tmp_path / "index.json"
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="names no files"):
        read_index(path, remedy="")
