"""A run that is killed, however often and wherever, ends with the same losses and weights, bit for bit."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from helpers.jobs import JOBS, settings
from helpers.sweeps import sweep
from penstock import checkpoint
from penstock.config.load import dump_toml
from penstock.config.machine import Machine, save_machine
from penstock.config.plan import Plan
from penstock.config.run import Augment, Recipe, RunConfig
from penstock.train.metrics import read_metrics

FAULTS = ["step:8", "flip:checkpoints/step-6/optimizer.safetensors", "fsync:4", "full:10", "none"]


def config_in(folder: Path, job: str = "vit", **changes: Any) -> RunConfig:
    """24 steps of several epochs of a job of `helpers.jobs`; checkpoints in the middle of epochs and of log windows."""
    machine = Machine(
        name="desk",
        device="cpu",
        source="measured",
        peak_flops={"fp32": 1e11, "bf16": 1e11},
        launch_seconds=1e-6,
    )
    config = RunConfig(
        **settings(job, folder / "texts"),
        recipe=Recipe(
            steps=24,
            lr=3e-3,
            warmup_steps=4,
            ema_decay=0.9,
            augment=Augment(crop_scale_min=0.6, mixup=0.3, cutmix=0.5, erase=0.2, label_smoothing=0.1),
        ),
        plan=Plan(micro_batch=64 if job == "vit" else 16, accumulate=2),
        machine=str(save_machine(machine, folder / "machine.json")),
        output=str(folder / "run"),
        device="cpu",
        seed=3,
        checkpoint_every=5,
        log_every=3,
    )
    return replace(config, **changes)


def short(folder: Path, job: str) -> RunConfig:
    """12 steps of it, saved every third."""
    folder.mkdir()
    config = config_in(folder, job, checkpoint_every=3)
    return replace(config, recipe=replace(config.recipe, steps=12))


def written(config: RunConfig) -> Path:
    """`config` as a file beside its output."""
    file = Path(config.output).with_suffix(".toml")
    file.write_text(dump_toml(config))
    return file


def live(config: RunConfig, faults: Sequence[str], *, timeout: float = 240) -> list[str]:
    """Run `config` through `faults`; how each life ended."""
    command = [sys.executable, "-W", "error", "-m", "helpers.faults", str(written(config)), *faults]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr
    ends = done.stdout.splitlines()
    lives = [fault for fault in faults if not fault.startswith(("flip:", "cut:", "in:"))]
    assert len(ends) == len(lives), done.stderr
    assert not any(end.endswith("exit 70") for end in ends), done.stderr
    return ends


def losses(config: RunConfig) -> list[float]:
    records = read_metrics(Path(config.output) / "metrics.jsonl")
    windows = [record for record in records if record["event"] == "steps"]
    assert [w["step"] for w in windows] == sorted({w["step"] for w in windows})
    found = [loss for window in windows for loss in window["losses"]]
    assert windows[-1]["step"] == len(found)
    return found


def assert_same_end(run: RunConfig, undisturbed: RunConfig) -> None:
    """Every loss, every weight, every tensor of state and the evaluation are equal, not merely close."""
    assert losses(run) == losses(undisturbed)
    last = f"checkpoints/step-{undisturbed.recipe.steps}"
    names = sorted(file.name for file in (Path(undisturbed.output) / last).glob("*.safetensors"))
    assert {"weights.safetensors", "ema.safetensors", "optimizer.safetensors", "random.safetensors"} <= set(
        names
    )
    for name in names:
        ours, theirs = (load_file(Path(c.output) / last / name) for c in (run, undisturbed))
        assert ours.keys() == theirs.keys()
        for key, tensor in ours.items():
            assert tensor.equal(theirs[key]), f"{name}: {key}"
    ours, theirs = (checkpoint.load(Path(c.output) / last).state["progress"] for c in (run, undisturbed))
    assert ours == theirs


@pytest.mark.parametrize("job", sweep(JOBS, (), slow=["vit", "decoder"]))
def test_a_kill_a_flipped_bit_a_kill_in_a_save_and_a_full_disk_change_nothing(
    tmp_path: Path, job: str
) -> None:
    calm, hit = (short(tmp_path / name, job) for name in ("calm", "hit"))
    ends = live(calm, ["none", f"in:{written(hit)}", *FAULTS])
    assert ends == ["none exit 0", "step:8 signal 9", "fsync:4 signal 9", "full:10 exit 3", "none exit 0"]
    assert (Path(hit.output) / "checkpoints" / "step-6.refused").is_dir()
    assert len(losses(calm)) == 12
    assert_same_end(hit, calm)
    assert not list(tmp_path.rglob("*.tmp"))


mostly_vit = pytest.mark.parametrize(
    "job",
    [pytest.param(name, marks=() if name == "vit" else pytest.mark.faults) for name in JOBS],
    indirect=True,
)
"""The other jobs in the whole fault suite only."""


@pytest.fixture(scope="module", params=sweep(JOBS, (), slow=["vit"]))
def job(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def undisturbed(job: str, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    config = config_in(tmp_path_factory.mktemp("undisturbed"), job)
    assert live(config, ["none"]) == ["none exit 0"]
    assert len(losses(config)) == 24
    return config


@pytest.mark.slow
def test_kills_at_steps_and_during_saves_change_nothing(
    undisturbed: RunConfig, tmp_path: Path, job: str
) -> None:
    config = config_in(tmp_path, job)
    ends = live(config, ["step:3", "step:7", "fsync:4", "step:8", "fsync:13", "step:18", "step:24", "none"])
    assert [end.split(maxsplit=1)[1] for end in ends] == ["signal 9"] * 7 + ["exit 0"]
    assert_same_end(config, undisturbed)
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.slow
def test_being_asked_to_stop_saves_at_once_and_asks_for_a_requeue(
    undisturbed: RunConfig, tmp_path: Path, job: str
) -> None:
    config = config_in(tmp_path, job, keep=9)
    assert live(config, ["term:8", "term:12", "none"]) == ["term:8 exit 75", "term:12 exit 75", "none exit 0"]
    records = read_metrics(Path(config.output) / "metrics.jsonl")
    evaluated = {record["step"] for record in records if record["event"] == "evaluation"}
    asked = {5, 8, 10, 12, 15, 20, 24}
    beside = {*checkpoint.steps(Path(config.output) / "checkpoints")} ^ asked
    assert len(beside) <= 1, "that of the best evaluation, which depends on the processor's rounding"
    assert beside <= evaluated
    assert_same_end(config, undisturbed)


@pytest.mark.slow
@mostly_vit
def test_a_damaged_checkpoint_costs_time_but_no_bit(undisturbed: RunConfig, tmp_path: Path, job: str) -> None:
    config = config_in(tmp_path, job)
    ends = live(config, ["step:12", "flip:checkpoints/step-10/optimizer.safetensors", "none"])
    assert ends == ["step:12 signal 9", "none exit 0"]
    assert (Path(config.output) / "checkpoints" / "step-10.refused").is_dir()
    assert_same_end(config, undisturbed)


@pytest.mark.slow
def test_no_checkpoint_to_trust_ends_with_its_own_code(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    cuts = [f"cut:checkpoints/step-{step}/weights.safetensors" for step in (5, 10)]
    assert live(config, ["step:12", *cuts, "none"]) == ["step:12 signal 9", "none exit 5"]


@pytest.mark.slow
@mostly_vit
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.faults) for seed in range(1, 5))])
def test_kills_at_random_times_change_nothing(
    undisturbed: RunConfig, tmp_path: Path, job: str, seed: int
) -> None:
    config = config_in(tmp_path, job)
    dice = random.Random(seed)
    live(config, [*(f"time:{dice.uniform(0.05, 2.0):.3f}" for _ in range(10)), "none"])
    assert_same_end(config, undisturbed)


@pytest.mark.slow
@mostly_vit
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.faults)])
def test_kills_at_every_fsync_and_many_steps_change_nothing(
    undisturbed: RunConfig, tmp_path: Path, job: str, seed: int
) -> None:
    config = config_in(tmp_path, job)
    dice = random.Random(seed)
    faults = [f"fsync:{n}" for n in range(1, 26)] + [
        f"step:{n}" for n in sorted(dice.sample(range(6, 24), 8))
    ]
    live(config, [*faults, "none"], timeout=290)
    assert_same_end(config, undisturbed)


@pytest.mark.slow
@mostly_vit
def test_worker_processes_and_kills_change_nothing(undisturbed: RunConfig, tmp_path: Path, job: str) -> None:
    config = config_in(tmp_path, job)
    workers = replace(config, data=replace(config.data, workers=2))
    live(workers, ["step:9", "step:17", "none"])
    assert_same_end(workers, undisturbed)
