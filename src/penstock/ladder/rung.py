"""Rungs: each one optimisation, as a change of model configuration and Plan, and how to register one.

Penstock's own rungs are in `rungs.py`; `register(Rung(…))` adds another. Either enrols it in the ladder, in `--rungs`
and `--skip`, and in the tests that every rung must pass. Free of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from penstock.config import rules
from penstock.config.formats import HalfDtype
from penstock.config.machine import Machine
from penstock.config.model import ModelConfig
from penstock.config.plan import SWITCHES, Plan, effect_of
from penstock.errors import ConfigError
from penstock.ladder.result import Results


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A model and Plan to build and measure. `model` is None where the user brought a model of their own."""

    model: ModelConfig | None
    plan: Plan
    by_length: bool = False
    """Whether batches hold samples of similar length."""
    packed: bool = False
    """Whether documents fill samples behind each other, where the baseline has one in each."""
    copy: int = 0
    """Tells two builds of one setting apart: what differs between their speeds is noise. Added to a script's seeds."""
    line: str | None = None
    """The settings that a script is run under, which leave all that they do not name to it; None of a model."""

    @property
    def words(self) -> str:
        """The settings as a line."""
        return self.plan.line() if self.line is None else self.line or "the script as it is"


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Facts about its surroundings that a rung may ask for."""

    machine: Machine
    micro_batch: int
    """The baseline's."""
    splittable: bool = True
    """Whether the batch can be made larger: always for our own data, and for a user's where samples are found."""
    switches: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Values of the Plan's `SWITCHES` that the model can take."""
    padding_share: float = 0.0
    """How much of a batch's tokens is padding."""
    groupable: bool = False
    """Whether its samples differ in length and are taken in an order of chance."""
    packable: bool = False
    """Whether each of its samples is one document, or a piece of one, and padded."""
    unpacked_padding: float | None = None
    """How much of the samples would be padding so, where documents are packed."""
    procs: int = 1
    """Processes that rungs of several may start."""
    holds: Callable[[Setting], bool] = lambda setting: False
    """Whether the planner knows the work of a setting and expects memory to hold it."""

    @property
    def half(self) -> HalfDtype:
        """The half type that its machine multiplies in: bf16, which needs no loss scale, where it can."""
        return "bf16" if "bf16" in self.machine.peak_flops else "fp16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One optimisation. `apply` says what changes, `refusal` why that cannot be done here, if it cannot."""

    name: str
    """Name in `--rungs` and `--skip`; the part before the first dash is its group."""
    place: int
    """Place on the ladder: of rungs that gain, the path climbs the lowest first."""
    title: str
    """A few words, for tables and figures."""
    why: str
    """Effect of the rung and why it should pay: one or two sentences for the reader of the page."""
    apply: Callable[[Setting, Situation], Setting]
    obstacle: Callable[[Setting, Situation], str | None] = lambda setting, situation: None
    """Given the setting it would be applied to: a sentence why it cannot or need not be, or None. What the rules of
    Plans and the model's switches say is not repeated here."""
    choice: str = ""
    """Rungs of one choice exclude each other; by default those of a group do."""
    compared_by: Literal["samples", "flops"] = "samples"
    """Unit of the comparison, per second: samples, or the model's FLOPs where a sample itself grows."""
    carried: bool = True
    """Whether later rungs build on it where it pays; if not, it is only reported."""
    twin: bool = False
    """Whether its results must equal those of one process that takes the same samples in the same order. That is then
    checked, in place of comparing its loss with the baseline's."""

    @property
    def alternatives(self) -> str:
        """The name of the choice that it is an answer to."""
        return self.choice or group_of(self)

    @property
    def results(self) -> Results:
        """Effect on results. The search takes rungs that keep them, and measures whether `rounding` does; rungs that
        change them (`other`) are tried apart, on top of the best. A rung that changes more than the Plan is `other`."""
        return self.apply.results if isinstance(self.apply, PlanChange) else "other"

    @property
    def searched(self) -> bool:
        """Whether the search combines it with others."""
        return self.results != "other" and self.carried and not self.twin

    def hindrance(self, setting: Setting, situation: Situation) -> str | None:
        """Why the model or the situation does not allow the rung, or None; `refusal` also asks the rules of Plans."""
        changes = self.apply.values(situation) if isinstance(self.apply, PlanChange) else {}
        for name, why in SWITCHES.items():
            if name in changes and changes[name] not in situation.switches.get(name, ()):
                return f"the model cannot be switched to {name}={changes[name]}: it {why}"
        return self.obstacle(setting, situation)

    def refusal(self, setting: Setting, situation: Situation) -> str | None:
        """Why the rung cannot be applied to a setting, by itself or by the rules of Plans, or None."""
        own = self.hindrance(setting, situation)
        if own is not None:
            return own
        changed = self.apply(setting, situation)
        return next(iter(rules.problems(changed.plan, changed.model, situation.machine, run=True)), None)


