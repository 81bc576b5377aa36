"""Precision: what is computed in which type, and what keeps small gradients alive in fp16."""

from __future__ import annotations

from penstock.precision.accelerate import (
    accelerate,
    clip_grad_norm_,
    master_parameters,
    restore,
    scale_loss,
    scalers_of,
    unscale_,
)
from penstock.precision.copies import plain
from penstock.precision.forward import apply_precision
from penstock.precision.histogram import GradientHistogram, Histogram, Recommendation, recommend
from penstock.precision.inspect import PrecisionReport, gradient_histogram, report
from penstock.precision.master import MasterWeights
from penstock.precision.matmul import matmul_precision
from penstock.precision.overflow import Overflow, OverflowTrace
from penstock.precision.scaler import Agree, LossScaler, agree_over
from penstock.precision.settings import Precision, precision_of, properties_of

__all__ = [
    "Agree",
    "GradientHistogram",
    "Histogram",
    "LossScaler",
    "MasterWeights",
    "Overflow",
    "OverflowTrace",
    "Precision",
    "PrecisionReport",
    "Recommendation",
    "accelerate",
    "agree_over",
    "apply_precision",
    "clip_grad_norm_",
    "gradient_histogram",
    "master_parameters",
    "matmul_precision",
    "plain",
    "precision_of",
    "properties_of",
    "recommend",
    "report",
    "restore",
    "scale_loss",
    "scalers_of",
    "unscale_",
]
