"""Models and Plans that can be built and trained today, out of those that `penstock plan` can predict."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from penstock.config.convert import word
from penstock.config.model import ModelConfig, ViTConfig
from penstock.config.plan import Plan
from penstock.config.run import TaskName
from penstock.errors import ConfigError

M = TypeVar("M", bound=ModelConfig)

_ONLY: dict[str, Any] = {
    "ep": 1, "gradients": "weights", "overlap": True, "tp_overlap": "weights",
}  # fmt: skip
"""Settings of a Plan that training supports for one value."""


TASKS: dict[str, str] = {
    "images": "images",
    "next_token": "causal tokens",
    "masked_words": "tokens",
    "sentences": "tokens",
    "pairs": "tokens",
    "span_corruption": "causal tokens and tokens",
    "translation": "causal tokens and tokens",
    "embedding": "tokens",
}
"""Forms of the graphs that each task trains; the first task with a form is what it is trained for unless told."""


def task_name(model: ModelConfig, task: TaskName = "auto") -> TaskName:
    """The task that a model is trained for, where `auto` is that of its family. Raises ConfigError for a task that does
    not fit the family."""
    fitting = [name for name, form in TASKS.items() if form == model.graph.form]
    if not fitting:
        raise ConfigError(
            f"No task trains a model of {model.graph.form}; give build a Task of your own as loss."
        )
    if task == "auto":
        classes = model.graph.classes is not None and "pairs" in fitting
        return "pairs" if classes else fitting[0]  # type: ignore[return-value]
    if task not in fitting:
        raise ConfigError(
            f"task is {task}, which trains models of {TASKS[task]}, but model.family {model.family} is one of "
            f"{model.graph.form}; use task {' or '.join(fitting)}, or another model."
        )
    return task


def require_trainable(model: M) -> M:
    """`model`, if it can be built and trained. Raises ConfigError for a model that can only be planned."""
    if problems := list(model_problems(model)):
        raise ConfigError(problems)
    return model


def require_vision(model: ModelConfig) -> ViTConfig:
    """`model`, if it is a Vision Transformer that can be built. Raises ConfigError."""
    if not isinstance(model, ViTConfig):
        raise ConfigError(
            f"model.family is {model.family}, but only a vit takes images; choose a preset such as vit-s16."
        )
    return require_trainable(model)


def model_problems(model: ModelConfig) -> Iterator[str]:
    """Every reason why a model cannot be built and trained."""
    for run in model.graph.runs:
        if run.stack.experts:
            yield (
                f"{run.setting}.experts={run.stack.experts} can be predicted by `penstock plan`, but mixtures of "
                f"experts cannot be built yet; use {run.setting}.experts=0."
            )


def plan_problems(plan: Plan) -> Iterator[str]:
    """Every setting of a Plan that training cannot run."""
    for name, supported in _ONLY.items():
        value = getattr(plan, name)
        if value != supported:
            yield (
                f"plan.{name}={word(value)} can be predicted by `penstock plan`, but training cannot run it yet; "
                f"use {name}={word(supported)}."
            )
