"""Stochastic depth: a residual branch is left out for some samples (Huang et al., ECCV 2016, eq. 2)."""

from __future__ import annotations

import torch
from torch import Tensor


def drop_path(branch: Tensor, rate: Tensor, *, batch_dim: int) -> Tensor:
    """Zero the branch of each sample with probability `rate`, and scale those kept by 1 / (1 − rate).

    branch: (B, N, D), or (N, B, D) with `batch_dim` 1. `rate` is a tensor, not a number, so that blocks of
    different rates share one compiled graph and nothing waits for the device.
    """
    shape = [1] * branch.dim()
    shape[batch_dim] = branch.shape[batch_dim]
    keep = 1.0 - rate
    mask = (torch.rand(shape[batch_dim], device=branch.device) < keep).to(torch.float32) / keep
    return branch * mask.to(branch.dtype).view(shape)
