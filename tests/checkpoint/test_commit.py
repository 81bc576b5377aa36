"""The commit protocol: what a kill, a flipped bit, a truncation or a full disk can and cannot do."""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock import checkpoint, disk
from penstock.boundary.manifests import sealed
from penstock.checkpoint import Snapshot, commit, index, manifest, storage
from penstock.errors import CheckpointError, EnvironmentProblem


def snapshot(step: int) -> Snapshot:
    generator = torch.Generator().manual_seed(step)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return Snapshot(
        step=step,
        weights={"weights": {"a": some(3, 4), "b": some(5).to(torch.bfloat16)}, "ema": {"a": some(3, 4)}},
        state={
            "optimizer": {
                "state": {0: {"step": torch.tensor(float(step)), "exp_avg": some(3, 4)}},
                "param_groups": [{"lr": 1e-3 / 3, "betas": (0.9, 0.999), "params": [0]}],
            },
            "random": {"torch": torch.get_rng_state(), "numpy": np.arange(4, dtype=np.uint32)},
            "position": step * 8,
        },
        config={"seed": 0},
        plan="precision=O1",
    )


def same(left: object, right: object) -> bool:
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return isinstance(right, np.ndarray) and left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, dict):
        return (
            isinstance(right, dict)
            and list(left) == list(right)
            and all(same(left[k], right[k]) for k in left)
        )
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


def assert_same(left: Snapshot, right: Snapshot) -> None:
    assert left.step == right.step
    assert same(dict(left.weights), dict(right.weights))
    assert same(dict(left.state), dict(right.state))
    assert (left.config, left.plan) == (right.config, right.plan)


def test_what_is_saved_comes_back_bit_for_bit(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, snapshot(7))
    assert path.name == "step-7"
    assert (tmp_path / "latest").read_text() == "step-7\n"
    assert_same(checkpoint.load(path), snapshot(7))
    loaded = checkpoint.find(tmp_path)
    assert loaded is not None
    assert loaded.step == 7


def test_nothing_saved_is_none_and_not_an_error(tmp_path: Path) -> None:
    assert checkpoint.find(tmp_path / "absent") is None


