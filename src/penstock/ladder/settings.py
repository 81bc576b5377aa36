"""The settings of a climb: one frozen dataclass, the same names in Python, in a file and on the command line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Annotated

from penstock.config.convert import (
    Checked,
    Count,
    Device,
    FilledText,
    FunctionPath,
    Natural,
    Positive,
    Range,
    Ranks,
    Seed,
)
from penstock.config.model import PRESETS, ModelConfig, changes, option_words
from penstock.config.run import DataConfig
from penstock.config.tasks import TaskName

QUICK_LOSS_STEPS = 8
BUDGET, QUICK_BUDGET = 360.0, 150.0
"""Seconds of a climb by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderConfig(Checked):
    """One search and climb of the ladder."""

    model: ModelConfig = PRESETS["vit-s16"]
    """Name of a preset (`vit-s16`), `hf:FOLDER`, `timm:NAME`, or `package.module:factory`: a function that returns
    (model, batch, loss)."""
    factory: FunctionPath | None = None
    """`package.module:function` that returns a model, an example batch, and loss(model, batch); replaces `model`."""
    batch: Count | None = None
    """Samples per step of the baseline; none is 8 images on a CPU and 64 on a GPU, or 1,024 and 32,768 tokens of text.
    A factory's batch is taken as it is."""
    task: TaskName = "auto"
    """Task that the model is trained for; `auto` is the task of the preset's job, or of the model's family."""
    data: DataConfig = field(default_factory=DataConfig)
    """Data that batches are made of, as in `penstock train`; `auto` is the embedded data for the model's task."""
    rungs: tuple[str, ...] = ()
    """Rungs or groups of rungs to climb, by name; all by default."""
    skip: tuple[str, ...] = ()
    """Rungs or groups of rungs to leave out, such as `compile`."""
    procs: Ranks = 1
    """Processes of the rungs DDP, FSDP and HSDP: one GPU each, or shares of this CPU; 1 leaves these rungs out."""
    quick: bool = False
    """Short rounds and loss runs, and less than half the time: a first impression."""
    rounds: Annotated[int, Range(2, 1_000_000)] = 7
    """The least rounds, in which settings take turns, before a difference under 5 % is believed."""
    round_seconds: Positive = 0.3
    """Least time that one contender is timed in each round; a slower step is timed by itself."""
    loss_steps: Natural = 24
    """Optimizer steps of each loss run; 0 makes none."""
    seeds: Annotated[int, Range(2, 1_000)] = 2
    """Further seeds of the baseline, whose losses show how much chance alone changes."""
    lr: Positive = 3e-4
    """Learning rate of the loss runs, constant."""
    budget: Positive | None = None
    """Seconds for the whole climb, compiling included; none is 360, with quick 150. More finds what is close to the
    best, and detects smaller gains."""
    device: Device = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    machine: FilledText | None = None
    """Name of a shipped Machine or path of one that `penstock probe` stored; none probes the cached one."""
    seed: Seed = 0
    """Decides weights and sample order."""
    output: FilledText = "runs/ladder"
    """Folder of the report: ladder.html and ladder.json."""

    @property
    def seconds(self) -> float:
        """Seconds that the climb may take."""
        return self.budget or (QUICK_BUDGET if self.quick else BUDGET)

    def _problems(self) -> Iterator[str]:
        if self.procs > 1 and self.device.startswith("cuda:"):
            yield (
                f"device is {self.device!r}, one GPU, but procs is {self.procs}, and each process takes one of its "
                "own; write cuda."
            )


def data_words(data: DataConfig) -> list[str]:
    """The options that name these data."""
    return [words.replace("--data.source ", "--data ") for words in changes(DataConfig(), data, "data")]


def command_of(config: LadderConfig) -> str:
    """The command that climbs again with these settings, wherever the call came from."""
    words = ["penstock ladder"]
    words.append(f"--model {config.factory}" if config.factory else " ".join(option_words(config.model)))
    plain, quick = LadderConfig(), ("loss_steps", "round_seconds")
    for f in fields(config):
        value = getattr(config, f.name)
        given = value != getattr(plain, f.name) and not (config.quick and f.name in quick)
        if not given or f.name in ("model", "factory", "output"):
            continue
        if f.name == "data":
            words += data_words(value)
        elif value is True:
            words.append(f"--{f.name}")
        else:
            words.append(f"--{f.name} {','.join(value) if isinstance(value, tuple) else value}")
    return " ".join(words)
