"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from penstock.config.run import Recipe
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from torch.optim import Optimizer


def learning_rate(step: int, recipe: Recipe, total_steps: int) -> float:
    """Rate of step `step` (from 0): a linear warm-up over `recipe.warmup_steps`, then half a cosine from
    `recipe.lr` down to `recipe.min_lr` (Loshchilov and Hutter, SGDR, ICLR 2017, equation 5, without restarts).

    The first step is not wasted on a rate of 0, and steps after `total_steps` keep `min_lr`. Raises
    ConfigError when the warm-up does not fit into the run.
    """
    warmup = recipe.warmup_steps
    if warmup >= total_steps and warmup:
        raise ConfigError(
            f"recipe.warmup_steps is {warmup}, but the run has {total_steps} steps in all, so the learning rate "
            f"would never come down; use fewer than {total_steps} warm-up steps, or train longer."
        )
    if step < warmup:
        return recipe.lr * (step + 1) / warmup
    progress = min((step - warmup) / max(total_steps - warmup, 1), 1.0)
    return recipe.min_lr + (recipe.lr - recipe.min_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Give every parameter group `lr` times its `lr_scale` (1 where it has none)."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
