"""A run that is killed, however often and wherever, ends with the same losses and weights, bit for bit."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from helpers import doomed
from helpers.doomed import losses, same_tensors
from helpers.jobs import JOBS
from helpers.sweeps import sweep
from penstock import checkpoint
from penstock.config.plan import Plan
from penstock.config.run import Recipe, RunConfig
from penstock.train.metrics import read_metrics


def config_in(folder: Path, job: str = "vit", **changes: Any) -> RunConfig:
    """24 steps of several epochs of a job of `helpers.jobs`; checkpoints in the middle of epochs and of log windows."""
    plan = Plan(micro_batch=64 if job == "vit" else 16, accumulate=2)
    config = doomed.config_in(
        folder, plan, steps=24, job=job, **{"checkpoint_every": 5, "log_every": 3} | changes
    )
    augment = replace(config.recipe.augment, cutmix=0.5, erase=0.2)
    evaluated = replace(config.recipe, eval_every_epochs=Recipe().eval_every_epochs, augment=augment)
    return replace(config, recipe=evaluated)


def live(config: RunConfig, faults: Sequence[str], *, timeout: float = 290) -> list[str]:
    """Run `config` through `faults`; how each life ended."""
    command = [
        sys.executable, "-W", "error", "-m", "helpers.doomed", "lives", str(doomed.written(config)), *faults,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr
    ends = done.stdout.splitlines()
    assert len(ends) == len([fault for fault in faults if not fault.startswith(("flip:", "cut:"))]), (
        done.stderr
    )
    assert not any(end.endswith("exit 70") for end in ends), done.stderr
    return ends


def assert_same_end(run: RunConfig, undisturbed: RunConfig) -> None:
    """Every loss, every weight, every tensor of state and the evaluation are equal, not merely close."""
    windows = [row for row in read_metrics(Path(run.output) / "metrics.jsonl") if row["event"] == "steps"]
    assert [w["step"] for w in windows] == sorted({w["step"] for w in windows})
    assert windows[-1]["step"] == len(losses(run)) == 24
    assert losses(run) == losses(undisturbed)
    last = f"checkpoints/step-{undisturbed.recipe.steps}"
    names = {file.name for file in (Path(undisturbed.output) / last).glob("*.safetensors")}
    assert names >= {"weights.safetensors", "ema.safetensors", "optimizer.safetensors", "random.safetensors"}
    for name in names:
        same_tensors(run, undisturbed, f"{last}/{name}")
    ours, theirs = (checkpoint.load(Path(c.output) / last).state["progress"] for c in (run, undisturbed))
    assert ours == theirs
    assert not list(Path(run.output).rglob("*.tmp"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], RunConfig]:
    """By job."""

    @cache
    def make(job: str) -> RunConfig:
        config = config_in(tmp_path_factory.mktemp("undisturbed"), job)
        assert live(config, ["none"]) == ["none exit 0"]
        return config

    return make


def _random_times(seed: int) -> list[str]:
    dice = random.Random(seed)
    return [f"time:{dice.uniform(0.05, 2.0):.3f}" for _ in range(10)]


def _fsyncs_and_steps(seed: int) -> list[str]:
    steps = sorted(random.Random(seed).sample(range(6, 24), 8))
    return ["step:3", *(f"fsync:{n}" for n in range(1, 26)), *(f"step:{n}" for n in (*steps, 24))]


MIXED = ["step:12", "flip:checkpoints/step-10/optimizer.safetensors", "fsync:4", "full:16"]
CASES: dict[str, tuple[list[str], list[str], dict[str, Any]]] = {
    # faults; how the lives end, where that is the same each time; other settings of the data
    "a kill, a flipped bit, a kill in a save, a full disk": (
        MIXED, ["step:12 signal 9", "fsync:4 signal 9", "full:16 exit 3"], {},
    ),
    "every fsync and many steps": (_fsyncs_and_steps(0), [], {}),
    "every fsync and other steps": (_fsyncs_and_steps(1), [], {}),
    "worker processes": (["step:9", "step:17"], ["step:9 signal 9", "step:17 signal 9"], {"workers": 2}),
    **{f"random times {seed}": (_random_times(seed), [], {}) for seed in range(5)},
}  # fmt: skip
USUAL = "vit", "a kill, a flipped bit, a kill in a save, a full disk"
"""The one that is among the slow tests; all others are in the whole fault suite."""


@pytest.mark.parametrize(
    ("job", "case"),
    [
        pytest.param(job, case, marks=pytest.mark.slow if (job, case) == USUAL else pytest.mark.faults)
        for job in JOBS
        for case in CASES
    ],
)
def test_a_run_that_is_disturbed_comes_to_the_same_end(
    undisturbed: Callable[[str], RunConfig], job: str, case: str, tmp_path: Path
) -> None:
    faults, ends, data = CASES[case]
    config = config_in(tmp_path, job)
    # A best step between the flipped checkpoint and the kill would be saved too, and be the newest.
    config = replace(config, data=replace(config.data, **data), export_best=faults is not MIXED)
    lived = live(config, [*faults, "none"])
    assert lived[-1] == "none exit 0"
    assert not ends or lived[:-1] == ends
    assert (Path(config.output) / "checkpoints" / "step-10.refused").is_dir() == (faults is MIXED)
    assert_same_end(config, undisturbed(job))


@pytest.mark.parametrize("job", sweep(JOBS, ()))
def test_being_asked_to_stop_saves_at_once_and_asks_for_a_requeue(
    undisturbed: Callable[[str], RunConfig], job: str, tmp_path: Path
) -> None:
    config = config_in(tmp_path, job, keep=9)
    assert live(config, ["term:8", "term:12", "none"]) == ["term:8 exit 75", "term:12 exit 75", "none exit 0"]
    records = read_metrics(Path(config.output) / "metrics.jsonl")
    evaluated = {record["step"] for record in records if record["event"] == "evaluation"}
    asked = {5, 8, 10, 12, 15, 20, 24}
    beside = {*checkpoint.steps(Path(config.output) / "checkpoints")} ^ asked
    assert len(beside) <= 1, "that of the best evaluation, which depends on the processor's rounding"
    assert beside <= evaluated
    assert_same_end(config, undisturbed(job))


@pytest.mark.slow
def test_no_checkpoint_to_trust_ends_with_its_own_code(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    cuts = [f"cut:checkpoints/step-{step}/weights.safetensors" for step in (5, 10)]
    assert live(config, ["step:12", *cuts, "none"]) == ["step:12 signal 9", "none exit 5"]
