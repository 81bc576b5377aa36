"""The task that a model is trained for."""

from __future__ import annotations

from penstock.config.model import PRESETS, ModelConfig, ViTConfig
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
