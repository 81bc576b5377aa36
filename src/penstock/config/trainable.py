"""Checks which of the models and Plans that `penstock plan` can predict can also be built and trained."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.config.convert import word
from penstock.config.graph import TokenInput
from penstock.config.model import PRESETS, ModelConfig, ViTConfig
from penstock.config.plan import TRAINED, Plan
from penstock.config.tasks import TASKS, TaskName
from penstock.errors import ConfigError

_ROUTING: tuple[TaskName, ...] = ("translation", "denoise")
"""Tasks that choose the expert of each sample: by its language, or by its time."""


def task_name(model: ModelConfig, task: TaskName = "auto") -> TaskName:
    """The task that a model is trained for; `auto` is the default of its family. Raises ConfigError for a task that
    does not fit the family."""
    fitting = [name for name, row in TASKS.items() if model.graph.form in row.forms]
    if not fitting:
        raise ConfigError(
            f"No task trains a model that reads {model.graph.form}; pass build a Task of your own as loss."
        )
    if model.graph.routed:
        routing = [name for name in _ROUTING if name in (fitting if task == "auto" else (task,))]
        if not routing:
            raise ConfigError(
                f"A model with router=given needs the expert of each sample, which only the tasks "
                f"{' and '.join(_ROUTING)} provide; pass build a Task of your own as loss that passes routes to the "
                "model, or use router=softmax."
            )
        task = routing[0]
    if task == "auto":
        classes = model.graph.classes is not None and "pairs" in fitting
        return "pairs" if classes else fitting[0]
    if task not in fitting:
        others = [name for name, preset in PRESETS.items() if preset.graph.form in TASKS[task].forms]
        tiny = next((name for name in others if name.endswith("-tiny")), others[0])
        raise ConfigError(
            f"task is {task}, for models such as {tiny}, but model.family is {model.family}; use task "
            f"{' or '.join(fitting)}, or another model."
        )
    return task


def require_vision(model: ModelConfig) -> ViTConfig:
    """`model`, if it is a Vision Transformer. Raises ConfigError."""
    if not isinstance(model, ViTConfig):
        raise ConfigError(
            f"model.family is {model.family}, but only a vit takes images; choose a preset such as vit-s16."
        )
    return model


def mixture_problems(plan: Plan, model: ModelConfig) -> Iterator[str]:
    """Every setting of a Plan that training cannot run with the model's mixtures of experts."""
    mixed = [run for run in model.graph.runs if any(each.mixture or each.routed for each in run.stack.layers)]
    if not mixed:
        return
    setting = f"{mixed[0].setting}.experts={mixed[0].stack.experts}"
    whole = [run.setting for run in mixed if run.stack.experts_in == "block"]
    if whole and plan.compiles_whole:
        yield (
            f"plan.compile={plan.compile} cannot compile {whole[0]}.experts_in=block in one piece, because the number "
            "of samples of an expert changes with each step; use compile=blocks."
        )
    if plan.compile == "graphs":
        yield (
            f"plan.compile=graphs replays work on the GPU alone, and visits to the experts of {setting} are "
            "counted outside of it; use compile=whole."
        )
    texts = bool(whole) and bool(model.graph.inputs_of(TokenInput))
    for name, plain in (("padding", "keep"), ("cp", 1)) if texts else ():
        if getattr(plan, name) != plain:
            yield (
                f"{whole[0]}.experts_in=block sends whole samples to their experts, but "
                f"plan.{name}={getattr(plan, name)} does not keep the tokens of a sample together; use {name}={plain}."
            )
    if plan.compile != "none" and plan.products != "plain" and len(whole) < len(mixed):
        yield (
            f"plan.products={plan.products} multiplies the experts of {setting} one after the other, which compiled "
            "code cannot; use plan.products=plain, or plan.compile=none."
        )
    if plan.compile != "none" and plan.recompute != "none":
        yield (
            f"plan.recompute={plan.recompute} in compiled code would choose experts a second time, perhaps others, "
            f"with {setting}; use plan.recompute=none, or plan.compile=none."
        )
    for name in ("tp", "pp", "cp", "ep") if plan.compile != "none" else ():
        if getattr(plan, name) > 1:
            yield (
                f"plan.compile={plan.compile} cannot be trained with plan.{name}={getattr(plan, name)} and {setting} "
                f"yet; use compile=none, or {name}=1."
            )
    for run in mixed:
        for name in ("cp", "tp") if run.stack.chooses_by_sample else ():
            if getattr(plan, name) > 1:
                yield (
                    f"{run.setting}.sample_capacity limits the tokens of a sample that an expert takes, so a rank "
                    f"needs all tokens of a sample, but plan.{name}={getattr(plan, name)} splits them over ranks; use "
                    f"{name}=1, or leave out sample_capacity."
                )
        if plan.tp > 1 and run.stack.chooses_by_chance:
            yield (
                f"{run.setting} chooses or masks experts with random numbers, which would differ between the ranks of "
                f"plan.tp={plan.tp}; use tp=1, or leave out router_jitter and expert_dropout."
            )
        if run.stack.capacity is not None and plan.token_order != "batch_first" and plan.compile != "none":
            yield (
                f"{run.setting}.capacity drops the last tokens in the order of samples, and with "
                f"plan.token_order={plan.token_order} compiled code cannot tell that order; use "
                "token_order=batch_first, or compile=none."
            )


def plan_problems(plan: Plan) -> Iterator[str]:
    """Every setting of a Plan that training cannot run."""
    for name, supported in TRAINED.items():
        value = getattr(plan, name)
        if value != supported:
            yield (
                f"plan.{name}={word(value)} can be predicted by `penstock plan`, but training cannot run it yet; "
                f"use {name}={word(supported)}."
            )
