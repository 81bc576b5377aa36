"""Several real processes save and read one checkpoint: any layout in, any layout out, one outcome for all ranks."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.checkpoints import Trainee, numbered
from helpers.spawn import spawn
from penstock import checkpoint
from penstock.checkpoint import Snapshot, storage
from penstock.errors import CheckpointError, EnvironmentProblem, PenstockError

Run = tuple[list[float], dict[str, torch.Tensor]]


def train_and_save(layout: str, folder: Path, steps: int) -> Run:
    """Three steps, a save, and what then happens in an undisturbed run."""
    trainee = Trainee(layout)
    trainee.train(3)
    torch.rand(trainee.rank + 1)  # each rank's generator elsewhere
    checkpoint.save(folder, trainee.snapshot())
    return trainee.train(steps), trainee.whole()


def resume_and_train(layout: str, folder: Path, steps: int) -> Run:
    trainee = Trainee(layout)
    trainee.resume(folder)
    return trainee.train(steps), trainee.whole()


def on(layout: str, world: int, function: Any, *args: Any) -> Run:
    if layout == "single":
        result: Run = function(layout, *args)
        return result
    runs: list[Run] = spawn(function, world, layout, *args)
    assert all(losses == runs[0][0] for losses, _ in runs)
    return runs[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], tuple[Path, Run]]:
    """Checkpoints of three layouts, each with the run that was never stopped."""
    found = {}
    for layout, world in (("single", 1), ("fsdp", 2), ("hsdp", 4)):
        folder = tmp_path_factory.mktemp(layout)
        found[layout, world] = (folder, on(layout, world, train_and_save, folder, 20))
    return found


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (("single", 1), ("fsdp", 2)),
        (("fsdp", 2), ("single", 1)),
        (("fsdp", 2), ("fsdp", 2)),
        pytest.param(("fsdp", 2), ("ddp", 2), marks=pytest.mark.sweep),
        (("fsdp", 2), ("fsdp", 3)),
        pytest.param(("hsdp", 4), ("fsdp", 2), marks=pytest.mark.sweep),
        (("hsdp", 4), ("single", 1)),
        pytest.param(("fsdp", 2), ("fsdp", 4), marks=pytest.mark.sweep),
        pytest.param(("fsdp", 2), ("hsdp", 4), marks=pytest.mark.sweep),
        pytest.param(("hsdp", 4), ("hsdp", 4), marks=pytest.mark.sweep),
        pytest.param(("hsdp", 4), ("fsdp", 4), marks=pytest.mark.sweep),
        pytest.param(("single", 1), ("ddp", 3), marks=pytest.mark.sweep),
    ],
)
def test_any_layout_goes_on_where_any_other_stopped(
    saved: dict[tuple[str, int], tuple[Path, Run]], source: tuple[str, int], target: tuple[str, int]
) -> None:
    folder, (losses, weights) = saved[source]
    again, found = on(*target, resume_and_train, folder, 20)
    if source == target:
        assert again == losses
        assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
    else:
        # Sums over samples in another order: 1e-15 and less was seen in fp64.
        assert again == pytest.approx(losses, rel=1e-12)
        for name, tensor in weights.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-12)


def read_locals(layout: str, folder: Path) -> tuple[dict[str, Any], int]:
    snapshot = Trainee(layout).resume(folder)
    return dict(snapshot.local), snapshot.world


def test_what_is_a_ranks_own_comes_back_to_it_or_to_nobody(
    saved: dict[tuple[str, int], tuple[Path, Run]],
) -> None:
    folder = saved["fsdp", 2][0]
    (first, _), (second, world) = spawn(read_locals, 2, "fsdp", folder)
    assert (first["random"]["rank"], second["random"]["rank"], world) == (0, 1, 2)
    assert not torch.equal(first["random"]["torch"], second["random"]["torch"])
    assert spawn(read_locals, 3, "ddp", folder) == [({}, 2)] * 3


def test_replicas_are_written_once_and_shards_by_their_owners(
    saved: dict[tuple[str, int], tuple[Path, Run]],
) -> None:
    single, sharded = (saved[key][0] / "step-3" for key in (("single", 1), ("hsdp", 4)))

    def size(path: Path, kind: str) -> int:
        return sum(tensor.numel() for tensor in _tensors(path, kind).values())

    assert size(sharded, "weights") == size(single, "weights") == 99
    assert size(sharded, "optimizer") == size(single, "optimizer")
    names = {path.name for path in sharded.iterdir()}
    assert {"weights-0-of-4.safetensors", "local-3-of-4.json", "tensors.json", "manifest.json"} <= names
    assert not any("metadata" in name or name.endswith(".distcp") for name in names)


def _tensors(path: Path, kind: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    files = path.glob(f"{kind}*.safetensors")
    return {f"{file.name}/{name}": t for file in files for name, t in load_file(file).items()}


def _filling_disk(rank: int, function: str) -> None:
    """From now on rank `rank` finds the disk full when it calls `function`."""
    if dist.get_rank() == rank:

        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        vars(storage)[function] = full


def fail_on_one_rank(folder: Path, rank: int, how: str) -> tuple[str, str]:
    layout = Trainee("fsdp")
    layout.train(1)
    checkpoint.save(folder, layout.snapshot())
    layout.train(1)
    snapshot = layout.snapshot()
    if how == "tensors":
        _filling_disk(rank, "write_tensors")
    elif how == "documents":
        _filling_disk(rank, "write_file")
    elif dist.get_rank() == rank:
        snapshot = Snapshot(9, {}, {}, {}, local={"odd": torch.zeros(2, dtype=torch.complex64)})
    else:
        snapshot = Snapshot(9, {}, {}, {})
    try:
        checkpoint.save(folder, snapshot)
    except (PenstockError, RuntimeError) as problem:
        return type(problem).__name__, str(problem)
    return "", ""


@pytest.mark.parametrize(
    ("rank", "how"),
    [
        (0, "tensors"),
        (1, "documents"),
        pytest.param(1, "tensors", marks=pytest.mark.sweep),
        pytest.param(0, "documents", marks=pytest.mark.sweep),
    ],
)
def test_a_full_disk_on_one_rank_is_the_same_error_on_all(tmp_path: Path, rank: int, how: str) -> None:
    told = spawn(fail_on_one_rank, 2, tmp_path, rank, how)
    assert told[0] == told[1]
    assert told[0][0] == "EnvironmentProblem"
    assert f"(rank {rank}): [Errno 28] No space left" in told[0][1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1"]
    assert checkpoint.load(tmp_path / "step-1").step == 1


def test_a_bug_on_one_rank_is_the_same_error_on_all(tmp_path: Path) -> None:
    told = spawn(fail_on_one_rank, 2, tmp_path, 1, "bug")
    assert told[0] == told[1]
    assert told[0][0] == "RuntimeError"
    assert "Rank 1" in told[0][1]
    assert "complex64" in told[0][1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1"]


def find_step(folder: Path) -> tuple[int, str]:
    try:
        stored = checkpoint.find(folder)
    except CheckpointError as problem:
        return -1, str(problem)
    return (stored.step if stored else 0), ""


@pytest.mark.slow
def test_damage_that_one_rank_finds_is_refused_by_all(
    tmp_path: Path, saved: dict[tuple[str, int], tuple[Path, Run]]
) -> None:
    assert spawn(find_step, 2, tmp_path / "none") == [(0, ""), (0, "")]
    for step in (1, 2):
        checkpoint.save(tmp_path, numbered(step))
    for name in ("ema.safetensors", "config.json"):
        file = tmp_path / "step-2" / name
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        assert spawn(find_step, 2, tmp_path) == [(1, ""), (1, "")]
        assert (tmp_path / "step-2.refused").is_dir()
        (tmp_path / "step-2.refused").rename(tmp_path / "step-2")
        file.write_bytes(whole)
    for step in (1, 2):
        (tmp_path / f"step-{step}" / "state.json").unlink()
    told = spawn(find_step, 2, tmp_path)
    assert told[0] == told[1]
    assert told[0][0] == -1
    assert "step-2 is refused: state.json is missing" in told[0][1]


def save_in_the_background(folder: Path) -> tuple[bool, str, str, list[int]]:
    saver = checkpoint.BackgroundSaver(folder)
    trainee = Trainee("fsdp")
    trainee.train(1)
    expected = trainee.whole()
    saver.start(trainee.snapshot())
    trainee.train(3)  # changes every tensor in place
    saver.wait()
    other = Trainee("fsdp")
    other.resume(folder)
    intact = all(torch.equal(other.whole()[name], tensor) for name, tensor in expected.items())

    real, told = storage.write_tensors, ""
    _filling_disk(1, "write_tensors")
    saver.start(trainee.snapshot())
    trainee.train(1)
    try:
        saver.start(trainee.snapshot())
    except EnvironmentProblem as problem:
        told = str(problem)
    vars(storage)["write_tensors"] = real
    trainee.train(1)
    saver.start(trainee.snapshot())
    saved = saver.close()
    return intact, told, saved.name if saved else "", checkpoint.steps(folder)


def test_saving_in_the_background_keeps_what_was_and_tells_failures_at_the_next_save(tmp_path: Path) -> None:
    first, second = spawn(save_in_the_background, 2, tmp_path)
    assert first == second
    intact, told, name, steps = first
    assert intact
    assert "step-4 could not be written (rank 1)" in told
    assert (name, steps) == ("step-6", [1, 6])
