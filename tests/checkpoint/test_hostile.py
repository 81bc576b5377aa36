"""Checkpoints made to harm: seals and sizes are right, the content is not. Nothing in them runs or is believed."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from helpers.checkpoints import Payload, Trainee, newest, numbered, seal
from helpers.spawn import spawn
from penstock import checkpoint
from penstock.boundary.manifests import sealed
from penstock.checkpoint.index import Chunk, _fill
from penstock.checkpoint.manifest import MANIFEST
from penstock.cli import main
from penstock.errors import CheckpointError


def refused(path: Path, match: str = "is refused|names tensor") -> None:
    with pytest.raises(CheckpointError, match=match):
        checkpoint.open_verified(path).load()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return checkpoint.save(tmp_path, numbered(2))


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
    path = checkpoint.save(tmp_path, numbered(2, rows=4))
    half, (file,) = torch.zeros(2, 4), path.glob("weights*")
    save_file({"a@0,0": half, "a@1,0": half.clone()}, file)
    _index(path, lambda d: d["weights/a"].update(chunks=[[0, [0, 0], [2, 4]], [0, [1, 0], [2, 4]]]))
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


def _lie(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    body = json.loads((path / MANIFEST).read_text())
    change(body)
    (path / MANIFEST).write_bytes(sealed(body))


LIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "infinite bytes": lambda body: body["files"]["weights.safetensors"].update(bytes=math.inf),
    "negative bytes": lambda body: body["files"]["weights.safetensors"].update(bytes=-1),
    "no checksum": lambda body: body["files"]["state.json"].pop("sha256"),
    "a missing part": lambda body: body["files"].pop("weights.safetensors"),
    "a missing state": lambda body: body["files"].pop("state.json"),
    "a missing index": lambda body: body["files"].pop("tensors.json"),
    "a part elsewhere": lambda body: body["files"].update({"../latest": body["files"]["state.json"]}),
    "files in a list": lambda body: body.update(files=[1]),
    "a world of nobody": lambda body: body.update(world=0),
    "a fractional world": lambda body: body.update(world=1.5),
    "another step": lambda body: body.update(step=1),
    "a step below 0": lambda body: body.update(step=-2),
    "a Plan with a terminal escape": lambda body: body.update(plan="\x1b[2J"),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_under_a_right_seal_are_refused_in_every_verb_and_the_step_before_is_used(
    tmp_path: Path, lie: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run" / "checkpoints"
    for step in (1, 2):
        checkpoint.save(folder, numbered(step))
    _lie(folder / "step-2", LIES[lie])
    run = str(tmp_path / "run")
    assert main(["checkpoint", "verify", run]) == 5
    assert "step-2 is refused" in capsys.readouterr().err
    assert main(["checkpoint", "list", run]) == 5
    assert main(["checkpoint", "export", run, str(tmp_path / "plain"), "--names", "plain"]) == 0
    assert main(["checkpoint", "export", run, str(tmp_path / "two"), "--names", "plain", "--step", "2"]) == 5
    assert (folder / "step-2").is_dir(), "looking moves nothing"
    assert newest(folder).step == 1


def test_what_cannot_be_loaded_is_not_called_whole(path: Path) -> None:
    """Sizes and checksums are right, and a tensor of the state is none of the files'."""
    document = json.loads((path / "state.json").read_text())
    document["state"]["optimizer"]["state"]["a"]["exp_avg"] = {"$tensor": "nowhere"}
    (path / "state.json").write_text(json.dumps(document))
    seal(path)
    assert main(["checkpoint", "verify", str(path)]) == 5
    assert main(["checkpoint", "list", str(path.parent)]) == 5


@pytest.mark.parametrize("ranks", [16, 1024])
def test_a_tensor_in_the_boxes_of_a_grid_is_checked_quickly(ranks: int) -> None:
    side = math.isqrt(ranks) * 4
    boxes = tuple(Chunk(0, (r, c), (4, 4)) for r in range(0, side, 4) for c in range(0, side, 4))
    assert _fill(boxes, (side, side))
    assert not _fill((*boxes[:-1], Chunk(0, (side - 5, side - 5), (4, 4))), (side, side))


@pytest.mark.parametrize("name", ["step-041", "step-x", "step-", "step-4.5", "step-٣", "step--1", "step-1e3"])
def test_a_stray_folder_beside_the_steps_is_left_alone(tmp_path: Path, name: str) -> None:
    for stray in (name, f"{name}.tmp", "mine.tmp"):
        (tmp_path / stray).mkdir()
    (tmp_path / "step-7").write_text("a file")
    checkpoint.save(tmp_path, numbered(1))
    checkpoint.clean(tmp_path)
    assert newest(tmp_path).step == 1
    assert checkpoint.steps(tmp_path) == [1]
    for step in (2, 3, 4):
        checkpoint.save(tmp_path, numbered(step))
    assert {name, f"{name}.tmp", "mine.tmp", "step-7"} <= {entry.name for entry in tmp_path.iterdir()}
    assert main(["checkpoint", "verify", str(tmp_path)]) == 0


def find_nothing(folder: Path) -> str:
    try:
        Trainee("fsdp").resume(folder)
    except CheckpointError as problem:
        return str(problem)
    return ""


def test_several_ranks_refuse_alike_and_run_nothing(path: Path) -> None:
    marker = path.parent / "harm"
    (path / "local.json").write_bytes(pickle.dumps(Payload(marker)))
    (path / "tensors.json").write_bytes(pickle.dumps(Payload(marker)))
    seal(path)
    first, second = spawn(find_nothing, 2, path.parent)
    assert first == second
    assert "tensors.json is refused: it is not valid JSON" in first
    assert not marker.exists()
