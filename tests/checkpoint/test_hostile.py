"""Checkpoints made to harm: seals and sizes are right, the content is not. Nothing in them runs or is believed."""

from __future__ import annotations

import hashlib
import json
import pickle
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.checkpoints import Trainee, numbered
from helpers.spawn import spawn
from penstock import checkpoint
from penstock.checkpoint.manifest import MANIFEST, manifest_text, read_manifest
from penstock.disk import Written
from penstock.errors import CheckpointError


class Payload:
    """Touches a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.marker,))


def seal(path: Path) -> None:
    """Make the manifest say what is there now, as whoever can write the files can."""
    manifest = read_manifest(path)
    files = {
        file.name: Written(file.stat().st_size, hashlib.sha256(file.read_bytes()).hexdigest())
        for file in path.iterdir()
        if file.name != MANIFEST
    }
    (path / MANIFEST).write_bytes(manifest_text(replace(manifest, files=files)))


def refused(path: Path, match: str = "is refused|names tensor") -> None:
    with pytest.raises(CheckpointError, match=match):
        checkpoint.open_verified(path).load()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return checkpoint.save(tmp_path, numbered(2))


def test_the_payload_would_harm(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Payload(tmp_path / "harm")))
    assert (tmp_path / "harm").exists()


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("form", ["pickle", "torch.save", "safetensors"])
def test_pickles_in_place_of_any_file_never_run(path: Path, form: str, sealed: bool) -> None:
    marker = path.parent / "harm"
    payload = pickle.dumps(Payload(marker))
    if form == "torch.save":
        torch.save(Payload(marker), path.parent / "payload")
        payload = (path.parent / "payload").read_bytes()
    elif form == "safetensors":
        # A right length before it, as if it were the header.
        payload = struct.pack("<Q", len(payload)) + payload
    for file in sorted(path.iterdir()):
        original = file.read_bytes()
        manifest = (path / MANIFEST).read_bytes()
        file.write_bytes(payload)
        if sealed and file.name != MANIFEST:
            seal(path)
        refused(path, "refused")
        file.write_bytes(original)
        (path / MANIFEST).write_bytes(manifest)
    assert not marker.exists()
    checkpoint.load(path)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "rng.pt", "state.npy", "weights.bin"])
def test_foreign_pickles_beside_the_files_are_refused_by_name(path: Path, name: str) -> None:
    marker = path.parent / "harm"
    (path / name).write_bytes(pickle.dumps(Payload(marker)))
    refused(path, rf"It holds {name}, which is read by unpickling")
    (path / MANIFEST).unlink()
    refused(path, rf"manifest\.json is missing\. It holds {name}")
    assert not marker.exists()


def _index(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads((path / "tensors.json").read_text())
    change(document)
    (path / "tensors.json").write_text(json.dumps(document))
    seal(path)


def _entry(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["weights/a"].update(values)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (_entry(shape=[2**40, 2**40]), "fill|elements|does not hold"),
        (_entry(shape=[3, 4, 0]), "malformed"),
        (_entry(shape=[-3, -4]), "malformed"),
        (_entry(shape=[3.0, 4]), "malformed"),
        (_entry(dtype="F64"), "says F64"),
        (_entry(dtype="object"), "malformed"),
        (_entry(chunks=[]), "0 elements for a shape of 12"),
        (_entry(chunks=[[0, [0, 0], [3, 4]]] * 2), "does not hold"),
        (_entry(chunks=[[0, [1, 0], [3, 4]]]), "beyond its shape"),
        (_entry(chunks=[[9, [0, 0], [3, 4]]]), "malformed"),
        (_entry(chunks=[[0, [0, 0], [3, 4], 1]]), "malformed"),
        (_entry(chunks="x"), "malformed"),
        (lambda d: d.pop("weights/a"), "holds 'a', which the index does not list"),
        (lambda d: d.update({"../../etc/a": d["weights/a"]}), "does not hold"),
        (lambda d: d.update({"weights/b": d["weights/a"]}), "says F32|does not hold"),
        (lambda d: d.update({"odd": []}), "malformed"),
    ],
)
def test_an_index_that_lies_is_refused(
    path: Path, change: Callable[[dict[str, Any]], None], match: str
) -> None:
    _index(path, change)
    refused(path, match)


def test_chunks_that_overlap_are_refused(tmp_path: Path) -> None:
    from penstock.checkpoint.rewrite import convert

    path = convert(checkpoint.save(tmp_path / "a", numbered(2, rows=4)), tmp_path / "b", ranks=2)
    # The second half is said to lie where the first does: its key changes with it, so the file is changed too.
    file = path / "weights-1-of-2.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"a@2,0"', b'"a@1,0"'))
    _index(path, lambda d: d["weights/a"].update(chunks=[[0, [0, 0], [2, 4]], [1, [1, 0], [2, 4]]]))
    refused(path, "chunks that overlap")


@pytest.mark.parametrize(
    "state",
    [
        [],
        {},
        {"weights": {"weights": ["a"]}, "state": []},
        {"weights": {"weights": ["missing"]}, "state": {}},
        {"weights": {"weights": [["a"]]}, "state": {}},
        {"weights": {"weights": ["a"]}, "state": {"optimizer": {"$tensor": "optimizer.none"}}},
        {"weights": {"weights": ["a"]}, "state": {"optimizer": {"$tensor": 5}}},
        {"weights": {"weights": ["a"]}, "state": {"x": {"$items": [[[], 1]]}}},
        {"weights": {"weights": ["a"]}, "state": {"x": {"$items": 3}}},
        {"weights": {"weights": ["a"]}, "state": {"optimizer": {"param_groups": 3}}},
        {
            "weights": {"weights": ["a"]},
            "state": {"random": {"$array": "random.numpy", "dtype": "object_", "more": 1}},
        },
    ],
)
def test_a_state_that_lies_is_refused(path: Path, state: Any) -> None:
    (path / "state.json").write_text(json.dumps(state))
    seal(path)
    refused(path)


@pytest.mark.parametrize("name", ["state.json", "local.json", "tensors.json", "config.json", MANIFEST])
def test_json_nested_without_end_is_refused(path: Path, name: str) -> None:
    (path / name).write_text("[" * 100_000 + "]" * 100_000)
    if name != MANIFEST:
        seal(path)
    refused(path, "refused")


def find_nothing(folder: Path) -> str:
    try:
        Trainee("fsdp").resume(folder)
    except CheckpointError as problem:
        return str(problem)
    return ""


@pytest.mark.alone
def test_several_ranks_refuse_alike_and_run_nothing(path: Path) -> None:
    marker = path.parent / "harm"
    (path / "local.json").write_bytes(pickle.dumps(Payload(marker)))
    (path / "tensors.json").write_bytes(pickle.dumps(Payload(marker)))
    seal(path)
    first, second = spawn(find_nothing, 2, path.parent)
    assert first == second
    assert "tensors.json is refused: it is not JSON" in first
    assert not marker.exists()
