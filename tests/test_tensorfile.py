"""Tensor files are true safetensors, and a model's are replaced as a whole."""

from __future__ import annotations

import hashlib
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from penstock.disk import Written
from penstock.errors import ConfigError, EnvironmentProblem
from penstock.models.convert import read_state_dict
from penstock.tensorfile import INDEX, WEIGHTS, Pending, pending, write_model, write_tensors


def tensors() -> dict[str, torch.Tensor]:
    flat = torch.arange(24, dtype=torch.float32)
    return {
        "view": flat[:12].view(3, 4), "neighbour": flat[12:], "strided": flat.view(4, 6).t(),
        "scalar": torch.tensor(3.5, dtype=torch.float64), "empty": torch.zeros(0, 5),
        "half": torch.randn(7).to(torch.bfloat16), "flags": torch.tensor([True, False]),
        "bytes": torch.arange(5, dtype=torch.uint8), "ids": torch.tensor([-1, 2**40]),
    }  # fmt: skip


def save(path: Path, tensors: dict[str, torch.Tensor]) -> Written:
    return write_tensors(path, pending(tensors))


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


SIZES = {1: 10_000, 2: 800, 4: 400}
"""`shard_bytes` that give as many files of `state`."""


def state(first: float) -> dict[str, torch.Tensor]:
    """Four tensors of 400 bytes."""
    return {f"weight{n}": torch.full((10, 10), first + n) for n in range(4)}


def as_transformers(folder: Path) -> dict[str, torch.Tensor]:
    """A single file comes first there, and the index comes first with us."""
    if (folder / WEIGHTS).exists():
        return load_file(folder / WEIGHTS)
    index = json.loads((folder / INDEX).read_text())
    assert index["metadata"]["total_size"] == 1600
    return {name: load_file(folder / file)[name] for name, file in index["weight_map"].items()}


def is_read(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    for read in (read_state_dict, as_transformers):
        found = read(folder)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("after", SIZES)
@pytest.mark.parametrize("before", SIZES)
def test_weights_replace_others_of_as_many_files_or_not(tmp_path: Path, before: int, after: int) -> None:
    write_model(tmp_path, pending(state(0.0)), shard_bytes=SIZES[before])
    is_read(tmp_path, state(0.0))
    (tmp_path / "adapter_model.safetensors").touch()
    files = write_model(tmp_path, pending(state(9.0)), shard_bytes=SIZES[after])
    names = [f"model-{n:05d}-of-{after:05d}.safetensors" for n in range(1, after + 1)]
    assert [file.name for file in files] == ([WEIGHTS] if after == 1 else [*names, INDEX])
    assert {*tmp_path.iterdir()} == {*files, tmp_path / "adapter_model.safetensors"}
    assert all(file.stat().st_size < SIZES[after] + 500 for file in files if file.name != INDEX)
    is_read(tmp_path, state(9.0))


@pytest.mark.parametrize("after", SIZES)
@pytest.mark.parametrize("before", SIZES)
def test_the_old_weights_are_read_until_the_new_ones_are_complete(
    tmp_path: Path, before: int, after: int
) -> None:
    write_model(tmp_path, pending(state(0.0)), shard_bytes=SIZES[before])

    def give(turn: int, at: int, tensor: torch.Tensor) -> torch.Tensor:
        is_read(tmp_path, state(0.0))
        if turn == at:
            raise InterruptedError
        return tensor

    new = state(9.0)
    for at in range(5):  # at each tensor, and when all are there
        tensors = [
            Pending(name, one.dtype, one.shape, partial(give, turn, at, one))
            for turn, (name, one) in enumerate(new.items())
        ]
        last = partial(give, 4, at, new["weight0"])
        with pytest.raises(InterruptedError):
            write_model(tmp_path, tensors, shard_bytes=SIZES[after], before_read=last)
        is_read(tmp_path, state(0.0))
    files = write_model(tmp_path, pending(new), shard_bytes=SIZES[after])
    assert {*tmp_path.iterdir()} == {*files}
    is_read(tmp_path, new)


def test_weights_of_the_same_names_are_kept_where_there_are_no_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", none)
    write_model(tmp_path, pending(state(0.0)), shard_bytes=SIZES[2])
    with pytest.raises(EnvironmentProblem, match=r"a second link .* Export to another folder"):
        write_model(tmp_path, pending(state(9.0)), shard_bytes=SIZES[2])
    is_read(tmp_path, state(0.0))
    write_model(tmp_path, pending(state(9.0)), shard_bytes=SIZES[4])
    is_read(tmp_path, state(9.0))


def test_a_broken_index_is_replaced_and_a_size_of_nothing_refused(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text("{")
    with pytest.raises(ConfigError, match="shard_bytes is 0, but must be at least 1"):
        write_model(tmp_path, pending(state(0.0)), shard_bytes=0)
    write_model(tmp_path, pending(state(0.0)), shard_bytes=1)
    is_read(tmp_path, state(0.0))
