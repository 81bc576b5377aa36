"""Precision: what is computed in which type, and what keeps small gradients alive in fp16."""

from __future__ import annotations

from penstock.precision.levels import autocast, cast_model, half_dtype
from penstock.precision.matmul import matmul_precision
from penstock.precision.scaler import LossScaler

__all__ = ["LossScaler", "autocast", "cast_model", "half_dtype", "matmul_precision"]
