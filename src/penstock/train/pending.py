"""The numbers of the steps since the last log, kept on the device and fetched in one transfer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import NumericError

REMEDY = (
    "Checkpoints before it are finite. Start a new run, from one's weights.safetensors by init_from if you like, "
    "with a lower recipe.lr, a longer recipe.warmup_steps or a smaller recipe.clip_norm, or compute in a wider type "
    "(plan dtype=bf16, or precision=O0)."
)


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """One loss per step, and the gradient norm before clipping of the last one, if it was taken."""

    losses: list[float]
    grad_norm: float | None


class PendingSteps:
    """Room for the losses and gradient norms of `length` steps on `device`. With several ranks `average` makes their
    mean of what a rank has seen; then all must read at the same steps.
    """

    def __init__(
        self, length: int, device: torch.device, average: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self._average = average
        self._values = torch.zeros(2, length, device=device)  # losses, gradient norms
        self._has_norm = False
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, loss: Tensor, grad_norm: Tensor | None) -> None:
        """Note a step's 0-d results. Waits for nothing."""
        self._values[0, self._count].copy_(loss, non_blocking=True)
        self._has_norm = grad_norm is not None
        if grad_norm is not None:
            self._values[1, self._count].copy_(grad_norm, non_blocking=True)
        self._count += 1

    def read(self, step: int, *, skipping: bool = False) -> StepNumbers:
        """Fetch and forget the numbers of the steps up to `step`. Waits for the device.

        With `skipping`, steps whose loss is not finite were not taken, and are no reason to end.

        Raises:
            NumericError: a loss is not finite; names the first such step.
        """
        values = self._values[:, : self._count].contiguous()
        losses, norms = (self._average(values) if self._average else values).tolist()
        first = step - self._count + 1
        self._count = 0
        for offset, loss in enumerate(losses):
            if not skipping and not math.isfinite(loss):
                raise NumericError(
                    f"The loss became {loss} at step {first + offset} "
                    f"(found on checking steps {first} to {step}). {REMEDY}"
                )
        return StepNumbers(losses, norms[-1] if self._has_norm and norms else None)
