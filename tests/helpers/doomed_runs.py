"""Small runs of `penstock train` under `penstock launch`, for tests to disturb; see `doomed` for the faults, and `jobs`
for what is trained. Dropout is on throughout.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file

from helpers import doomed
from helpers.agents import Agent
from helpers.jobs import settings
from helpers.spawn import spawn
from penstock.config.load import dump_toml
from penstock.config.machine import Machine, save_machine
from penstock.config.plan import Plan
from penstock.config.run import Augment, Recipe, RunConfig
from penstock.train.metrics import read_metrics

STEPS = 60
PLANS = {
    "ddp": Plan(micro_batch=16, dp=2, optimizer="fused"),
    "fsdp": Plan(micro_batch=16, dp=2, sharding="fsdp", optimizer="fused"),
}
TWO = ("--procs", "2")


class Tally(NamedTuple):
    """One step that was taken."""

    seconds: float
    """`time.time()` at its end."""
    pid: int
    """Of rank 0: every life has another."""
    step: int


def config_in(folder: Path, plan: Plan, *, steps: int = STEPS, job: str = "vit", **changes: Any) -> RunConfig:
    """A run of a job of `jobs` in `folder`, saved every four steps."""
    machine = Machine(
        name="desk", device="cpu", source="measured", launch_seconds=1e-6,
        peak_flops=dict.fromkeys(("fp32", "bf16", "fp16"), 1e11),
    )  # fmt: skip
    recipe = Recipe(
        steps=steps, lr=3e-3, warmup_steps=4, ema_decay=0.9, eval_every_epochs=1000.0,
        augment=Augment(crop_scale_min=0.6, mixup=0.3, label_smoothing=0.1),
    )  # fmt: skip
    config = RunConfig(
        **settings(job, folder), recipe=recipe, plan=plan,
        machine=str(save_machine(machine, folder / "machine.json")),
        output=str(folder / "run"), device="cpu", seed=3, checkpoint_every=4, log_every=2,
    )  # fmt: skip
    return replace(config, **changes)


def written(config: RunConfig) -> Path:
    """`config` as a file beside its output."""
    file = Path(config.output).parent / "config.toml"
    file.write_text(dump_toml(config), encoding="utf-8")
    return file


def launched(
    config: RunConfig, *faults: str, options: tuple[str, ...] = (), name: str = "log", forked: bool = True
) -> Agent:
    """An agent whose ranks train as `config` says, doomed by `faults`."""
    program = ("-m", "helpers.doomed", str(written(config)), *faults)
    return Agent(*options, "--", *program, log=Path(config.output).parent / name, forked=forked)


def finished(config: RunConfig, *faults: str, world: int = 2) -> None:
    """Train as `config` says to the end on `world` forked ranks, which start in a tenth of the time of an agent's.
    What an agent does is not tested so.
    """
    codes = spawn(doomed.main, world, written(config), list(faults), group=False, timeout=240)
    assert codes == [0] * world


def tally(config: RunConfig) -> list[Tally]:
    """Every step that was taken, in order, whatever became of it."""
    file = Path(config.output).parent / "tally"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [Tally(float(when), int(pid), int(step)) for when, pid, step in (line.split() for line in lines)]


def samples(config: RunConfig) -> list[list[int]]:
    """The numbers of the samples of every step of the run as it stands, sorted, of all ranks together. A step that was
    taken again counts as it was taken last.
    """
    folder = Path(config.output).parent
    ranks = [
        [line.split() for line in file.read_text().split("\n")[:-1]]
        for file in sorted(folder.glob("samples.*"))
    ]
    lives = {int(step): life for life, step, *_ in ranks[0]}  # the last that rank 0 took the step in
    found: dict[int, list[int]] = {step: [] for step in sorted(lives)}
    for lines in ranks:
        for life, step, *numbers in lines:
            if lives.get(int(step)) == life:
                found[int(step)] += map(int, numbers)
    return [sorted(numbers) for numbers in found.values()]


def losses(config: RunConfig) -> list[float]:
    """The loss of every step of the run as it stands."""
    records = read_metrics(Path(config.output) / "metrics.jsonl")
    return [loss for record in records if record["event"] == "steps" for loss in record["losses"]]


def same_end(config: RunConfig, other: RunConfig) -> None:
    """Hold that two runs had the same losses and came to the same weights, bit for bit."""
    assert json.dumps(losses(config)) == json.dumps(losses(other))
    ours, theirs = (load_file(Path(c.output) / "export" / "model.safetensors") for c in (config, other))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value.equal(theirs[name]), name
