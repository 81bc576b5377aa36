"""Looking at a model's precision: what ran in which type, what fp16 would lose of its gradients, where it overflows."""

from __future__ import annotations

from penstock.precision.inspect.gradients import LayerGradients as LayerGradients
from penstock.precision.inspect.gradients import gradient_histogram as gradient_histogram
from penstock.precision.inspect.operations import Operation as Operation
from penstock.precision.inspect.report import PrecisionReport as PrecisionReport
from penstock.precision.inspect.report import report as report
