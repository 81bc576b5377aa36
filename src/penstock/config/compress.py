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
from penstock.config.formats import STORED_FORMATS
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
"""The steps of a compression; quantisation comes last, and only in the last round."""
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
    """Score of heads and hidden features. `taylor`: the estimated change of the loss. `activation`: the magnitude of
    their contribution to the residual stream. `magnitude`: the magnitude of their weights, without data."""
    layers_by: LayerCriterion = "loss"
    """Which layers are removed. `loss`: those whose removal leaves the lowest loss. `activation`: those that change
    their input least. `even`: all but every n-th."""
    experts_by: ExpertCriterion = "error"
    """Which experts are removed. `error`: those whose removal changes the outputs of their mixture least. `load`: those
    that the fewest tokens visit."""
    even: bool = False
    """Whether each block loses the same share; otherwise blocks with lower scores lose more."""
    multiple: Natural = 0
    """Hidden widths become a multiple of this, if possible; 0 means 8 on a CPU and 64 on a GPU."""
    samples: Count = 256
    """Samples of the training data by which parts are scored."""

    @property
    def enabled(self) -> bool:
        """Whether anything is removed."""
        return max(self.layers, self.heads, self.hidden, self.experts) > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Distil(Checked, where="distil"):
    """Training after pruning, with the original model as the teacher. All other settings are those of `recipe`."""

    epochs: Positive | None = None
    """How often each training sample is used; none: no training, unless `steps` is set."""
    steps: Count | None = None
    """Optimizer steps, in place of `epochs`."""
    lr: Positive | None = None
    """Peak learning rate; none: that of `recipe`."""
    warmup_share: Share = 0.1
    """Warm-up as a share of all steps."""
    weight: Share = 0.5
    """Weight of the divergence from the teacher's logits in the loss; the task's own loss has the rest."""
    hidden: NotNegative = 0.0
    """Weight of the difference between the outputs of blocks and those of the original's blocks at the same relative
    depth; 0: none."""
    attention: NotNegative = 0.0
    """Weight of the divergence of self-attention relations in the last block; 0: none."""
    scores: NotNegative = 0.0
    """Weight of the difference between the attention scores of blocks and those of the original's blocks at the same
    relative depth, which must have the same number of heads; 0: none."""
    temperature: Positive = 2.0
    """Divisor of both models' logits before they are compared."""

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
    """Steps in their order; none: all steps with settings, pruning first."""
    rounds: Count = 1
    """How often the steps are repeated; each round removes an equal part of the total, and only the last quantises."""
    target: Speedup | None = None
    """Speedup to reach, relative to the original model, such as `3x`: the shares of `prune` are scaled together until
    the planner's forecast and then a measurement reach it. Without shares, layers, heads and hidden features are
    removed in equal shares."""
    prune: Prune = field(default_factory=Prune)
    distil: Distil = field(default_factory=Distil)
    quantise: QuantiseOptions = field(default_factory=QuantiseOptions)
    task: TaskName = "auto"
    """Task for scoring, training and evaluation; `auto` is that of the run, or of the model."""
    data: DataConfig = field(default_factory=DataConfig)
    """Data, as in `penstock train`; by default those of the run, if the model is a run's folder."""
    recipe: Recipe = field(default_factory=Recipe)
    """How the distil step trains; by default as the run did, if the model is a run's folder."""
    plan: Plan = field(default_factory=Plan)
    """Plan of the distil step, as one line."""
    batch: Count = 1
    """Samples per forward pass for which latency is measured and predicted."""
    device: Device = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    machine: FilledText | None = None
    """Name of a shipped Machine or path of one that `penstock probe` stored; none: the cached one, which is probed if
    missing."""
    seed: Seed = 0
    """Determines the samples for scoring, and the order of training."""
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
            yield f"steps has quantise, but no format; set quantise.format to one of {', '.join(STORED_FORMATS)}."
        if "quantise" in self.steps[:-1]:
            yield "steps has another step after quantise, whose model cannot be changed further; put quantise last."
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
"""Settings of `recipe` that a compression does not use, and the settings that replace them."""


def load_compression(
    cls: type[Any] = CompressConfig, *, file: Path | str | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> CompressConfig:  # fmt: skip
    """A compression from general defaults, then task, data, recipe and Plan of the run if the model is a run's folder,
    then `file`, then `overrides`. Raises ConfigError as `penstock.config.load.load` does."""
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
    return load(cls, file=file, stored=stored, overrides=overrides, base=base)  # type: ignore[no-any-return]
