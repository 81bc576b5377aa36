"""The settings of climbs: a frozen dataclass for models and one for scripts, with the same names in Python, in a file
and on the command line."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Annotated, Any

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
    word,
)
from penstock.config.model import PRESETS, ModelConfig, changes, option_words
from penstock.config.run import DataConfig
from penstock.config.tasks import TaskName

QUICK_LOSS_STEPS = 8
BUDGET, QUICK_BUDGET = 360.0, 150.0
"""Default seconds of a climb, and of a quick one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderConfig(Checked):
    """One search and climb of the ladder."""

    model: ModelConfig = PRESETS["vit-s16"]
    """A preset (`vit-s16`), `hf:FOLDER`, `timm:NAME`, or `package.module:factory` that returns (model, batch, loss)."""
    factory: FunctionPath | None = None
    """`package.module:function` that returns a model, an example batch, and loss(model, batch); replaces `model`."""
    batch: Count | None = None
    """Samples per step of the baseline; none means 8 images on a CPU and 64 on a GPU, or 1,024 and 32,768 tokens of
    text. A factory's batch is used as it is."""
    task: TaskName = "auto"
    """Task that the model is trained for; `auto` is the task of the preset's job, or of the model's family."""
    data: DataConfig = field(default_factory=DataConfig)
    """Data for the batches, as in `penstock train`; `auto` is the embedded data for the model's task."""
    rungs: tuple[str, ...] = ()
    """Rungs or groups of rungs to climb, by name; all by default."""
    skip: tuple[str, ...] = ()
    """Rungs or groups of rungs to leave out, such as `compile`."""
    procs: Ranks = 1
    """Processes of the `parallel` rungs, such as DDP and FSDP: one GPU each, or a share of this CPU each; 1 leaves
    these rungs out."""
    quick: bool = False
    """Short rounds and loss runs, and less than half the time, for a first impression."""
    rounds: Annotated[int, Range(2, 1_000_000)] = 7
    """Least number of rounds, in which settings take turns, before a difference under 5 % is believed."""
    round_seconds: Positive = 0.3
    """Least seconds to time a contender in each round; a longer step is timed as a single one."""
    loss_steps: Natural = 24
    """Optimizer steps of each loss run; 0 makes none."""
    seeds: Annotated[int, Range(2, 1_000)] = 2
    """Further seeds of the baseline, whose losses show how much chance alone changes them."""
    lr: Positive = 3e-4
    """Learning rate of the loss runs, constant."""
    budget: Positive | None = None
    """Seconds for the whole climb, including compiling; none means 360, or 150 with quick. More time finds settings
    closer to the best, and detects smaller gains."""
    device: Device = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    machine: FilledText | None = None
    """Name of a shipped Machine, or path of one that `penstock probe` wrote; none probes this machine unless cached."""
    seed: Seed = 0
    """Seed of the weights and the sample order."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneConfig(Checked):
    """How long and with what a script is tuned. Fields are the command's options; each docstring is one line, because
    `--help` shows it.
    """

    budget: Positive = 300.0
    """Seconds for everything, compiling included."""
    rounds: Annotated[int, Range(2, 1_000_000)] = 7
    """Rounds of turns, at least, before a difference under 5 % counts."""
    round_seconds: Positive = 0.3
    """Seconds of one turn, at least."""
    rungs: str = ""
    """Rungs or groups of rungs to try, separated by commas, such as half,compile; all by default."""
    skip: str = ""
    """Rungs or groups of rungs to leave out."""
    procs: Ranks = 1
    """Number of ranks to start the script with, as torchrun does."""
    timeout: Positive = 300.0
    """Seconds that the script may be silent, for example before its first step."""
    output: FilledText = "runs/tune"
    """Folder of tune.html and tune.json, and of what the script writes to its terminal."""


def option(name: str, value: Any) -> str:
    """An option of the command line with its value, quoted for a shell."""
    tables = isinstance(value, tuple) and value and is_dataclass(value[0])  # `word` quotes these
    return f"--{name} {word(value) if tables else shlex.quote(word(value))}"


def data_words(data: DataConfig) -> list[str]:
    """Command-line options that select these data."""
    return [
        option("data" if name == "source" else f"data.{name}", value)
        for name, value in changes(DataConfig(), data)
    ]


def command_of(config: LadderConfig) -> str:
    """The command that repeats a climb with these settings, also if it was started from Python."""
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
            words.append(option(f.name, value))
    return " ".join(words)
