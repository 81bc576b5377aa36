"""Optimizers: how many launches a step takes, what is decayed, clipped and averaged. No host synchronisation."""

from __future__ import annotations

from penstock.optim.clip import clip_grad_norm_, clipped_step, grad_norm
from penstock.optim.contiguous import Contiguous, contiguous
from penstock.optim.ema import EMA
from penstock.optim.forms import make_optimizer
from penstock.optim.groups import parameter_groups
from penstock.optim.rate import learning_rate, set_learning_rate
from penstock.optim.remainder import RemainderAdamW

__all__ = [
    "EMA",
    "Contiguous",
    "RemainderAdamW",
    "clip_grad_norm_",
    "clipped_step",
    "contiguous",
    "grad_norm",
    "learning_rate",
    "make_optimizer",
    "parameter_groups",
    "set_learning_rate",
]
