"""Optimizers: few kernel launches per step, weight decay, clipping and averaging, without waiting for the device."""

from __future__ import annotations

from penstock.optim.clip import clip_grad_norm_ as clip_grad_norm_
from penstock.optim.clip import clipped_step as clipped_step
from penstock.optim.clip import grad_norm as grad_norm
from penstock.optim.contiguous import Contiguous as Contiguous
from penstock.optim.contiguous import contiguous as contiguous
from penstock.optim.ema import EMA as EMA
from penstock.optim.forms import make_optimizer as make_optimizer
from penstock.optim.groups import learning_rate as learning_rate
from penstock.optim.groups import parameter_groups as parameter_groups
from penstock.optim.groups import set_learning_rate as set_learning_rate
