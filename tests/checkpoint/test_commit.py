"""The commit protocol: what a kill, a flipped bit, a truncation or a full disk can and cannot do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.checkpoints import newest, numbered, same_snapshot
from penstock import checkpoint, disk
from penstock.boundary.manifests import sealed
from penstock.checkpoint import commit
from penstock.errors import CheckpointError, EnvironmentProblem


def test_what_is_saved_comes_back_bit_for_bit(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, numbered(7))
    assert path.name == "step-7"
    assert (tmp_path / "latest").read_text() == "step-7\n"
    assert same_snapshot(checkpoint.load(path), numbered(7))
    assert newest(tmp_path).step == 7


def test_two_are_kept_at_least_and_the_older_pruned(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        checkpoint.save(tmp_path, numbered(step), keep=1)
    assert checkpoint.steps(tmp_path) == [3, 4]
    checkpoint.save(tmp_path, numbered(5), keep=3)
    assert checkpoint.steps(tmp_path) == [3, 4, 5]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-3", "step-4", "step-5"]


@pytest.mark.parametrize(
    ("problem", "kind"),
    [
        (CheckpointError("does not read back"), CheckpointError),
        (OSError(5, "does not read back"), EnvironmentProblem),
    ],
)
def test_pruning_waits_until_the_newer_one_has_been_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: Exception, kind: type[Exception]
) -> None:
    for step in (1, 2):
        checkpoint.save(tmp_path, numbered(step))

    def fails(path: Path, **_: object) -> None:
        raise problem

    monkeypatch.setattr(commit, "verify", fails)
    with pytest.raises(kind, match="read back"):
        checkpoint.save(tmp_path, numbered(3))
    assert checkpoint.steps(tmp_path) == [1, 2, 3]


def test_none_valid_is_an_error_and_moves_nothing(tmp_path: Path) -> None:
    for step in (1, 2):
        (checkpoint.save(tmp_path, numbered(step)) / "state.json").write_text("{}")
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
            checkpoint.save(tmp_path / "whole", numbered(step))
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
                    checkpoint.save(folder, numbered(step))
                    done = step
            except Killed:
                pass
        checkpoint.clean(folder)
        loaded = checkpoint.find(folder)
        found = loaded.step if loaded else 0
        assert found in (done, done + 1)
        if loaded:
            assert same_snapshot(loaded.load(), numbered(found))
        seen.add((done, found))
        checkpoint.save(folder, numbered(4))
        assert not list(folder.glob("*.tmp"))
    assert {(0, 0), (0, 1), (2, 2), (2, 3)} <= seen


def test_too_little_space_is_found_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path, numbered(1))
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(EnvironmentProblem, match="free space") as caught:
        checkpoint.save(tmp_path, numbered(2))
    assert caught.value.exit_code == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-1"]


def test_saving_a_step_again_keeps_the_good_one_and_replaces_a_damaged_one(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, numbered(1))
    stamp = (path / "manifest.json").stat().st_mtime_ns
    checkpoint.save(tmp_path, numbered(1))
    assert (path / "manifest.json").stat().st_mtime_ns == stamp
    (path / "weights.safetensors").write_bytes(b"")
    checkpoint.save(tmp_path, numbered(1))
    assert same_snapshot(checkpoint.load(path), numbered(1))


def test_a_link_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, numbered(1))
    (path / "state.json").rename(tmp_path / "elsewhere.json")
    (path / "state.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(CheckpointError, match=r"state\.json is missing"):
        checkpoint.load(path)


def test_a_renamed_checkpoint_is_refused(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, numbered(1)).rename(tmp_path / "step-9")
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
    path = checkpoint.save(tmp_path, numbered(1))
    body = json.loads((path / "manifest.json").read_text()) | changes
    (path / "manifest.json").write_bytes(sealed(body))
    with pytest.raises(CheckpointError, match=match):
        checkpoint.load(path)


def test_rubbish_of_a_killed_save_is_removed(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, numbered(1))
    (tmp_path / "step-2.tmp").mkdir()
    (tmp_path / "step-2.tmp" / "weights.safetensors").write_bytes(b"half")
    (tmp_path / "latest.tmp").write_text("step")
    checkpoint.clean(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-1"]


def test_a_damaged_latest_is_named_and_repaired(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint.save(tmp_path, numbered(1))
    (tmp_path / "latest").write_text("step-8\n")
    assert newest(tmp_path).step == 1
    assert "latest does not name step-1" in caplog.text
    assert (tmp_path / "latest").read_text() == "step-1\n"
