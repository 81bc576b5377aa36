"""Tasks: what models are trained for."""

from __future__ import annotations

from penstock.config.model import ModelConfig
from penstock.config.trainable import require_trainable
from penstock.tasks.image_classification import ImageClassification, classification_loss
from penstock.tasks.task import Loss, Prepare, Task

__all__ = ["ImageClassification", "Loss", "Prepare", "Task", "classification_loss", "task_of"]


def task_of(model: ModelConfig) -> Task:
    """What a model of this family is trained for. Raises ConfigError for a family that cannot be trained yet."""
    require_trainable(model)
    return classification_loss
