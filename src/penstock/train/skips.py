"""Steps that must not be taken: those whose loss or gradients are not finite, and with `spikes=skip` those whose loss
jumps far above the losses before it (a spike).

Whether numbers are finite is decided on the device, from one number that all ranks share: all skip the same steps, and
no step waits for the host. After `PATIENCE` such steps in a row every later step is skipped too, so the weights are
still good when the host checks. The host computes from the logged losses what counts as a spike, and sends the device
one limit.

The policies for spikes follow Chowdhery et al., "PaLM", JMLR 2023, section 5.1, where training goes back to before a
spike and leaves out the batches around it.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import NumericError
from penstock.train.pending import REMEDY

PATIENCE = 3
"""Steps in a row that are not finite, after which no step is taken any more."""
HISTORY = 50
"""Losses that must be known before a spike can be distinguished from noise."""
_LEAST = 1e-3
"""Share of the mean: a smaller rise is not a spike, however quiet the losses were."""


class StepSkipper:
    """Decides before each step whether it is skipped. A loss above the limit is; the limit is infinite at first.

    `average` replaces a rank's number, in place, by the mean over all ranks, which is not a number where one of theirs
    is not.
    """

    def __init__(
        self, device: torch.device | str, *, average: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self._average = average
        self._bad_in_a_row = torch.zeros((), dtype=torch.float32, device=device)
        self._skipped = torch.zeros((), dtype=torch.float32, device=device)
        self._limit: Tensor | None = None

    @torch.no_grad()
    def __call__(self, loss: Tensor, norm: Tensor | None) -> Tensor:
        """1 where the step with this mean loss and gradient norm is to be skipped, else 0: 0-d fp32, on the device.

        `norm` is None where something else already skips gradients that are not finite, as a loss scale does.
        """
        value = loss.detach().to(self._bad_in_a_row.device, torch.float32)
        if norm is not None:
            # Not a number where the norm is not finite.
            value = torch.add(value, norm.to(value.device, torch.float32) * 0.0)
        if self._average is not None:
            value = self._average(value.clone() if norm is None else value)
        bad = (~value.isfinite()).float()
        self._bad_in_a_row.add_(bad)
        skip = torch.maximum(bad, (self._bad_in_a_row >= PATIENCE).float())
        self._bad_in_a_row.mul_(skip)
        if self._limit is not None:
            skip = torch.maximum(skip, (value > self._limit).float())
        self._skipped.add_(skip)
        return skip

    def skip_above(self, limit: float) -> None:
        """Skip steps with a greater loss from now on. Waits for nothing."""
        if self._limit is None:
            self._limit = torch.zeros_like(self._bad_in_a_row)
        self._limit.fill_(limit)

    def require_finite(self, step: int) -> int:
        """Steps skipped so far, at `step`. Waits for the device.

        Raises:
            NumericError: `PATIENCE` steps in a row were not finite, and all since have been skipped.
        """
        in_a_row, skipped = torch.stack([self._bad_in_a_row, self._skipped]).tolist()
        if in_a_row >= PATIENCE:
            raise NumericError(
                f"By step {step}, {PATIENCE} steps in a row had a loss or gradients that are not finite; they and all "
                f"since were skipped, so the weights are those of before. {REMEDY}"
            )
        return int(skipped)

    def bad_in_a_row(self) -> int:
        """How many of the latest steps, without a gap, were not finite. Waits for the device."""
        return int(self._bad_in_a_row.item())

    def skipped(self) -> int:
        """Steps skipped so far. Waits for the device."""
        return int(self._skipped.item())

    def state_dict(self) -> dict[str, Tensor]:
        """State that a resumed run needs to decide alike. The names are those that checkpoints have."""
        limit = torch.full_like(self._bad_in_a_row, math.inf) if self._limit is None else self._limit
        return {"row": self._bad_in_a_row.clone(), "skipped": self._skipped.clone(), "limit": limit.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the state of `state_dict`."""
        self._bad_in_a_row.copy_(state["row"])
        self._skipped.copy_(state["skipped"])
        if state["limit"].isfinite():
            self.skip_above(float(state["limit"]))


class SpikeDetector:
    """Tells spikes of the loss from noise: more than `deviations` standard deviations above the mean of the last 50."""

    def __init__(self, deviations: float) -> None:
        self._deviations = deviations
        self._losses: deque[float] = deque(maxlen=HISTORY)

    @property
    def limit(self) -> float:
        """The loss above which the next ones are spikes; infinite before enough is known."""
        if len(self._losses) < HISTORY:
            return math.inf
        mean = statistics.fmean(self._losses)
        return mean + max(self._deviations * statistics.pstdev(self._losses), _LEAST * abs(mean))

    def observe(self, losses: Sequence[float]) -> list[int]:
        """Indices of the next losses that are spikes. Those that are not finite are the skipper's concern."""
        limit = self.limit
        spikes = [index for index, loss in enumerate(losses) if math.isfinite(loss) and loss > limit]
        # A spike counts as no more than the limit: it must not widen what is normal at once, but a loss that stays
        # high must in the end become normal.
        self._losses.extend(min(loss, limit) for loss in losses if math.isfinite(loss))
        return spikes

    def state_dict(self) -> dict[str, Any]:
        """State that a resumed run needs to decide alike."""
        return {"losses": list(self._losses)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict`."""
        self._losses = deque(state["losses"], maxlen=HISTORY)
