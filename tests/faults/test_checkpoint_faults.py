"""What kills, full disks, flipped bits and missing bytes do to checkpoints: the rows of the table of faults.

Every row has a short form, which runs with all tests, and a whole one under the marker `faults`, whose figures go to
benchmarks/results/faults_checkpoint.json.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from helpers.checkpoints import Trainee, newest, numbered, same_snapshot
from helpers.rows import Note
from helpers.spawn import RankFailed, spawn
from penstock import checkpoint
from penstock.checkpoint import BackgroundSaver, index, manifest, storage
from penstock.errors import CheckpointError, EnvironmentProblem

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "faults_checkpoint.json"
whole = pytest.mark.faults


# -- SIGKILL during save


def save_until_killed(folder: Path, doomed: int, first: int, after: float, background: bool) -> None:
    """Save step after step without a pause; rank `doomed` dies `after` seconds after save number `first` began."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    checkpoint.clean(folder)
    stored = checkpoint.find(folder)
    step = stored.step if stored else 0
    saver = BackgroundSaver(folder) if background else None
    for number in itertools.count():
        step += 1
        if rank == doomed and number == first:
            threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL)).start()
        snapshot = numbered(step, rows=20_000, rank=rank)
        if saver:
            saver.start(snapshot)
            saver.wait()
        else:
            checkpoint.save(folder, snapshot)
        if rank == 0:
            (folder.parent / "next").write_text(str(step))
            (folder.parent / "next").replace(folder.parent / "done")


@pytest.mark.timeout(1200)  # 100 kills take four minutes on two idle cores
@pytest.mark.parametrize(
    ("world", "kills"),
    [
        pytest.param(1, 3, marks=pytest.mark.sweep),
        (2, 3),
        pytest.param(1, 50, marks=whole),
        pytest.param(2, 50, marks=whole),
    ],
)
def test_after_a_kill_during_a_save_the_newest_committed_loads(
    note: Note, tmp_path: Path, world: int, kills: int
) -> None:
    rng, folder = random.Random(kills), tmp_path / "checkpoints"
    done, left, promised, slowest = 0, 0, 0, 0.0
    for kill in range(kills):
        (tmp_path / "done").write_text(str(done))
        doomed, first, after = rng.randrange(world), rng.randrange(3), rng.uniform(0.0, 0.3)
        promised += first  # saves that are over before the doomed one begins, on a machine of any speed
        arguments = (folder, doomed, first, after, kill % 2 == 1)
        with pytest.raises(RankFailed, match="SIGKILL"):
            spawn(save_until_killed, world, *arguments, timeout=60, group=world > 1)
        left += bool(list(folder.glob("*.tmp")))
        begun = int((tmp_path / "done").read_text())
        started = time.perf_counter()
        checkpoint.clean(folder)
        found = checkpoint.find(folder)
        slowest = max(slowest, time.perf_counter() - started)
        done = found.step if found else 0
        # One step later where the kill came between the rename and the note of it.
        assert done in (begun, begun + 1)
        if found:
            assert found.world == world
            of_rank_0 = checkpoint.open_verified(folder / f"step-{done}").load(rank=0)
            assert same_snapshot(of_rank_0, numbered(done, rows=20_000))
    assert done >= promised > kills / 2, "every save that was over is there"
    if kills >= 50:
        assert left, "no kill came while a checkpoint was being written"
        note(
            f"SIGKILL during save, {world} rank{'s' if world > 1 else ''}",
            kills=kills,
            loaded=kills,
            cut_off_while_writing=left,
            steps_committed=done,
            slowest_recovery_seconds=slowest,
        )


# -- disk full during save

FULL_DISK = """
import sys
from pathlib import Path
from penstock import checkpoint
from penstock.checkpoint import commit
from penstock.errors import EnvironmentProblem
from helpers.checkpoints import numbered, same_snapshot

folder = Path(sys.argv[1])
checkpoint.save(folder, numbered(1, rows=20_000))  # 1.0 MB
told = []
for check in (True, False):
    if not check:
        commit._require_space = lambda *_: None  # somebody else fills the disk after it was looked at
    try:
        checkpoint.save(folder, numbered(2, rows=60_000))  # 2.9 MB
    except EnvironmentProblem as problem:
        told.append(str(problem))
    assert sorted(p.name for p in folder.iterdir()) == ["latest", "step-1"], list(folder.iterdir())
    found = checkpoint.find(folder)
    assert found is not None and same_snapshot(found.load(), numbered(1, rows=20_000))
assert "MB free" in told[0], told
assert "No space left on device" in told[1], told
checkpoint.save(folder, numbered(2, rows=20_000))  # and it goes on
assert checkpoint.steps(folder) == [1, 2]
"""


