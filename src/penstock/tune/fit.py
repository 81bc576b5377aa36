"""Rungs of the ladder that a script can have from outside, and why others do not fit it. Free of torch."""

from __future__ import annotations

import math

from penstock.config.fused import FUSED, FusedName
from penstock.config.machine import Machine
from penstock.errors import ConfigError
from penstock.ladder.rung import PlanChange, Rung, Situation
from penstock.ladder.rungs import choose
from penstock.tune.facts import Facts
from penstock.tune.settings import TuneConfig

TUNED = (
    "padding", "optimizer-fused", "optimizer-foreach", "matmul", "half-bf16", "half-fp16", "attention-plain",
    "attention-flash", "attention-efficient", "attention-cudnn", "compile-blocks", "compile-whole",
    "fuse-residual_norm", "fuse-bias_activation", "fuse-all", "loss-chunked", "experts-loop", "memory", "int8", "fp8",
)  # fmt: skip
"""Rungs of the ladder that can be put on a script from outside, in the order in which they are tried: what leaves work
out comes first, what changes results last."""
CHANGES_RESULTS = ("int8", "fp8")
SDPA = Rung(
    name="attention-sdpa",
    place=590,
    title="torch's attention",
    why="Attention is one call of torch's, which keeps no scores in memory, in place of products and a softmax.",
    apply=PlanChange({"attention": "sdpa"}),
)
RECOMPUTE = "recompute=early"
OFFLOAD = Rung(
    name="offload",
    place=50,
    title="activations on the host",
    why="What blocks keep for the backward pass waits in host memory meanwhile, in place of being computed again.",
    apply=PlanChange({"recompute": "none", "offload": "activations"}),
)
"""Tried where a script runs out of memory without recomputation."""


def rungs_for(config: TuneConfig) -> list[Rung]:
    """The rungs to try, in their order. Raises ConfigError for names that are none, or that scripts cannot have."""
    names = {rung.name: rung for rung in choose((), config.skip)}
    asked_names = {rung.name for rung in choose(config.rungs, config.skip)}
    if config.rungs and not asked_names & {*TUNED}:
        raise ConfigError(
            f"None of the rungs {', '.join(config.rungs)} can be put on a script from outside; these can: "
            f"{', '.join(TUNED)}."
        )
    chosen = [names[name] for name in TUNED if name in names and name in asked_names]
    at = next((i for i, rung in enumerate(chosen) if rung.name.startswith("attention-")), None)
    return chosen if at is None else [*chosen[:at], SDPA, *chosen[at:]]


def situation_of(facts: Facts, machine: Machine) -> Situation:
    """The situation of a script, for the rungs of the ladder."""
    switches = {name: tuple(values) for name, values in facts.switches.items()}
    if facts.eager:
        switches["attention"] = (*switches.get("attention", ()), "sdpa")
    return Situation(
        machine=machine,
        micro_batch=1,
        splittable=False,
        switches=switches,
        padding_share=facts.padding,
    )


def unfit(rung: Rung, facts: Facts, machine: Machine) -> str:
    """Why a rung says nothing for this script, or nothing."""
    group, _, form = rung.name.partition("-")
    if group == "optimizer":
        return _unfit_form(form, facts)
    if not facts.model and group not in ("matmul", "memory"):
        return "no module was called with gradients, so that there is no model to change"
    if group == "half":
        dtype = form
        if facts.mixed:
            return f"its precision is the script's own business: {facts.mixed}"
        peaks = machine.peak_flops
        if machine.device == "cpu" and peaks.get(dtype, 0.0) <= peaks.get("fp32", math.inf):
            return f"this CPU has no units for {dtype}: it multiplies {dtype} no faster than fp32"
    if rung is SDPA and not facts.eager:
        return "it calls torch's attention already, or has none of transformers"
    if rung is OFFLOAD and facts.device == "cpu":
        return "on a CPU activations are in host memory already"
    if group in ("compile", "offload"):
        if facts.compiled:
            return "the script calls torch.compile itself"
        if (form == "blocks" or rung is OFFLOAD) and not facts.blocks:
            return facts.no_blocks.partition(". ")[0]
    if group == "fuse":
        return _unfit_fused(rung, facts)
    if group in CHANGES_RESULTS:
        if facts.mixed:
            return f"its precision is the script's own business: {facts.mixed}"
        return facts.products.get("int8_all" if group == "int8" else "fp8_tensorwise", "")
    return ""


def _unfit_fused(rung: Rung, facts: Facts) -> str:
    """Why fused operators cannot be put on the model, or need not be tried together."""
    assert isinstance(rung.apply, PlanChange)
    names: tuple[FusedName, ...] = rung.apply.fields["fuse"]
    absent = [FUSED[name].title for name in names if not facts.fused.get(name)]
    if not absent:
        return ""
    where = facts.no_blocks.partition(". ")[0] or f"no place of the model is known for {' or '.join(absent)}"
    return where if len(absent) == len(names) else "one alone fits the model, and has a rung of its own"


def _unfit_form(form: str, facts: Facts) -> str:
    if facts.form == form:
        return f"the script's {facts.optimizer} is {form} already"
    if form == "foreach" and facts.device == "cpu":
        return "on a CPU torch has no kernels for many tensors at once"
    if form == "foreach" and not facts.form:
        return "torch chooses it on a GPU already"
    return next((why for name, why in facts.forms.items() if name == form), "")
