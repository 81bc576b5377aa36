"""The settings of a compression: which model, which steps, and what each step does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from penstock.config.convert import (
    Checked,
    Count,
    Device,
    FilledText,
    Natural,
    NotNegative,
    Positive,
    Probability,
    Seed,
    Share,
    Text,
)
from penstock.config.load import from_dict, load, read_file
from penstock.config.plan import Plan
from penstock.config.quantise import QuantiseOptions
from penstock.config.run import DataConfig, Recipe, RunConfig
from penstock.config.tasks import TaskName
from penstock.errors import ConfigError

Criterion = Literal["taylor", "activation", "magnitude"]
LayerCriterion = Literal["loss", "activation", "even"]
ExpertCriterion = Literal["error", "load"]
StepName = Literal["prune", "distil", "quantise"]
"""Steps after which the original can no longer teach: they come last, and in the last round alone."""
Speedup = Annotated[str, Text(r"[0-9]+(\.[0-9]+)?x?", "a number such as 3x")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prune(Checked, where="prune"):
    """Which parts are removed, and by which scores."""

    layers: Probability = 0.0
    """Share of the blocks of each run that are removed."""
    heads: Probability = 0.0
    """Share of the attention heads that are removed, with grouped queries by whole groups."""
    hidden: Probability = 0.0
    """Share of the hidden features of perceptrons that are removed."""
    experts: Probability = 0.0
    """Share of the experts of each mixture that are removed."""
    by: Criterion = "taylor"
    """Score of heads and hidden features. `taylor`: what the loss would change by. `activation`: the size of what they
    add to the residual stream. `magnitude`: the size of their weights, without data."""
    layers_by: LayerCriterion = "loss"
    """How layers are chosen. `loss`: those without which the loss is lowest. `activation`: those that change what they
    read least. `even`: all but every n-th."""
    experts_by: ExpertCriterion = "error"
    """How experts are chosen. `error`: those without which the outputs of their mixture change least. `load`: those
    that the fewest tokens visit."""
    even: bool = False
    """Whether each block loses the same share; else those that matter less lose more."""
    multiple: Natural = 0
    """Hidden widths become a multiple of it, where they can; 0 is 8 on a CPU and 64 on a GPU."""
    samples: Count = 256
    """Samples of the training data by which parts are scored."""

    @property
    def enabled(self) -> bool:
        """Whether anything is removed."""
        return max(self.layers, self.heads, self.hidden, self.experts) > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Distil(Checked, where="distil"):
    """Training after pruning, with the original model as the teacher. What is not here is as in `recipe`."""

    epochs: Positive | None = None
    """Times that each training sample is used; none: no training, unless `steps` is set."""
    steps: Count | None = None
    """Optimizer steps, in place of `epochs`."""
    lr: Positive | None = None
    """Peak learning rate; none: that of `recipe`."""
    warmup_share: Share = 0.1
    """Warm-up as a share of all steps."""
    weight: Share = 0.5
    """Share of the divergence from the teacher's logits in the loss; the task's own loss is the rest."""
    hidden: NotNegative = 0.0
    """Weight of the difference between the outputs of blocks and those of the original's at the same share of the
    depth; 0: none."""
    attention: NotNegative = 0.0
    """Weight of the divergence of self-attention relations in the last block; 0: none."""
    scores: NotNegative = 0.0
    """Weight of the difference between the attention scores of blocks and those of the original's at the same share of
    the depth, which must have as many heads; 0: none."""
    temperature: Positive = 2.0
    """Divisor of the logits of both before these are compared."""

    @property
    def enabled(self) -> bool:
        """Whether anything is trained."""
        return self.epochs is not None or self.steps is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressConfig(Checked):
    """One compression: the model, its steps, and the data that they use."""

    model: FilledText | None = None
    """A run's folder or its export, a folder that transformers wrote, or a name on the Hugging Face hub."""
    steps: tuple[StepName, ...] = ()
    """Steps in their order; none: those that have settings, pruning first."""
    rounds: Count = 1
    """How often the steps are repeated; each round removes an equal part of what is removed in all, and the last alone
    quantises."""
    target: Speedup | None = None
    """Speed to reach, as a multiple of the model's own, such as `3x`: the shares of `prune` are raised or lowered
    together until the planner's forecast and then a measurement meet it. Without shares, layers, heads and hidden
    features are removed alike."""
    prune: Prune = field(default_factory=Prune)
    distil: Distil = field(default_factory=Distil)
    quantise: QuantiseOptions = field(default_factory=QuantiseOptions)
    task: TaskName = "auto"
    """Task by which the model is scored, trained and evaluated; `auto` is that of the run, or of the model."""
    data: DataConfig = field(default_factory=DataConfig)
    """Data, as in `penstock train`; those of the run where the model is a run's folder."""
    recipe: Recipe = field(default_factory=Recipe)
    """How the distil step trains; that of the run where the model is a run's folder."""
    plan: Plan = field(default_factory=Plan)
    """How the distil step runs, as one line."""
    batch: Count = 1
    """Samples of a pass whose latency is measured and predicted."""
    device: Device = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    machine: FilledText | None = None
    """Name of a shipped Machine or path of one that `penstock probe` stored; none: the cached one, which is probed if
    missing."""
    seed: Seed = 0
    """Decides which samples score the parts, and the order of training."""
    output: FilledText = "runs/compressed"
    """Folder for the steps, the report and, in `export`, the compressed model."""

    @property
    def order(self) -> tuple[StepName, ...]:
        """The steps of one round."""
        enabled: dict[StepName, bool] = {
            "prune": self.prune.enabled or self.target is not None, "distil": self.distil.enabled,
            "quantise": self.quantise.enabled,
        }  # fmt: skip
        return self.steps or tuple(name for name, wanted in enabled.items() if wanted)

    @property
    def speedup(self) -> float | None:
        """`target` as a number."""
        return None if self.target is None else float(self.target.removesuffix("x"))

    def _problems(self) -> Iterator[str]:
        if self.speedup is not None and self.speedup <= 1:
            yield f"target is {self.target}, but must be above 1x, the model's own speed."
        if "prune" in self.steps and not (self.prune.enabled or self.target):
            yield "steps has prune, but nothing is removed; set prune.layers, prune.heads or prune.hidden to a share."
        if "distil" in self.steps and not self.distil.enabled:
            yield "steps has distil, but it trains for no time; set distil.epochs or distil.steps."
        heads = self.prune.heads or (self.target is not None and not self.prune.enabled)
        if self.distil.scores and heads and "prune" in self.order:
            yield "distil.scores compares attention head by head, but heads are pruned; use distil.attention."
        if "quantise" in self.steps and not self.quantise.enabled:
            yield "steps has quantise, but no format; set quantise.format to int8, int8_weights or int4."
        if "quantise" in self.steps[:-1]:
            yield "steps has something behind quantise, whose model cannot be changed further; put it last."
        if len(set(self.steps)) < len(self.steps):
            yield "steps names a step twice; use rounds to repeat all of them."
        if self.steps and self.target is not None and "prune" not in self.steps:
            yield "target is met by pruning, which steps leaves out; add prune."


