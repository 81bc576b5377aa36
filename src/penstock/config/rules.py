"""Every reason why a Plan is not allowed, each stated once for all callers.

A rule is a function that yields whole sentences. Each names the setting, what is wrong and what to do. Its parameters
are the objects that it needs: the Plan, the model, the machine. Its kind is `types` (types, kernels and device
features), `degrees` (of parallelism, and how they divide the model), `run` (what can be predicted but not run yet) or
`infer` (how trained models run). Rules of the first two kinds also apply to predictions. `problems` evaluates all rules
of training, and `inference_problems` those of inference.
"""

from __future__ import annotations

from functools import cache
from itertools import groupby
from typing import Any

from penstock.config.formats import Weights
from penstock.config.layout_rules import LAYOUT_RULES
from penstock.config.machine import Machine
from penstock.config.model import ModelConfig
from penstock.config.plan import Plan
from penstock.config.rule import Check
from penstock.config.run_rules import INFER_RULES, RUN_RULES
from penstock.errors import ConfigError

RULES = [*LAYOUT_RULES, *RUN_RULES]
"""All rules of training, in the order in which their problems are reported."""


def problems(
    plan: Plan, model: ModelConfig | None = None, machine: Machine | None = None, *, run: bool = False,
    degrees: bool = True,
) -> list[str]:  # fmt: skip
    """Every reason why `plan` is not allowed. Rules that need a model or a machine are skipped if it is not
    given.

    With `run`, rules of that kind are included. Without `degrees`, rules of that kind are skipped, for a search
    that chooses the degrees itself.
    """
    given = {"plan": plan, "model": model, "machine": machine}
    reasons: list[str] = []
    for names, checks in _checks(model is None, machine is None, run, degrees):
        arguments = [given[name] for name in names]
        for check in checks:
            reasons += check(*arguments)
    return list(dict.fromkeys(reasons)) if reasons else reasons


@cache
def _checks(
    no_model: bool, no_machine: bool, run: bool, degrees: bool
) -> list[tuple[tuple[str, ...], list[Check]]]:
    """The checks to run, in order; those that follow each other with the same parameters together, after their
    names."""
    kinds = {kind for kind, skipped in (("run", not run), ("degrees", not degrees)) if skipped}
    names = {name for name, absent in (("model", no_model), ("machine", no_machine)) if absent}
    allowed = (rule for rule in RULES if rule.kind not in kinds and names.isdisjoint(rule.parameters))
    groups = groupby(allowed, key=lambda rule: rule.parameters)
    return [(parameters, [rule.check for rule in rules]) for parameters, rules in groups]


def require(
    plan: Plan, model: ModelConfig | None = None, machine: Machine | None = None, *, run: bool = False
) -> None:
    """Raise `ConfigError` with all problems that `problems` finds."""
    reasons = problems(plan, model, machine, run=run)
    if reasons:
        raise ConfigError(reasons)


def inference_problems(
    plan: Plan, model: ModelConfig | None = None, *, weights: Weights = "auto", shortlist: bool = False,
    prefix: str = "plan.",
) -> list[str]:  # fmt: skip
    """Every reason why a trained model cannot run as `plan` says, with `weights` as the form of its linear layers'
    weights, and with or without a shortlist. Rules that need a model are skipped if it is not given. `prefix` precedes
    the names of the Plan's fields in messages.
    """
    given = {"plan": plan, "model": model, "weights": weights, "shortlist": shortlist}
    reasons = [
        problem.replace("plan.", prefix)
        for rule in INFER_RULES
        if model is not None or "model" not in rule.parameters
        for problem in rule.check(*(given[name] for name in rule.parameters))
    ]
    return list(dict.fromkeys(reasons))


def require_inference(plan: Plan, model: ModelConfig | None = None, **more: Any) -> None:
    """Raise `ConfigError` with all problems that `inference_problems` finds."""
    if reasons := inference_problems(plan, model, **more):
        raise ConfigError(reasons)
