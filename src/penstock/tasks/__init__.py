"""Tasks: what models are trained for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from penstock.config.model import ModelConfig
from penstock.config.tasks import TASKS, TaskName, TaskRow, task_name
from penstock.tasks.captions import Captioning
from penstock.tasks.chat import Chat
from penstock.tasks.denoise import Denoise
from penstock.tasks.embedding import Embedding
from penstock.tasks.image_classification import ImageClassification, classification_loss
from penstock.tasks.masked_words import MaskedWords
from penstock.tasks.next_token import NextToken
from penstock.tasks.preferences import Preferences
from penstock.tasks.sentences import Pairs, Sentences
from penstock.tasks.span_corruption import SpanCorruption
from penstock.tasks.task import Loss, Prepare, Task, mean_loss
from penstock.tasks.text import TextBatch, TextTask
from penstock.tasks.translation import Translation
from penstock.tasks.universal import Universal

__all__ = [
    "Captioning", "Chat", "Denoise", "Embedding", "ImageClassification", "Loss", "MaskedWords", "NextToken",
    "Pairs", "Preferences", "Prepare", "Sentences", "SpanCorruption", "Task", "TextBatch", "TextTask",
    "Translation", "Universal", "classification_loss", "mean_loss", "task_of",
]  # fmt: skip

_ENROLLED: dict[str, type[TextTask]] = {}


def enrol(name: str, form: str, task: type[TextTask]) -> None:
    """Register your own task as the default for models whose graph has this `form`. `task` is called with the name of
    the weights that a run starts from, or None."""
    TASKS[name], _ENROLLED[name] = TaskRow("", form), task


def task_of(model: ModelConfig, task: TaskName = "auto", *, init_from: str | None = None) -> Task:
    """The task that a model is trained for; `auto` is its family's task. `init_from` are the weights that it starts
    from. Raises ConfigError for a task that does not fit the model."""
    name = task_name(model, task)
    if name in _ENROLLED:
        return _ENROLLED[name](init_from)
    module, _, part = TASKS[name].place.partition(".")
    own: Any = getattr(import_module(f"penstock.tasks.{module}"), part)
    return own(init_from) if isinstance(own, type) else own  # type: ignore[no-any-return]
