"""Models and Plans that can be built and trained today, out of those that `penstock plan` can predict."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from penstock.config.convert import word
from penstock.config.model import EncoderConfig, ModelConfig, ViTConfig, stack_names, stacks
from penstock.config.plan import Plan
from penstock.config.run import TaskName
from penstock.errors import ConfigError

M = TypeVar("M", bound=ModelConfig)

_ONLY: dict[str, Any] = {
    "ep": 1, "gradients": "weights", "overlap": True, "tp_overlap": "weights",
}  # fmt: skip
"""Settings of a Plan that training supports for one value."""
_VIT_HAS: dict[str, tuple[Any, ...]] = {
    "kv_heads": (None,), "head_features": (None,), "norm": ("layer",), "bias": (True,), "positions": ("learned",),
    "parallel": (False,), "window": (None,), "experts": (0,), "mlp": ("gelu", "gelu_tanh"), "norm_first": (True,),
    "norm_bias": (True,), "attention_scale": (None,), "attention_dropout": (0.0,), "mlp_dropout": (None,),
}  # fmt: skip
"""Fields of a stack that our Vision Transformer does not support for all values, with those that it does."""


TASKS: dict[str, tuple[str, ...]] = {
    "images": ("vit",),
    "next_token": ("decoder",),
    "masked_words": ("encoder",),
    "sentences": ("encoder",),
    "pairs": ("encoder",),
    "span_corruption": ("seq2seq",),
    "translation": ("seq2seq",),
    "embedding": ("encoder",),
}
"""Families that each task trains; the first task that names a family is what it is trained for unless told."""


def task_name(model: ModelConfig, task: TaskName = "auto") -> TaskName:
    """The task that a model is trained for, where `auto` is that of its family. Raises ConfigError for a task that does
    not fit the family."""
    fitting = [name for name, families in TASKS.items() if model.family in families]
    if task == "auto":
        classes = isinstance(model, EncoderConfig) and model.head == "classes"
        return "pairs" if classes else fitting[0]  # type: ignore[return-value]
    if task not in fitting:
        raise ConfigError(
            f"task is {task}, which trains models of the family {' or '.join(TASKS[task])}, but model.family is "
            f"{model.family}; use task {' or '.join(fitting)}, or another model."
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
    if not isinstance(model, ViTConfig):
        yield from _not_built(model)
        return
    for name, values in _VIT_HAS.items():
        if getattr(model, name) not in values:
            yield (
                f"model.{name}={word(getattr(model, name))} can be predicted by `penstock plan`, but our Vision "
                f"Transformer is built with {name}={' or '.join(map(word, values))} only; use that."
            )


def _not_built(model: ModelConfig) -> Iterator[str]:
    """Every reason why a text model cannot be built."""
    for stack, name in zip(stacks(model), stack_names(model)):
        if stack.experts:
            yield (
                f"{name}.experts={stack.experts} can be predicted by `penstock plan`, but mixtures of experts "
                f"cannot be built yet; use {name}.experts=0."
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
