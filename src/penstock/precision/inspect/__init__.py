"""Looking at a model's precision: what ran in which type, what fp16 would lose of its gradients, where it overflows."""

from __future__ import annotations

from penstock.precision.inspect.gradients import LayerGradients
from penstock.precision.inspect.measure import gradient_histogram
from penstock.precision.inspect.operations import Operation
from penstock.precision.inspect.report import PrecisionReport, report

__all__ = ["LayerGradients", "Operation", "PrecisionReport", "gradient_histogram", "report"]
