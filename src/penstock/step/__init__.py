"""How an optimizer step is taken: micro-batches, precision, clipping, update and averages, in one place."""

from __future__ import annotations

from penstock.step.runner import Loss, StepResult, TrainStep, classification_loss

__all__ = ["Loss", "StepResult", "TrainStep", "classification_loss"]
