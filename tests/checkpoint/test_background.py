"""Saving beside the training: what is saved is what was, failures are told, and one save is in flight at most."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from helpers.checkpoints import numbered, same_snapshot
from penstock import checkpoint, disk
from penstock.checkpoint import BackgroundSaver, Snapshot, background
from penstock.errors import EnvironmentProblem


def test_training_goes_on_while_the_state_of_before_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, may_go_on = background.commit, threading.Event()

    def slow(*args: object, **options: object) -> Path:
        assert may_go_on.wait(20)
        return real(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(background, "commit", slow)
    saver = BackgroundSaver(tmp_path)
    state = numbered(1)
    saver.start(state)
    for group in state.weights.values():
        for tensor in group.values():
            tensor.zero_()
    assert saver.busy
    assert checkpoint.steps(tmp_path) == []
    may_go_on.set()
    assert saver.wait() == tmp_path / "step-1"
    assert not saver.busy
    assert same_snapshot(checkpoint.load(tmp_path / "step-1"), numbered(1))


def test_the_next_save_waits_and_memory_is_kept(tmp_path: Path) -> None:
    saver = BackgroundSaver(tmp_path, keep=3)
    memory = []
    for step in (1, 2, 3, 4):
        saver.start(numbered(step))
        memory.append({name: copy.data_ptr() for name, copy in saver._copies.items()})
        assert sum(thread.name == "penstock-checkpoint" for thread in threading.enumerate()) <= 1
    assert memory == [memory[0]] * 4
    assert saver.close() == tmp_path / "step-4"
    assert checkpoint.steps(tmp_path) == [2, 3, 4]
    for step in (2, 3, 4):
        assert same_snapshot(checkpoint.load(tmp_path / f"step-{step}"), numbered(step))
    assert saver._copies == {}


def test_a_failure_is_raised_once_by_the_next_save_and_the_saver_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = BackgroundSaver(tmp_path)
    saver.start(numbered(1))
    saver.wait()
    with monkeypatch.context() as patch:
        patch.setattr(disk.os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space")))
        saver.start(numbered(2))
        while saver.busy:
            time.sleep(0.01)
    with pytest.raises(EnvironmentProblem, match=r"step-2 could not be written.*No space"):
        saver.start(numbered(3))
    saver.start(numbered(3))
    assert saver.wait() == tmp_path / "step-3"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1", "step-3"]


def test_what_no_checkpoint_can_hold_is_told_at_once(tmp_path: Path) -> None:
    saver = BackgroundSaver(tmp_path)
    with pytest.raises(TypeError, match="is a function"):
        saver.start(Snapshot(1, {}, {"odd": lambda: 0}, {}))
    saver.start(Snapshot(2, {"weights": {"c": torch.zeros(2, dtype=torch.complex64)}}, {}, {}))
    with pytest.raises(TypeError, match="complex64"):
        saver.wait()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
def test_a_gpus_state_is_copied_before_it_changes(tmp_path: Path) -> None:
    saver = BackgroundSaver(tmp_path)
    values = torch.arange(10_000_000, dtype=torch.float32, device="cuda")
    saver.start(Snapshot(1, {"weights": {"a": values}}, {}, {}))
    values.zero_()
    saver.close()
    assert torch.equal(checkpoint.load(tmp_path / "step-1").weights["weights"]["a"], torch.arange(1e7))
