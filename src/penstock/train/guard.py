"""Steps that must not be taken: a loss or gradient that is not finite, and, if wished, a loss that leaps up.

What is not finite is decided on the device from one number that all ranks share: all skip the same steps, and no step
waits for the host. After `PATIENCE` such steps in a row nothing is learned any more: every later step is skipped too,
and the weights are still what they were when the host comes to look. What counts as a leap the host works out of the
losses it has logged, and hands the device one limit.

Policies for leaps follow Chowdhery et al., "PaLM", JMLR 2023, section 5.1, where training goes back to before a spike
and leaves out the batches around it.
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

PATIENCE = 3
"""Steps in a row that are not finite, after which a run is lost."""
HISTORY = 50
"""Losses that must be known before a leap can be told from noise."""
_LEAST = 1e-3
"""Of the mean: what is below is no leap however quiet the losses were."""


class Guard:
    """Judges each step before it is taken. `limit` is the loss above which it is skipped; infinite at first.

    `average` makes of a rank's number, in place, the mean over all ranks: not a number where one of theirs is not.
    """

    def __init__(
        self, device: torch.device | str, *, average: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self._average = average
        self._row = torch.zeros((), dtype=torch.float32, device=device)
        self._skipped = torch.zeros((), dtype=torch.float32, device=device)
        self._limit: Tensor | None = None

    @torch.no_grad()
    def judge(self, loss: Tensor, norm: Tensor | None) -> Tensor:
        """1 where the step with this mean loss and gradient norm is to be skipped, else 0: 0-d fp32, on the device.

        `norm` is None where something else already skips gradients that are not finite, as a loss scale does.
        """
        value = loss.detach().to(self._row.device, torch.float32)
        if norm is not None:
            # Not a number where the norm is not finite.
            value = torch.add(value, norm.to(value.device, torch.float32) * 0.0)
        if self._average is not None:
            value = self._average(value.clone() if norm is None else value)
        bad = (~value.isfinite()).float()
        self._row.add_(bad)
        stops = torch.maximum(bad, (self._row >= PATIENCE).float())
        self._row.mul_(stops)
        if self._limit is not None:
            stops = torch.maximum(stops, (value > self._limit).float())
        self._skipped.add_(stops)
        return stops

    def forbid_above(self, limit: float) -> None:
        """From now on skip steps with a greater loss. Waits for nothing."""
        if self._limit is None:
            self._limit = torch.zeros_like(self._row)
        self._limit.fill_(limit)

    def require_finite(self, step: int) -> int:
        """Steps skipped so far, at `step`. Waits for the device.

        Raises:
            NumericError: `PATIENCE` steps in a row were not finite, and all since have been skipped.
        """
        row, skipped = torch.stack([self._row, self._skipped]).tolist()
        if row >= PATIENCE:
            raise NumericError(
                f"By step {step}, {PATIENCE} steps in a row had a loss or gradients that are not finite; they and all "
                "since were skipped, so the weights are those of before. Start a new run from the newest checkpoint's "
                "weights by init_from, with a lower recipe.lr or a longer recipe.warmup_steps, or compute in a wider "
                "type (plan dtype=bf16, or precision=O0)."
            )
        return int(skipped)

    def row(self) -> int:
        """The latest steps in a row that were not finite. Waits for the device."""
        return int(self._row.item())

    def skipped(self) -> int:
        """Steps skipped so far. Waits for the device."""
        return int(self._skipped.item())

    def state_dict(self) -> dict[str, Tensor]:
        """What a resumed run needs to judge alike."""
        limit = torch.full_like(self._row, math.inf) if self._limit is None else self._limit
        return {"row": self._row.clone(), "skipped": self._skipped.clone(), "limit": limit.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` gave."""
        self._row.copy_(state["row"])
        self._skipped.copy_(state["skipped"])
        if state["limit"].isfinite():
            self.forbid_above(float(state["limit"]))


class Spikes:
    """Tells leaps of the loss from noise: more than `deviations` standard deviations above the mean of the last 50."""

    def __init__(self, deviations: float) -> None:
        self._deviations = deviations
        self._losses: deque[float] = deque(maxlen=HISTORY)

    @property
    def limit(self) -> float:
        """The loss above which the next ones are leaps; infinite before enough is known."""
        if len(self._losses) < HISTORY:
            return math.inf
        mean = statistics.fmean(self._losses)
        return mean + max(self._deviations * statistics.pstdev(self._losses), _LEAST * abs(mean))

    def see(self, losses: Sequence[float]) -> list[int]:
        """Which of the next losses leap, by their place. Those that are not finite are somebody else's concern."""
        limit = self.limit
        found = [place for place, loss in enumerate(losses) if math.isfinite(loss) and loss > limit]
        # A leap counts as no more than the limit: it must not widen what is normal at once, but a loss that stays
        # high must in the end become normal.
        self._losses.extend(min(loss, limit) for loss in losses if math.isfinite(loss))
        return found

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to judge alike."""
        return {"losses": list(self._losses)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self._losses = deque(state["losses"], maxlen=HISTORY)
