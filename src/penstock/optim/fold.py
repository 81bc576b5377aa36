"""Dividing gradients and skipping a step inside an optimizer's own kernel, as torch's GradScaler asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.optim import Optimizer

from penstock.optim.kernel_bugs import begin_momentum, spoils_momentum


def folds(optimizer: Optimizer) -> bool:
    """Whether the optimizer's kernel divides gradients by `grad_scale` and skips the step on `found_inf` by itself."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and not spoils_momentum(optimizer)


@contextmanager
def folded(
    optimizer: Optimizer, *, grad_scale: Tensor | None = None, found_inf: Tensor | None = None
) -> Iterator[None]:
    """Inside, a step divides gradients by `grad_scale`, and is skipped where `found_inf` is 1; both 0-d fp32.

    These are the attributes by which torch's GradScaler and its fused optimizers agree; they are there for one step.
    """
    if found_inf is not None:
        begin_momentum(optimizer)
    given = {"grad_scale": grad_scale, "found_inf": found_inf}
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        setattr(optimizer, name, value)
    try:
        yield
    finally:
        for name in given:
            delattr(optimizer, name)
