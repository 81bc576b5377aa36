"""Rungs: each one optimisation, as a change of model configuration and Plan, and how to register one.

Penstock's own rungs are in `rungs.py`; `register(Rung(…))` adds another. Either way it becomes part of the ladder, of
`--rungs` and `--skip`, and of the tests that every rung must pass. Free of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from penstock.config import rules
from penstock.config.formats import HalfDtype
from penstock.config.kinds import field_types
from penstock.config.machine import Machine
from penstock.config.model import ModelConfig
from penstock.config.plan import SWITCHES, Plan, effect_of
from penstock.errors import ConfigError
from penstock.ladder.result import Results

_TYPES = field_types(Plan)
ALL_SWITCHES: Mapping[str, tuple[str, ...]] = {name: get_args(_TYPES[name]) for name in SWITCHES}
"""All values of the Plan's `SWITCHES`, which Penstock's own models support."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A model and Plan to build and measure. `model` is None if the user brought their own."""

    model: ModelConfig | None
    plan: Plan
    by_length: bool = False
    """Whether a batch is made of samples of similar length."""
    packed: bool = False
    """Whether several documents are packed into each sample; the baseline has one document per sample."""
    copy: int = 0
    """Distinguishes two builds of one setting, whose difference in speed is noise. Added to a script's seeds."""
    line: str | None = None
    """The settings that a script is run under, as a line; others are the script's own. None for a model."""

    @property
    def words(self) -> str:
        """The settings as a line."""
        return self.plan.line() if self.line is None else self.line or "the script as it is"


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Facts about the model, data and machine that a rung may depend on."""

    machine: Machine
    micro_batch: int
    """Samples in a micro-batch of the baseline."""
    splittable: bool = True
    """Whether the batch can be enlarged: always with our data, with a user's batch if its samples are known."""
    switches: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: ALL_SWITCHES)
    """Values of the Plan's `SWITCHES` that the model supports."""
    padding_share: float = 0.0
    """Share of padding among a batch's tokens."""
    groupable: bool = False
    """Whether samples differ in length and come in random order."""
    packable: bool = False
    """Whether each sample is one document, or a piece of one, and is padded."""
    unpacked_padding: float | None = None
    """Share of padding that the samples would have if each held one document, for packed documents."""
    procs: int = 1
    """Number of processes that rungs with several may start."""
    holds: Callable[[Setting], bool] = lambda setting: False
    """Whether the planner knows the work of a setting and expects it to fit into memory."""

    @property
    def half(self) -> HalfDtype:
        """The machine's half type for matrix products: bf16, which needs no loss scale, if it supports that."""
        return "bf16" if "bf16" in self.machine.peak_flops else "fp16"


@dataclass(frozen=True, slots=True)
class Rung:
    """One optimisation. `apply` makes the change; `refusal` says why it is impossible for a setting, or None."""

    name: str
    """Name in `--rungs` and `--skip`; the part before the first dash is its group."""
    place: int
    """Position on the ladder: among rungs that gain, the path climbs the lowest first."""
    title: str
    """A few words, for tables and figures."""
    why: str
    """Effect of the rung and why it should pay: one or two sentences for readers of the page."""
    apply: Callable[[Setting, Situation], Setting]
    obstacle: Callable[[Setting, Situation], str | None] = lambda setting, situation: None
    """Given the setting to change: a sentence why the rung cannot or need not be applied, or None. Rules of Plans and
    the model's switches need not be repeated here."""
    choice: str = ""
    """Rungs of one choice exclude each other; by default the rungs of a group do."""
    compared_by: Literal["samples", "flops"] = "samples"
    """Unit of the comparison, per second: samples, or the model's FLOPs if the rung enlarges the sample itself."""
    carried: bool = True
    """Whether later rungs build on it if it pays; if not, it is only reported."""
    twin: bool = False
    """Whether its results must equal those of one process that takes the same samples in the same order. This is then
    checked, instead of comparing its loss with the baseline's."""

    @property
    def group(self) -> str:
        """Name of its group: `optimizer` for `optimizer-fused`."""
        return self.name.split("-", 1)[0]

    @property
    def alternatives(self) -> str:
        """Name of the choice that this rung is one answer to."""
        return self.choice or self.group

    @property
    def results(self) -> Results:
        """Effect on results. The search combines rungs that keep them, and measures whether `rounding` does. Rungs that
        change them (`other`; any rung that changes more than the Plan) are tried separately, on top of the best."""
        return self.apply.results if isinstance(self.apply, PlanChange) else "other"

    @property
    def searched(self) -> bool:
        """Whether the search combines it with others."""
        return self.results != "other" and self.carried and not self.twin

    def hindrance(self, setting: Setting, situation: Situation) -> str | None:
        """Why the model or the situation rules out the rung, or None; `refusal` also checks the rules of Plans."""
        changes = self.apply.values(situation) if isinstance(self.apply, PlanChange) else {}
        for name, why in SWITCHES.items():
            if name in changes and changes[name] not in situation.switches.get(name, ()):
                return f"the model cannot be switched to {name}={changes[name]}: it {why}"
        return self.obstacle(setting, situation)

    def refusal(self, setting: Setting, situation: Situation) -> str | None:
        """Why the rung cannot be applied to a setting, by its own rule or by the rules of Plans; None if it can."""
        own = self.hindrance(setting, situation)
        if own is not None:
            return own
        changed = self.apply(setting, situation)
        return next(iter(rules.problems(changed.plan, changed.model, situation.machine, run=True)), None)


