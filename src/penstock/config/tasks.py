"""Tasks that models are trained for: one row each, which names its class in `penstock.tasks`; and a model's task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from penstock.config.model import PRESETS, ModelConfig, ViTConfig
from penstock.errors import ConfigError


class TaskRow(NamedTuple):
    """A task's form and tag, available without importing its class."""

    place: str
    """Its class, or the task itself, as a module of `penstock.tasks` and a name in it; empty for a user's own task."""
    form: str
    """Forms of the graphs that it trains, separated by `or`."""
    tag: str = ""
    """The hub's word for it."""

    @property
    def forms(self) -> list[str]:
        """The forms, one by one."""
        return self.form.split(" or ")


TASKS = {
    "images": TaskRow("image_classification.classification_loss", "images", "image-classification"),
    "denoise": TaskRow("denoise.Denoise", "noisy images"),
    "next_token": TaskRow("next_token.NextToken", "causal tokens", "text-generation"),
    "chat": TaskRow("chat.Chat", "causal tokens", "text-generation"),
    "preferences": TaskRow("preferences.Preferences", "causal tokens", "text-generation"),
    "masked_words": TaskRow("masked_words.MaskedWords", "tokens", "fill-mask"),
    "sentences": TaskRow("sentences.Sentences", "tokens", "text-classification"),
    "pairs": TaskRow("sentences.Pairs", "tokens", "text-classification"),
    "span_corruption": TaskRow("span_corruption.SpanCorruption", "causal tokens and tokens", "text2text-generation"),
    "translation": TaskRow("translation.Translation", "causal tokens and tokens", "translation"),
    "embedding": TaskRow("embedding.Embedding", "tokens", "sentence-similarity"),
    "captions": TaskRow("captions.Captioning", "causal images and tokens and tokens with 3 heads", "image-to-text"),
    "universal": TaskRow(
        "universal.Universal", "causal tokens with 2 heads or causal tokens with 3 heads or tokens with 2 heads"
    ),
}  # fmt: skip
"""The tasks by name. The first task with a form is the default for models of that form."""
if TYPE_CHECKING:
    TaskName = str
else:
    TaskName = Literal["auto", *TASKS]

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
