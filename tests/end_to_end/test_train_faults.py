"""A run that is killed, however often and wherever, ends with the same losses and weights, bit for bit."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from penstock import checkpoint
from penstock.config.load import dump_toml
from penstock.config.machine import Machine, save_machine
from penstock.config.model import ViTConfig
from penstock.config.plan import Plan
from penstock.config.run import Augment, Recipe, RunConfig
from penstock.train.metrics import read_metrics

MODEL = ViTConfig(
    image_size=8,
    patch_size=4,
    channels=1,
    width=16,
    depth=2,
    heads=2,
    mlp_width=32,
    classes=10,
    dropout=0.1,
    drop_path=0.2,
)


def config_in(folder: Path, **changes: object) -> RunConfig:
    """24 steps of 2 × 64 samples, two epochs and a bit; checkpoints in the middle of epochs and of log windows."""
    machine = Machine(
        name="desk",
        device="cpu",
        source="measured",
        peak_flops={"fp32": 1e11, "bf16": 1e11},
        launch_seconds=1e-6,
    )
    config = RunConfig(
        model=MODEL,
        recipe=Recipe(
            steps=24,
            lr=3e-3,
            warmup_steps=4,
            ema_decay=0.9,
            augment=Augment(crop_scale_min=0.6, mixup=0.3, cutmix=0.5, erase=0.2, label_smoothing=0.1),
        ),
        plan=Plan(micro_batch=64, accumulate=2),
        machine=str(save_machine(machine, folder / "machine.json")),
        output=str(folder / "run"),
        device="cpu",
        seed=3,
        checkpoint_every=5,
        log_every=3,
    )
    return replace(config, **changes)  # type: ignore[arg-type]


def live(config: RunConfig, faults: Sequence[str], *, timeout: float = 240) -> list[str]:
    """Run `config` through `faults`; how each life ended."""
    file = Path(config.output).with_suffix(".toml")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(dump_toml(config))
    command = [sys.executable, "-W", "error", "-m", "helpers.faults", str(file), *faults]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr
    ends = done.stdout.splitlines()
    assert len(ends) == len([fault for fault in faults if not fault.startswith(("flip", "cut"))]), done.stderr
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


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    config = config_in(tmp_path_factory.mktemp("undisturbed"))
    assert live(config, ["none"]) == ["none exit 0"]
    assert len(losses(config)) == 24
    return config


def test_kills_at_steps_and_during_saves_change_nothing(undisturbed: RunConfig, tmp_path: Path) -> None:
    config = config_in(tmp_path)
    ends = live(config, ["step:3", "step:7", "fsync:4", "step:8", "fsync:13", "step:18", "step:24", "none"])
    assert [end.split(maxsplit=1)[1] for end in ends] == ["signal 9"] * 7 + ["exit 0"]
    assert_same_end(config, undisturbed)
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.slow
def test_being_asked_to_stop_saves_at_once_and_asks_for_a_requeue(
    undisturbed: RunConfig, tmp_path: Path
) -> None:
    config = config_in(tmp_path, keep=9)
    assert live(config, ["term:8", "term:12", "none"]) == ["term:8 exit 75", "term:12 exit 75", "none exit 0"]
    assert checkpoint.steps(Path(config.output) / "checkpoints") == [5, 8, 10, 12, 15, 20, 24]
    assert_same_end(config, undisturbed)


@pytest.mark.slow
def test_a_damaged_checkpoint_costs_time_but_no_bit(undisturbed: RunConfig, tmp_path: Path) -> None:
    config = config_in(tmp_path)
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
@pytest.mark.parametrize("seed", range(5))
def test_kills_at_random_times_change_nothing(undisturbed: RunConfig, tmp_path: Path, seed: int) -> None:
    config = config_in(tmp_path)
    dice = random.Random(seed)
    live(config, [*(f"time:{dice.uniform(0.05, 2.0):.3f}" for _ in range(10)), "none"])
    assert_same_end(config, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_kills_at_every_fsync_and_many_steps_change_nothing(
    undisturbed: RunConfig, tmp_path: Path, seed: int
) -> None:
    config = config_in(tmp_path)
    dice = random.Random(seed)
    faults = [f"fsync:{n}" for n in range(1, 26)] + [
        f"step:{n}" for n in sorted(dice.sample(range(6, 24), 8))
    ]
    live(config, [*faults, "none"], timeout=290)
    assert_same_end(config, undisturbed)


@pytest.mark.slow
def test_worker_processes_and_kills_change_nothing(undisturbed: RunConfig, tmp_path: Path) -> None:
    config = config_in(tmp_path)
    workers = replace(config, data=replace(config.data, workers=2))
    live(workers, ["step:9", "step:17", "none"])
    assert_same_end(workers, undisturbed)
