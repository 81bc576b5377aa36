"""The optimizer step in one place: micro-batches, precision, clipping, update and averages."""

from __future__ import annotations

from penstock.step.pipeline import Pipeline
from penstock.step.train_step import Accumulate, Runner, StepResult, TrainStep

__all__ = ["Accumulate", "Pipeline", "Runner", "StepResult", "TrainStep"]