def test_two_are_kept_at_least_and_the_older_pruned(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        checkpoint.save(tmp_path, snapshot(step), keep=1)
    assert checkpoint.steps(tmp_path) == [3, 4]
    checkpoint.save(tmp_path, snapshot(5), keep=3)
    assert checkpoint.steps(tmp_path) == [3, 4, 5]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-3", "step-4", "step-5"]


def test_pruning_waits_until_the_newer_one_has_been_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        checkpoint.save(tmp_path, snapshot(step))

    def fails(path: Path, **_: object) -> None:
        raise CheckpointError("does not read back")

    monkeypatch.setattr(commit, "verify", fails)
    with pytest.raises(CheckpointError, match="read back"):
        checkpoint.save(tmp_path, snapshot(3))
    assert checkpoint.steps(tmp_path) == [1, 2, 3]


def test_every_single_flipped_bit_is_refused_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint.save(tmp_path, snapshot(1))
    path = checkpoint.save(tmp_path, snapshot(2))
    rng = random.Random(0)
    files = sorted(path.iterdir())
    assert len(files) == 8
    for file in files:
        original = file.read_bytes()
        for _ in range(40):
            bit = rng.randrange(len(original) * 8)
            damaged = bytearray(original)
            damaged[bit // 8] ^= 1 << bit % 8
            file.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=f"step-2 is refused: {file.name}"):
                checkpoint.load(path)
        file.write_bytes(original)
    checkpoint.load(path)
    files[0].write_bytes(bytes(reversed(files[0].read_bytes())))
    with caplog.at_level(logging.WARNING):
        before = checkpoint.find(tmp_path)
    assert before is not None
    assert_same(before.load(), snapshot(1))
    assert f"step-2 is refused: {files[0].name}" in caplog.text
    assert (tmp_path / "latest").read_text() == "step-1\n"
    assert (tmp_path / "step-2.refused").is_dir()


@pytest.mark.parametrize("share", [0.999, 0.5, 0.0, None])
def test_truncated_and_missing_files_are_refused_before_any_tensor_is_read(
    tmp_path: Path, share: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint.save(tmp_path, snapshot(2))

    def untouchable(*arguments: object, **options: object) -> None:
        raise AssertionError("a file's content was looked at")

    monkeypatch.setattr(storage, "safe_open", untouchable)
    monkeypatch.setattr(index, "read_header", untouchable)
    monkeypatch.setattr(manifest, "digest_file", untouchable)
    for file in sorted(path.iterdir()):
        original = file.read_bytes()
        if share is None:
            file.unlink()
        else:
            file.write_bytes(original[: int(len(original) * share)])
        with pytest.raises(CheckpointError, match=file.name):
            checkpoint.load(path)
        file.write_bytes(original)


def test_none_valid_is_an_error_and_moves_nothing(tmp_path: Path) -> None:
    for step in (1, 2):
        (checkpoint.save(tmp_path, snapshot(step)) / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="No checkpoint") as caught:
        checkpoint.find(tmp_path)
    assert caught.value.exit_code == 5
    assert "step-1" in str(caught.value)
    assert "step-2" in str(caught.value)
    assert checkpoint.steps(tmp_path) == [1, 2]


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it, and what was done to the disk until then stays."""


def _killing(monkeypatch: pytest.MonkeyPatch, at: int) -> Callable[[], int]:
    """Make the `at`-th call that changes the disk raise instead; counts the calls."""
    calls = 0

    def wrap(owner: object, name: str) -> None:
        real = getattr(owner, name)

        def counted(*arguments: object, **options: object) -> object:
            nonlocal calls
            calls += 1
            if calls == at:
                raise Killed
            return real(*arguments, **options)

        monkeypatch.setattr(owner, name, counted)

    wrap(disk.os, "fsync")
    for name in ("rename", "replace", "mkdir", "unlink"):
        wrap(Path, name)
    wrap(shutil, "rmtree")
    return lambda: calls


def test_a_kill_at_every_instant_of_a_save_leaves_a_checkpoint_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        count = _killing(patch, at=-1)
        for step in (1, 2, 3):
            checkpoint.save(tmp_path / "whole", snapshot(step))
        instants = count()
    assert instants > 30
    seen = set()
    for at in range(1, instants + 1):
        folder = tmp_path / str(at)
        done = 0
        with monkeypatch.context() as patch:
            _killing(patch, at)
            try:
                for step in (1, 2, 3):
                    checkpoint.save(folder, snapshot(step))
                    done = step
            except Killed:
                pass
        checkpoint.clean(folder)
        loaded = checkpoint.find(folder)
        found = loaded.step if loaded else 0
        assert found in (done, done + 1)
        if loaded:
            assert_same(loaded.load(), snapshot(found))
        seen.add((done, found))
        checkpoint.save(folder, snapshot(4))
        assert not list(folder.glob("*.tmp"))
    assert {(0, 0), (0, 1), (2, 2), (2, 3)} <= seen


def test_too_little_space_is_found_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path, snapshot(1))
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(EnvironmentProblem, match="free space") as caught:
        checkpoint.save(tmp_path, snapshot(2))
    assert caught.value.exit_code == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-1"]


def test_a_disk_that_fills_up_half_way_leaves_the_older_checkpoint_and_no_rubbish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path, snapshot(1))
    calls = 0

    def full(handle: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk.os, "fsync", full)
    with pytest.raises(EnvironmentProblem, match="No space left"):
        checkpoint.save(tmp_path, snapshot(2))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-1"]
    assert_same(checkpoint.load(tmp_path / "step-1"), snapshot(1))


def test_saving_a_step_again_keeps_the_good_one_and_replaces_a_damaged_one(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, snapshot(1))
    stamp = (path / "manifest.json").stat().st_mtime_ns
    checkpoint.save(tmp_path, snapshot(1))
    assert (path / "manifest.json").stat().st_mtime_ns == stamp
    (path / "weights.safetensors").write_bytes(b"")
    checkpoint.save(tmp_path, snapshot(1))
    assert_same(checkpoint.load(path), snapshot(1))


def test_manifests_cannot_point_outside_their_directory(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, snapshot(1))
    file = path / "manifest.json"
    body = json.loads(file.read_text())
    (tmp_path / "secret.json").write_text("{}")
    body["files"]["../secret.json"] = {"bytes": 2, "sha256": "0" * 64}
    file.write_bytes(sealed(body))
    with pytest.raises(CheckpointError, match="not the name of a checkpoint file"):
        checkpoint.load(path)


def test_a_link_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, snapshot(1))
    (path / "state.json").rename(tmp_path / "elsewhere.json")
    (path / "state.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(CheckpointError, match=r"state\.json is missing"):
        checkpoint.load(path)


def test_a_renamed_checkpoint_is_refused(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, snapshot(1)).rename(tmp_path / "step-9")
    with pytest.raises(CheckpointError, match="of step 1"):
        checkpoint.load(tmp_path / "step-9")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"format": 99, "versions": {"penstock": "7.0"}}, r"its format is 99.*7\.0"),
        ({"format": 99, "versions": 3}, "its format is 99.*unknown"),
        ({"world": 0}, "world is 0, but must be at least 1"),
        ({"files": {"weights.safetensors": 5}}, "files.weights.safetensors is 5"),
        ({"more": 1}, "more"),
    ],
)
def test_a_sealed_manifest_that_is_none_is_refused(
    tmp_path: Path, changes: dict[str, object], match: str
) -> None:
    path = checkpoint.save(tmp_path, snapshot(1))
    body = json.loads((path / "manifest.json").read_text()) | changes
    (path / "manifest.json").write_bytes(sealed(body))
    with pytest.raises(CheckpointError, match=match):
        checkpoint.load(path)


def test_rubbish_of_a_killed_save_is_removed(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, snapshot(1))
    (tmp_path / "step-2.tmp").mkdir()
    (tmp_path / "step-2.tmp" / "weights.safetensors").write_bytes(b"half")
    (tmp_path / "latest.tmp").write_text("step")
    checkpoint.clean(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-1"]


def test_a_damaged_latest_is_named_and_repaired(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint.save(tmp_path, snapshot(1))
    (tmp_path / "latest").write_text("step-8\n")
    loaded = checkpoint.find(tmp_path)
    assert loaded is not None
    assert loaded.step == 1
    assert "latest does not name step-1" in caplog.text
    assert (tmp_path / "latest").read_text() == "step-1\n"