@dataclass(frozen=True, slots=True)
class PlanChange:
    """The `apply` of a rung that sets fields of the Plan: see `plan`."""

    fields: dict[str, Any]

    def __call__(self, setting: Setting, situation: Situation) -> Setting:
        values = self.values(situation)
        if setting.line is None:
            return replace(setting, plan=replace(setting.plan, **values))
        line = with_values(setting.line, values)
        return replace(setting, plan=Plan.parse(line), line=line)

    def values(self, situation: Situation) -> dict[str, Any]:
        """The values that its fields get in a situation."""
        return {name: value(situation) if callable(value) else value for name, value in self.fields.items()}

    @property
    def results(self) -> Results:
        """The strongest effect that any of its fields has on results; a rung that splits the batch changes it."""
        effects = {effect_of(name, value) for name, value in self.fields.items()}
        if effects <= {"nothing", "rounding"}:
            return "same"
        return "rounding" if effects <= {"nothing", "rounding", "precision"} else "other"


def with_values(line: str, values: Mapping[str, Any]) -> str:
    """A script's settings, as a line, with these values; new ones are appended."""
    named = {word.partition("=")[0]: word for word in line.split()}
    if "compile" in values and "offload" in named:  # offload needs eager blocks
        del named["offload"]
        named["recompute"] = "recompute=early"
    words = {n: f"{n}={','.join(v) if isinstance(v, tuple) else v}" for n, v in values.items()}
    if all(named.get(name) == word for name, word in words.items()):
        return line
    return " ".join([*(word for name, word in named.items() if name not in words), *words.values()])


def plan(**fields: Any) -> PlanChange:
    """Make the `apply` of a rung that sets fields of the Plan. A function as value is called with the situation."""
    return PlanChange(fields)


def joined(first: Rung, second: Rung) -> Rung:
    """One rung that sets the Plan's fields of both."""
    assert isinstance(first.apply, PlanChange)
    assert isinstance(second.apply, PlanChange)
    return replace(
        second, name=f"{first.name}+{second.name}", title=f"{first.title} and {second.title}",
        why=f"{first.why} {second.why}", apply=PlanChange({**first.apply.fields, **second.apply.fields}),
    )  # fmt: skip


def vision_only(setting: Setting) -> str | None:
    """Why a rung that rebuilds our Vision Transformer does not apply, or None."""
    graph = None if setting.model is None else setting.model.graph
    if graph is not None and graph.vision and graph.classes is not None:
        return None
    trait = "is your own" if graph is None else "makes images" if graph.pixels is not None else "reads text"
    return f"it changes Penstock's own Vision Transformers, and this model {trait}"


REGISTERED: dict[str, Rung] = {}
"""All rungs by name."""


def register(rung: Rung) -> Rung:
    """Add a rung to the ladder. Raises ConfigError if its name is taken."""
    if REGISTERED.setdefault(rung.name, rung) != rung:
        raise ConfigError(f"There already is a rung named {rung.name!r}; give the new one another name.")
    return rung
