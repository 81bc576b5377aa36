"""What can be built and trained today, out of what `penstock plan` can predict."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.config.convert import word
from penstock.config.model import ModelConfig, ViTConfig, stack_names, stacks
from penstock.config.plan import Plan
from penstock.errors import ConfigError

_ONLY: dict[str, Any] = {
    "tp": 1, "sp": False, "pp": 1, "schedule": "1f1b", "virtual": 1, "cp": 1, "ep": 1,
    "algorithm": "adamw", "gradients": "weights", "overlap": True, "tp_overlap": "weights",
    "cp_exchange": "ring",
}  # fmt: skip
"""Settings of a Plan that training supports for one value."""
_NOT: dict[str, Any] = {"recompute": "selective", "offload": "activations"}
"""Settings of a Plan that training supports for all values but one."""
_VIT_HAS: dict[str, tuple[Any, ...]] = {
    "kv_heads": (None,), "head_features": (None,), "norm": ("layer",), "bias": (True,), "positions": ("learned",),
    "parallel": (False,), "window": (None,), "experts": (0,), "mlp": ("gelu", "gelu_tanh"), "norm_first": (True,),
    "norm_bias": (True,), "attention_scale": (None,), "attention_dropout": (0.0,), "mlp_dropout": (None,),
}  # fmt: skip
"""Fields of a stack that our Vision Transformer does not support for all values, with those that it does."""


def require_buildable(model: ModelConfig) -> None:
    """Raises ConfigError for a model that can only be planned."""
    problems = list(model_problems(model)) if isinstance(model, ViTConfig) else list(_not_built(model))
    if problems:
        raise ConfigError(problems)


def _not_built(model: ModelConfig) -> Iterator[str]:
    """Every reason why a text model cannot be built."""
    for stack, name in zip(stacks(model), stack_names(model)):
        if stack.experts:
            yield (
                f"{name}.experts={stack.experts} can be predicted by `penstock plan`, but mixtures of experts "
                f"cannot be built yet; use {name}.experts=0."
            )


def require_trainable(model: ModelConfig) -> ViTConfig:
    """`model`, if it can be built and trained. Raises ConfigError for a model that can only be planned."""
    if problems := list(model_problems(model)):
        raise ConfigError(problems)
    assert isinstance(model, ViTConfig)
    return model


def model_problems(model: ModelConfig) -> Iterator[str]:
    """Every reason why a model cannot be built and trained."""
    if not isinstance(model, ViTConfig):
        yield (
            f"model.family={model.family} can be predicted by `penstock plan` and made by `penstock.create`, but there "
            "is no task yet that trains it; choose a model of the family vit."
        )
        return
    for name, values in _VIT_HAS.items():
        if getattr(model, name) not in values:
            yield (
                f"model.{name}={word(getattr(model, name))} can be predicted by `penstock plan`, but our Vision "
                f"Transformer is built with {name}={' or '.join(map(word, values))} only; use that."
            )


def plan_problems(plan: Plan) -> Iterator[str]:
    """Every setting of a Plan that training cannot run."""
    for name in (*_ONLY, *_NOT):
        value = getattr(plan, name)
        if value != _ONLY[name] if name in _ONLY else value == _NOT[name]:
            remedy = f"{name}={word(_ONLY[name])}" if name in _ONLY else f"another {name}"
            yield (
                f"plan.{name}={word(value)} can be predicted by `penstock plan`, but training cannot run it yet; "
                f"use {remedy}."
            )
