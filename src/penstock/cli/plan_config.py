"""The options of `penstock plan`, and the checks for those that contradict each other or have no effect."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from penstock.config.convert import Checked, Count, FilledText, NotNegative, Positive, Range
from penstock.config.model import ModelConfig, title
from penstock.config.plan import BASELINE, Plan
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.planner.cost import RunTerms

_LAWS = frozenset({"machine", "compute", "budget_gpu_hours", "served_tokens", "json"})
_PRICES = frozenset({"price", "against_price", "grams_per_kwh"})
_RUN = frozenset({"tokens", "images", "epochs"}) | _PRICES
_QUESTION = frozenset({"model", "name", "machine", "gpus", "global_batch", "json", "loads"})
_EXPLAIN = _QUESTION | _RUN | {"explain", "base"}
_SEARCH = _QUESTION | _RUN | {"base", "sensitivity", "top", "html", "run", "against", "ladder"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig(Checked):
    """Settings of `penstock plan`: a model on a cluster, or how large a model to train for some compute."""

    model: ModelConfig | None = None
    """Preset of any family, such as gpt-175b or vit-l16, or a config.json, its folder, its name on the Hugging Face
    hub, or `timm:NAME`. `--model.NAME` changes a field of it, such as `--model.sequence 8192`;
    docs/reference/settings.md lists them."""
    name: FilledText | None = None
    """Name of the model in the output; by default the name of its folder or preset."""
    machine: FilledText = "h100"
    """Name of a known machine, or a file that probe wrote."""
    against: FilledText | None = None
    """A second machine: the best layout on the same number of its devices is shown beside the best."""
    gpus: Annotated[int, Range(1, 1 << 24)] | None = None
    """Number of devices; 8 if omitted."""
    global_batch: Count | None = None
    """Samples of one optimizer step, over all devices."""
    tokens: Positive | None = None
    """Tokens to train on: gives days and device hours."""
    images: Positive | None = None
    """Images to train a vision model on, per epoch."""
    epochs: Positive = 1.0
    """Passes over --tokens or --images."""
    price: NotNegative | None = None
    """Price of one device hour: gives the cost."""
    against_price: NotNegative | None = None
    """Price of one device hour of --against; by default the same as --price."""
    grams_per_kwh: NotNegative | None = None
    """Grams of CO₂ emitted per kilowatt hour: gives the emissions of the run."""
    base: str | None = None
    """Fixed settings, as a Plan line; the rest is searched. A line without a precision gets the planner's own."""
    explain: str | None = None
    """Explain a Plan line. A line with a degree and a batch is a whole layout; for any other, such as "tp=4", the best
    layout with its settings is shown beside the best of all. `|` separates several lines."""
    loads: FilledText | None = None
    """Record of experts' loads: a run's output folder, or what `penstock experts RUN --json` printed. Without one,
    experts are taken to be visited evenly."""
    ladder: bool = False
    """Predict the climb of `penstock ladder` on --machine, rung by rung; on one device if --gpus is omitted."""
    sensitivity: bool = False
    """Show what would help most."""
    top: Count | None = None
    """Number of layouts to show; 10 if omitted."""
    run: bool = False
    """Print nothing but the command that trains with the fastest layout that Penstock runs."""
    json: bool = False
    """Print everything as JSON."""
    html: FilledText | None = None
    """Write a page with figures to this file."""
    compute: Positive | None = None
    """FLOPs to spend: says how large a model to train, by scaling laws."""
    budget_gpu_hours: Positive | None = None
    """Compute as above, in hours of --machine's devices."""
    served_tokens: NotNegative = 0.0
    """Tokens that the model will serve: favours smaller models."""

    def check(self) -> None:
        """Raise ConfigError for options that contradict each other, or have no effect."""
        if problems := list(self._contradictions()):
            raise ConfigError(problems)

    def uneven(self) -> Mapping[int, float]:
        """How much more than the mean the busiest device has to do, by expert parallel degree. Raises DataError for a
        record that cannot be read, and ConfigError for one of another model."""
        from penstock.planner.loads import EVEN, read_loads, unevenness

        if self.loads is None or self.model is None:
            return EVEN
        experts = max(run.stack.experts * run.stack.mixes for run in self.model.graph.runs)
        if not experts:
            raise ConfigError("--loads is for mixtures of experts, and the model is none; leave it out.")
        return unevenness(read_loads(Path(self.loads)), experts)

    @property
    def laws(self) -> bool:
        """Whether the scaling laws are to be shown, instead of planning a model."""
        return self.compute is not None or self.budget_gpu_hours is not None

    def _contradictions(self) -> Iterator[str]:
        if self.laws:
            name = "--compute" if self.compute is not None else "--budget-gpu-hours"
            yield from self._unused(name, _LAWS)
            return
        if self.model is None:
            yield "penstock plan needs a model, such as gpt-175b; or --compute FLOPS for scaling laws."
            return
        yield from self._unused("A model", _EXPLAIN | _SEARCH)
        if self.explain is not None:
            yield from self._unused("--explain", _EXPLAIN)
            if not all(map(str.strip, self.explain.split("|"))):
                yield f"--explain has no Plan line before or after a `|`; write one there, such as tp=4 or {BASELINE}."
        if self.ladder:
            yield from self._unused("--ladder", _QUESTION - {"loads"} | {"ladder"})
        if self.run:
            yield from self._unused("--run", _QUESTION - {"name", "json"} | {"base", "run"})
        vision = self.model.graph.vision
        if self.images is not None and not vision:
            yield "--images is for vision models; say with --tokens what a language model is trained on."
        if self.tokens is None and self.images is None:
            length = "--images or --tokens" if vision else "--tokens"
            unused = [name for name in sorted(_PRICES) if getattr(self, name) is not None]
            for name in ["epochs"] * (self.epochs != 1.0) + unused:
                yield f"{_option(name)} has no effect without {length}, which say how long the run is."
        if self.against_price is not None and self.against is None:
            yield "--against-price has no effect without --against, the machine whose hours it is the price of."

    def _unused(self, option: str, used: frozenset[str]) -> Iterator[str]:
        """A problem where options are given that have no effect together with `option`."""
        names = [f.name for f in fields(self) if f.name not in used and getattr(self, f.name) != f.default]
        options = ["a model" if name == "model" else _option(name) for name in names]
        if options:
            yield f"{option} was given with {' and '.join(options)}, which it does not use; leave one out."

    @property
    def called(self) -> str:
        """The model's name in the output."""
        return self.name or ("" if self.model is None else title(self.model))

    @property
    def devices(self) -> int:
        """Number of devices."""
        return 8 if self.gpus is None else self.gpus

    @property
    def terms(self) -> RunTerms:
        """Length of the run and prices. Tokens are counted as in tokens per second: of an encoder–decoder, the
        decoder's."""
        from penstock.planner.cost import RunTerms
        from penstock.planner.operators import counted_tokens

        samples = self.images
        if self.tokens is not None and self.model is not None:
            samples = self.tokens / counted_tokens(self.model)
        samples = None if samples is None else samples * self.epochs
        return RunTerms(samples=samples, price=self.price, grams_per_kwh=self.grams_per_kwh)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def check_line(line: Plan, global_batch: int | None) -> None:
    """Raise ConfigError if --global-batch contradicts the layout that --explain names, which determines it."""
    if global_batch not in (None, line.global_batch):
        raise ConfigError(
            f"--global-batch is {global_batch}, but the Plan line of --explain has {line.global_batch} by its "
            "micro_batch, accumulate and dp; change one of them."
        )