def _small_disk(size: str) -> list[str] | None:
    """How to run a program with a small file system of its own at a folder; None where this machine forbids it."""
    try:
        tried = subprocess.run(
            ["unshare", "-Urm", "mount", "-t", "tmpfs", "tmpfs", "/tmp"], capture_output=True, timeout=10
        )
    except OSError:
        return None
    if tried.returncode:
        return None
    return [
        "unshare", "-Urm", "sh", "-ec", f'mount -t tmpfs -o size={size} tmpfs "$1"; shift; exec "$@"', "sh",
    ]  # fmt: skip


@pytest.mark.parametrize("recorded", [False, pytest.param(True, marks=whole)])
def test_a_real_disk_that_fills_leaves_the_old_checkpoint_and_no_rubbish(
    note: Note, tmp_path: Path, recorded: bool
) -> None:
    prefix = _small_disk("3m")
    if prefix is None:
        pytest.skip("no file system can be mounted here; the limit on file sizes below stands for it")
    disk = tmp_path / "disk"
    disk.mkdir()
    ended = subprocess.run(
        [*prefix, str(disk), sys.executable, "-c", FULL_DISK, str(disk / "checkpoints")],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stderr
    note("disk full during save, tmpfs of 3 MB", old_intact=True, temporary_files_left=0, exit_code=3)


def save_beyond_a_limit(folder: Path) -> tuple[str, int]:
    """Rank 1 may write no file above 100 kB from its second save on: the kernel says so in the middle of one."""
    rank = dist.get_rank()
    checkpoint.save(folder, numbered(1, rows=20_000, rank=rank))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    told, code = "", 0
    try:
        checkpoint.save(folder, numbered(2, rows=20_000, rank=rank))
    except EnvironmentProblem as problem:
        told, code = str(problem), int(problem.exit_code)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    dist.barrier()
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-1"]
    dist.barrier()  # so that no rank is in its next save while another looks
    checkpoint.save(folder, numbered(2, rows=20_000, rank=rank))
    return told, code


def test_one_of_two_ranks_that_cannot_write_stops_both_and_both_go_on(tmp_path: Path) -> None:
    first, second = spawn(save_beyond_a_limit, 2, tmp_path)
    assert first == second
    assert "(rank 1): [Errno 27] File too large" in first[0]
    assert first[1] == 3
    assert newest(tmp_path).step == 2


# -- flipped bits


@pytest.fixture
def saved_on_two(tmp_path: Path) -> Path:
    """Steps 1 and 2, saved by two ranks."""
    spawn(save_two_steps, 2, tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


def save_two_steps(folder: Path) -> None:
    for step in (1, 2):
        checkpoint.save(folder, numbered(step, rank=dist.get_rank()))


def kind_of(file: Path) -> str:
    return file.name.replace("-0-of-2", "").replace("-1-of-2", "")


@pytest.mark.parametrize("flips", [8, pytest.param(200, marks=whole)])
def test_every_flipped_bit_is_refused_by_name_and_the_step_before_is_used(
    note: Note, saved_on_two: Path, flips: int, caplog: pytest.LogCaptureFixture
) -> None:
    rng, refused = random.Random(flips), Counter[str]()
    path = saved_on_two / "step-2"
    files = sorted(path.iterdir())
    for file in files:
        original = file.read_bytes()
        for flip in range(flips):
            bit = rng.randrange(len(original) * 8)
            damaged = bytearray(original)
            damaged[bit // 8] ^= 1 << bit % 8
            file.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=f"step-2 is refused: {file.name}"):
                checkpoint.open_verified(path)
            refused[kind_of(file)] += 1
            if flip % 50 == 0:
                caplog.clear()
                with caplog.at_level(logging.WARNING):
                    before = checkpoint.find(saved_on_two)
                assert before is not None
                assert before.step == 1
                assert f"step-2 is refused: {file.name}" in caplog.text
                (saved_on_two / "step-2.refused").rename(path)
        file.write_bytes(original)
    checkpoint.open_verified(path)
    kinds = {kind_of(file) for file in files}
    assert {
        "weights.safetensors", "optimizer.safetensors", "local.json", "tensors.json", "state.json",
    } < kinds  # fmt: skip
    assert {"manifest.json", "config.json", "local.safetensors"} < kinds
    note("200 bit flips in every kind of file", files=len(files), tried=flips * len(files), refused=refused)


def test_a_flip_in_latest_changes_nothing(saved_on_two: Path) -> None:
    latest = saved_on_two / "latest"
    for bit in range(8 * len(latest.read_bytes())):
        damaged = bytearray(b"step-2\n")
        damaged[bit // 8] ^= 1 << bit % 8
        latest.write_bytes(damaged)
        assert newest(saved_on_two).step == 2
        assert latest.read_bytes() == b"step-2\n"


# -- truncated and missing files


@pytest.mark.parametrize("rows", [2_000, pytest.param(4_000_000, marks=whole)])
def test_truncated_and_missing_files_are_refused_at_once_with_no_tensor_touched(
    note: Note, tmp_path: Path, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint.save(tmp_path, numbered(2, rows=rows))
    size = checkpoint.verify(path).bytes

    def untouchable(*_: object) -> None:
        raise AssertionError("a file's content was looked at")

    monkeypatch.setattr(manifest, "digest_file", untouchable)
    monkeypatch.setattr(storage, "safe_open", untouchable)
    monkeypatch.setattr(index, "read_header", untouchable)
    slowest, tried = 0.0, 0
    for file in sorted(path.iterdir()):
        kept = tmp_path / "kept"
        for share in (0.999, 0.5, 0.0, None):
            shutil.copyfile(file, kept)
            if share is None:
                file.unlink()
            else:
                os.truncate(file, int(file.stat().st_size * share))
            started = time.perf_counter()
            with pytest.raises(CheckpointError, match=f"step-2 is refused: {file.name}"):
                checkpoint.find(tmp_path)
            slowest, tried = max(slowest, time.perf_counter() - started), tried + 1
            kept.replace(file)
    assert slowest < 1.0
    monkeypatch.undo()
    assert checkpoint.find(tmp_path) is not None
    note("truncated or missing files", bytes=size, tried=tried, refused=tried, slowest_seconds=slowest)


# -- saved on two ranks, loaded on any number


def train_on(layout: str, folder: Path, save: bool) -> list[float]:
    trainee = Trainee(layout, torch.float32)
    if save:
        trainee.train(3)
        checkpoint.save(folder, trainee.snapshot())
    else:
        trainee.resume(folder)
    return trainee.train(20)


@pytest.mark.parametrize("saving", [pytest.param("fsdp", marks=whole), pytest.param("ddp", marks=whole)])
def test_saved_on_two_ranks_and_loaded_on_any_number(note: Note, tmp_path: Path, saving: str) -> None:
    undisturbed = spawn(train_on, 2, saving, tmp_path, True)[0]
    deviations = {}
    for layout, world in (("single", 1), ("fsdp", 2), ("ddp", 2), ("fsdp", 3), ("fsdp", 4), ("hsdp", 4)):
        if layout == "single":
            losses = train_on(layout, tmp_path, False)
        else:
            losses = spawn(train_on, world, layout, tmp_path, False)[0]
        worst = max(abs(a - b) / abs(b) for a, b in zip(losses, undisturbed))
        assert worst <= 1e-6, (layout, world)
        if (layout, world) == (saving, 2):
            assert losses == undisturbed
        deviations[f"{layout} {world}"] = worst
    note(f"saved by {saving} on 2 ranks", steps=20, dtype="float32", largest_relative_deviation=deviations)


def test_the_figures_are_whole() -> None:
    """The table that is published has all its rows."""
    rows = json.loads(RESULTS.read_text())["rows"]
    assert rows["SIGKILL during save, 1 rank"]["loaded"] == rows["SIGKILL during save, 1 rank"]["kills"] == 50
    assert rows["SIGKILL during save, 2 ranks"]["loaded"] == 50
    flips = rows["200 bit flips in every kind of file"]
    assert sum(flips["refused"].values()) == flips["tried"] >= 200 * 10
    assert rows["truncated or missing files"]["slowest_seconds"] < 1.0
