"""Losses and gradients of rows of logits in C++ on CPUs: one exponential for each logit and pass.

The kernels and their formulas are in `native/losses.cpp`; what they compute is in `penstock.kernels.logit_rows`, whose
plain form is the reference. Shapes: R rows, V columns.
"""

from __future__ import annotations

from ctypes import c_float, c_int64

import torch
from torch import Tensor

from penstock.kernels.native import TYPES, address, library, sizes, threads_for

IGNORED = -100
"""The target of rows to ignore, as in torch's cross entropy."""


def has_rows(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are kernels for logits of this dtype; they are compiled at first use."""
    return device.type == "cpu" and dtype in TYPES and library("losses") is not None


def takes_rows(logits: Tensor) -> bool:
    """Whether the kernels support these logits."""
    return type(logits) is Tensor and logits.stride(-1) == 1 and has_rows(logits.device, logits.dtype)


def native_losses(logits: Tensor, targets: Tensor, smoothing: float, z_loss: float) -> tuple[Tensor, Tensor]:
    """The loss of each row, (R,) in fp32, and its log Σ exp in fp64; the loss is 0 where the target is −100.

    logits: (R, V), with contiguous rows; targets: (R,) int64. Raises IndexError for other targets, as torch does.
    """
    rows, columns = logits.shape
    targets = targets.long().contiguous()
    losses = logits.new_empty(rows, dtype=torch.float32)
    sums = logits.new_empty(rows, dtype=torch.float64)
    kernels = library("losses")
    assert kernels is not None
    if rows and not kernels.penstock_row_losses(
        address(logits), TYPES[logits.dtype], address(targets), *sizes(rows, columns),
        c_int64(logits.stride(0)), c_float(smoothing), c_float(z_loss), c_int64(IGNORED), address(losses),
        address(sums), threads_for(logits.numel()),
    ):  # fmt: skip
        counted = targets[targets != IGNORED]
        raise IndexError(
            f"Targets go from {int(counted.min())} to {int(counted.max())}, but must be from 0 to {columns - 1}, or "
            f"{IGNORED} for rows to ignore."
        )
    return losses, sums


def native_gradients_(
    out: Tensor, logits: Tensor, targets: Tensor, sums: Tensor, factors: Tensor, smoothing: float,
    z_loss: float = 0.0,
) -> Tensor:  # fmt: skip
    """Write the gradient of Σ_rows factor · loss by the logits to `out`, which may be the logits, and return it.

    sums: (R,), log Σ exp from `native_losses`; factors: (R,). Rows whose target is −100 become 0.
    """
    rows, columns = logits.shape
    targets, factors = targets.long().contiguous(), factors.float().contiguous()
    kernels = library("losses")
    assert kernels is not None
    assert out.stride(1) == 1
    if rows:
        kernels.penstock_row_gradients(
            address(logits), address(out), TYPES[logits.dtype], address(targets), address(sums),
            address(factors), *sizes(rows, columns), c_int64(logits.stride(0)),
            c_int64(out.stride(0)), c_float(smoothing), c_float(z_loss), c_int64(IGNORED), threads_for(logits.numel()),
        )  # fmt: skip
    return out