def check_base(
    base: Plan, fixed: frozenset[str], gpus: int, global_batch: int | None, line: str = "--base"
) -> int | None:
    """Samples of a step: `global_batch`, or where that is None, the product of the line if it fixes all factors. `line`
    is the option that the line is of.

    Raises ConfigError if the settings that the line names allow no layout on `gpus` devices.
    """
    factors = ("micro_batch", "accumulate", "dp")
    if global_batch is None and fixed.issuperset(factors):
        global_batch = base.global_batch
    problems = [*_contradiction(base, fixed, ("dp", "tp", "pp", "cp"), "--gpus", gpus, line)]
    if global_batch is not None:
        problems += _contradiction(base, fixed, factors, "--global-batch", global_batch, line)
    if "shard" in fixed and base.shard > 1 and base.sharding != "hsdp":
        problems.append(
            f"{line} has shard={base.shard}, which needs sharding=hsdp; add sharding=hsdp, or leave shard out."
        )
    if problems:
        raise ConfigError(problems)
    return global_batch


def _contradiction(
    base: Plan, fixed: frozenset[str], factors: Sequence[str], option: str, wanted: int, line: str
) -> Iterator[str]:
    """The problem if the fixed factors cannot multiply to the requested number."""
    named = [name for name in factors if name in fixed]
    product = math.prod(getattr(base, name) for name in named)
    words = " ".join(f"{name}={getattr(base, name)}" for name in named)
    if len(named) == len(factors):
        if product != wanted:
            yield f"{option} is {wanted}, but {line} fixes {product} by {words}; change one of them."
    elif wanted % product:
        lower = wanted // product * product
        near = f"{option} to {lower} or {lower + product}" if lower else f"{option} to {product}"
        yield (
            f"{option} is {wanted}, which {words} of {line} ({product}) does not divide; change one of them, "
            f"{near} for example."
        )