@dataclass(frozen=True, slots=True)
class PlanChange:
    """A rung's `apply` that sets fields of the Plan: see `plan`."""

    fields: dict[str, Any]

    def __call__(self, setting: Setting, situation: Situation) -> Setting:
        values = self.values(situation)
        if setting.line is None:
            return replace(setting, plan=replace(setting.plan, **values))
        line = with_values(setting.line, values)
        return replace(setting, plan=Plan.parse(line), line=line)

    def values(self, situation: Situation) -> dict[str, Any]:
        """The values of its fields in a situation."""
        return {name: value(situation) if callable(value) else value for name, value in self.fields.items()}

    @property
    def results(self) -> Results:
        """The most that one of its fields does to results; a rung that splits the batch changes it."""
        effects = {effect_of(name, value) for name, value in self.fields.items()}
        if effects <= {"nothing", "rounding"}:
            return "same"
        return "rounding" if effects <= {"nothing", "rounding", "precision"} else "other"


def with_values(line: str, values: Mapping[str, Any]) -> str:
    """The settings of a script with these values, which come last where they are new."""
    named = {word.partition("=")[0]: word for word in line.split()}
    if "compile" in values and "offload" in named:  # which only eager blocks do
        del named["offload"]
        named["recompute"] = "recompute=early"
    words = {n: f"{n}={','.join(v) if isinstance(v, tuple) else v}" for n, v in values.items()}
    if all(named.get(name) == word for name, word in words.items()):
        return line
    return " ".join([*(word for name, word in named.items() if name not in words), *words.values()])


def plan(**fields: Any) -> PlanChange:
    """A rung's `apply` that sets fields of the Plan. A function among the values is called with the situation."""
    return PlanChange(fields)


def joined(first: Rung, second: Rung) -> Rung:
    """Two rungs that set fields of the Plan, as one."""
    assert isinstance(first.apply, PlanChange)
    assert isinstance(second.apply, PlanChange)
    return replace(
        second,
        name=f"{first.name}+{second.name}",
        title=f"{first.title} and {second.title}",
        why=f"{first.why} {second.why}",
        apply=PlanChange({**first.apply.fields, **second.apply.fields}),
    )


def vision_only(setting: Setting) -> str | None:
    """The obstacle of a rung that rebuilds our Vision Transformer, or None."""
    graph = None if setting.model is None else setting.model.graph
    if graph is not None and graph.vision and graph.classes is not None:
        return None
    trait = "is your own" if graph is None else "makes images" if graph.pixels is not None else "reads text"
    return f"it changes a Vision Transformer of Penstock's, and this model {trait}"


def group_of(rung: Rung) -> str:
    """The word that names a rung and its like: `optimizer` of `optimizer-fused`."""
    return rung.name.split("-", 1)[0]


REGISTERED: dict[str, Rung] = {}
"""All rungs by name."""


def register(rung: Rung) -> Rung:
    """Put a rung on the ladder. Raises ConfigError where its name is taken."""
    if REGISTERED.setdefault(rung.name, rung) != rung:
        raise ConfigError(f"There already is a rung named {rung.name!r}; give the new one another name.")
    return rung