_NOT_OF_RECIPE: dict[str, str] = {
    **{
        f"recipe.{name}": f"which is distil.{name} here"
        for name in ("epochs", "steps", "warmup_share", "temperature")
    },
    **{
        f"recipe.teacher_{name}": f"which is distil.{name} here"
        for name in ("weight", "hidden", "attention", "scores")
    },
    "recipe.warmup_steps": "which is a share here, distil.warmup_share",
    "recipe.teacher": "for the original teaches; leave it out",
    "recipe.eval_every_epochs": "for each step is evaluated at its end; leave it out",
}
"""Settings of `recipe` that a compression does not take from there, and what is in their place."""


def load_compression(
    cls: type[Any] = CompressConfig, *, file: Path | str | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> CompressConfig:  # fmt: skip
    """A compression from general defaults, then task, data, recipe and Plan of the run whose folder the model is, then
    `file`, then `overrides`. Raises ConfigError as `penstock.config.load.load` does."""
    stored = read_file(file) if file is not None else {}
    model: Any = (overrides or {}).get("model", stored.get("model"))
    base = CompressConfig()
    if unused := [f"{key}, {_NOT_OF_RECIPE[key]}" for key in overrides or () if key in _NOT_OF_RECIPE]:
        raise ConfigError(f"compress has no use for {'; nor for '.join(unused)}.")
    run = None if not isinstance(model, str) else Path(model) / "run.toml"
    if run is not None and run.is_file():
        job = from_dict(RunConfig, read_file(run), origin=str(run))
        base = CompressConfig(
            task=job.task, data=job.data, recipe=job.recipe, plan=job.plan, machine=job.machine
        )
    loaded: CompressConfig = load(
        cls, file=file, stored=stored if file is not None else None, overrides=overrides, base=base
    )
    return loaded
