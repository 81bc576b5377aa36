"""The loss of rows of logits, which its gradient overwrites: the part of the loss between its matrix products.

Shapes: R rows, V entries of the vocabulary. For logits z of a row, its target t, p = softmax(z), L = log Σ_v exp z_v,
smoothing ε (Szegedy et al., CVPR 2016, section 7) and a z-loss ζ (Chowdhery et al., "PaLM", 2022, section 5)

    loss      L − (1 − ε) z_t − (ε / V) Σ_v z_v + ζ L²
    gradient  p (1 + 2 ζ L) − (1 − ε) onehot(t) − ε / V

With a teacher's logits u at a temperature T (see `penstock.kernels.distil`), q = softmax(u / T) and p' = softmax(z /
T), loss and gradient are 1 − w times the above plus w times

    loss      T² Σ_v q_v (log q_v − log p'_v)
    gradient  T (p' − q)

A row whose target is −100 is ignored: its loss and its gradient are 0.

On a CPU, two passes in C++ do this without a teacher (native/losses.cpp). On a GPU with Triton one kernel does it
(kernels/triton/logit_rows.py). With e bytes per element it reads 2·e·R·V bytes, half of them from cache if each
multiprocessor has e·V bytes of it, twice that with a teacher, and writes e·R·V; per logit it computes two exponentials,
six with a teacher, and about 12 or 30 more FLOPs. Separate operators read and write e·R·V about 9 times, in fp32. The
reference below serves other devices and fp64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.dtypes import format_of, sums_type
from penstock.errors import ConfigError
from penstock.kernels import choices
from penstock.kernels.distil import divergences_and_gradients
from penstock.kernels.has_triton import runs_triton
from penstock.kernels.native_losses import IGNORED, has_rows, native_gradients_, native_losses


def logit_rows_(
    logits: Tensor, targets: Tensor, *, taught: Tensor | None = None, row_weights: Tensor | None = None,
    smoothing: float = 0.0, z_loss: float = 0.0, share: float = 0.0, temperature: float = 1.0,
    scale: float = 1.0, gradient: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The loss of each row and its log Σ exp, both (R,), 0 where the target is −100, in fp32 (fp64 for fp64 logits).

    logits: (R, V), with contiguous rows; with `gradient` they become the gradient of Σ_rows scale · row_weights · loss.
    targets: (R,) int64; taught: (R, V), the only case in which `share` and `temperature` matter; row_weights: (R,).
    torch cannot differentiate through it. Raises ConfigError for shapes or strides that do not fit.
    """
    rows = logits.shape[:1]
    fits = logits.ndim == 2 and logits.shape[1] > 0 and targets.shape == rows
    fits = fits and (taught is None or taught.shape == logits.shape)
    fits = fits and (row_weights is None or row_weights.shape == rows)
    if not fits or logits.stride(1) != 1:
        raise ConfigError(
            f"logit_rows_ needs logits (R, V) with contiguous rows, and a target for each row, but has shape "
            f"{tuple(logits.shape)}, strides {logits.stride()} and {tuple(targets.shape)} targets; flatten them."
        )
    terms = smoothing, z_loss, share, temperature, scale, gradient
    results: tuple[Tensor, Tensor] = _rows(logits, targets, taught, row_weights, *terms)
    return results


def row_losses(logs: Tensor, index: Tensor, smoothing: float) -> Tensor:
    """The loss of each row (R,), from log-probabilities (R, V) and targets (R, 1)."""
    losses = logs.gather(1, index).squeeze(1) * (smoothing - 1.0)
    return losses - logs.sum(1) * (smoothing / logs.shape[1]) if smoothing else losses


def take_target_(p: Tensor, index: Tensor, smoothing: float) -> None:
    """Turn probabilities (R, V) into the gradient of the losses, in place."""
    if smoothing:
        p.sub_(smoothing / p.shape[1])
    p.scatter_add_(1, index, p.new_full((1, 1), smoothing - 1.0).expand(len(p), 1))


def fuses_rows(device: torch.device, dtype: torch.dtype, *, taught: bool = False) -> bool:
    """Whether a kernel for logits of this dtype exists on the device and can run: see
    `penstock.kernels.choices.fuses_rows`."""
    triton = runs_triton(device)
    able = choices.fuses_rows("cuda" if triton else device.type, format_of(dtype), taught=taught)
    return able and (triton or has_rows(device, dtype))


@torch.library.custom_op("penstock::logit_rows_", mutates_args=("logits",))
def _rows(
    logits: Tensor, targets: Tensor, taught: Tensor | None, row_weights: Tensor | None, smoothing: float,
    z_loss: float, share: float, temperature: float, scale: float, gradient: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if not fuses_rows(logits.device, logits.dtype, taught=taught is not None):
        return _plain(
            logits, targets, taught, row_weights, smoothing, z_loss, share, temperature, scale, gradient
        )
    if not runs_triton(logits.device):
        losses, sums = native_losses(logits, targets, smoothing, z_loss)
        counted = targets != IGNORED
        if gradient:
            factors = counted * scale if row_weights is None else counted * scale * row_weights
            native_gradients_(logits, logits, targets, sums, factors, smoothing, z_loss)
        return losses, sums.where(counted, 0.0).float()
    losses, sums = (logits.new_empty(len(logits), dtype=torch.float32) for _ in range(2))
    if len(logits):
        from penstock.kernels.triton.logit_rows import launch

        taught = taught if taught is None or taught.stride(1) == 1 else taught.contiguous()
        weights = None if row_weights is None else row_weights.contiguous()
        launch(
            logits, targets.contiguous(), taught, weights, smoothing, z_loss, share, temperature, scale, gradient,
            losses, sums,
        )  # fmt: skip
    return losses, sums


def _row_shapes(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    losses: Tensor = logits.new_empty(logits.shape[0], dtype=sums_type(logits.dtype))
    return losses, torch.empty_like(losses)


_rows.register_fake(_row_shapes)


def _plain(
    logits: Tensor, targets: Tensor, taught: Tensor | None, row_weights: Tensor | None, smoothing: float,
    z_loss: float, share: float, temperature: float, scale: float, gradient: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dtype = sums_type(logits.dtype)
    counted = targets != IGNORED
    index = targets.where(counted, 0)[:, None]
    p = torch.log_softmax(logits, dim=-1, dtype=dtype)
    sums = logits.amax(1) - p.amax(1)
    losses = row_losses(p, index, smoothing) + z_loss * sums.square()
    if taught is not None:
        divergence, pull = divergences_and_gradients(logits, taught, temperature, dtype)
        losses = (1.0 - share) * losses + share * divergence
    if gradient:
        p.exp_().mul_(1.0 + 2.0 * z_loss * sums[:, None])
        take_target_(p, index, smoothing)
        if taught is not None:
            p.mul_(1.0 - share).add_(pull, alpha=share)
        factor = counted * scale if row_weights is None else counted * scale * row_weights
        # Ignored rows become zeros, whatever their logits are.
        logits.copy_(p.mul_(factor[:, None]).masked_fill_(~counted[:, None], 0.0))
    return losses.where(counted, 0.0), sums.where(counted, 0.0)
