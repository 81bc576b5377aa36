"""Watches a run's losses: gathers them on the device, skips steps whose loss or gradients are not finite (with
`spikes=skip` also steps whose loss jumps far above the losses before it), and goes back to a checkpoint because of a
spike.

Whether numbers are finite is decided on the device, from one number that all ranks share: all skip the same steps, and
no step waits for the host. After `PATIENCE` such steps in a row every later step is skipped too, so the weights are
still good when the host checks. The host computes from the logged losses which losses count as spikes, and sends the
device one limit.

The policies for spikes follow Chowdhery et al., "PaLM", JMLR 2023, section 5.1, where training goes back to before a
spike and leaves out the batches around it.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock.config.run import Recipe
from penstock.errors import NumericError
from penstock.optim.clip import can_refuse
from penstock.parallel import ALONE, ParallelDims
from penstock.parallel.agree import average

_log = logging.getLogger(__name__)
REMEDY = (
    "Earlier checkpoints are finite. Start a new run, if you like from a checkpoint's weights.safetensors (init_from), "
    "with a lower recipe.lr, a longer recipe.warmup_steps or a smaller recipe.clip_norm, or compute in a wider type "
    "(plan dtype=bf16, or precision=O0)."
)


class PendingSteps:
    """Losses and gradient norms of up to `length` steps, on `device`. All ranks of `dims` must read at the same steps,
    and get averages over them.
    """

    def __init__(self, length: int, device: torch.device, dims: ParallelDims = ALONE) -> None:
        self._dims = dims
        self._values = torch.zeros(2, length, device=device)  # losses, gradient norms
        self._has_norm = False
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, loss: Tensor, grad_norm: Tensor | None) -> None:
        """Store a step's 0-d results. Does not wait for the device."""
        self._values[0, self._count].copy_(loss, non_blocking=True)
        self._has_norm = grad_norm is not None
        if grad_norm is not None:
            self._values[1, self._count].copy_(grad_norm, non_blocking=True)
        self._count += 1

    def read(self, step: int, *, skipping: bool = False) -> tuple[list[float], float | None]:
        """Return the losses of the steps up to `step`, and the last step's gradient norm before clipping if it was
        computed; then forget them. Waits for the device. Raises NumericError with the first step whose loss is not
        finite, unless the run is `skipping` such steps."""
        losses, norms = average(self._values[:, : self._count].clone(), self._dims).tolist()
        first = step - self._count + 1
        self._count = 0
        for number, loss in enumerate(losses, first):
            if not skipping and not math.isfinite(loss):
                raise NumericError(
                    f"The loss became {loss} at step {number} (found on checking steps {first} to {step}). {REMEDY}"
                )
        return losses, norms[-1] if self._has_norm and norms else None


MAX_REWINDS = 3
"""Number of times that a run may go back to a checkpoint because of its loss; after that it ends."""


class LossMonitor:
    """Watches the losses on the device (`skipper`) and on the host, under the recipe's policy for spikes.

    There is no skipper if steps cannot be skipped without waiting for the device; then a loss that is not finite ends
    the run when it is logged. All ranks of `dims` create one and make the same calls.
    """

    def __init__(
        self, recipe: Recipe, optimizer: Optimizer, device: torch.device, dims: ParallelDims
    ) -> None:
        mean = None if dims.alone else partial(average, dims=dims)
        self.skipper = StepSkipper(device, average=mean) if can_refuse(optimizer, device) else None
        self.policy = recipe.spikes
        """The policy for spikes. With `rewind` a checkpoint may only contain steps whose losses have been observed."""
        self._detector = SpikeDetector(recipe.spike_deviations)
        self._logs = dims.main
        self._skipped = self._rewinds = 0
        self.rewind_because_of: list[int] = []
        """Steps of the last observation whose spikes make the run go back to a checkpoint."""

    def observe(self, step: int, losses: Sequence[float]) -> dict[str, Any]:
        """Observe the losses of the steps up to `step`; returns numbers to record. Waits for the device, and raises as
        `StepSkipper.require_finite`."""
        total = self.skipper.require_finite(step) if self.skipper else 0
        skipped, self._skipped = total - self._skipped, total
        spikes = [step - len(losses) + 1 + index for index in self._detector.observe(losses)]
        if self.skipper and self.policy == "skip" and math.isfinite(self._detector.limit):
            self.skipper.skip_above(self._detector.limit)
        if skipped and self._logs:
            _log.warning("%d of the steps up to %d were skipped.", skipped, step)
        if spikes and self._logs:
            _log.warning("The loss had spikes at steps %s.", ", ".join(map(str, spikes)))
        self.rewind_because_of = spikes if self.policy == "rewind" else []
        return ({"skipped": skipped} if skipped else {}) | ({"spikes": spikes} if spikes else {})

    def unsettled(self) -> bool:
        """Whether the latest steps were not finite, so that the weights may be bad. Waits for the device."""
        return self.skipper is not None and self.skipper.bad_in_a_row.item() > 0

    def count_rewind(self) -> int:
        """Count another return to a checkpoint; returns the number so far. Raises NumericError after `MAX_REWINDS`."""
        if self._rewinds == MAX_REWINDS:
            raise NumericError(
                f"The loss had a spike at step {self.rewind_because_of[0]} after the run had gone back to a checkpoint "
                f"{MAX_REWINDS} times already. Lower recipe.lr or lengthen recipe.warmup_steps in a new run, or resume "
                "with --recipe.spikes log."
            )
        self._rewinds += 1
        self.rewind_because_of = []
        return self._rewinds

    def state_dict(self) -> dict[str, Any]:
        """State that a resumed run needs for the same decisions, by its names in checkpoints."""
        skipper = self.skipper.state_dict() if self.skipper else None
        return {"guard": skipper, "spikes": {"losses": [*self._detector.losses]}, "rewinds": self._rewinds}

    def load_state_dict(self, state: Mapping[str, Any], *, rewinding: bool = False) -> None:
        """Restore the state of `state_dict`; when `rewinding`, the number of returns is kept."""
        if self.skipper and state["guard"]:
            self.skipper.load_state_dict(state["guard"])
            self._skipped = int(state["guard"]["skipped"])
        self._detector.losses = deque(state["spikes"]["losses"], maxlen=HISTORY)
        if not rewinding:
            self._rewinds = state["rewinds"]


PATIENCE = 3
"""Number of successive steps that are not finite, after which no further step is taken."""
HISTORY = 50
"""Number of losses needed before spikes can be distinguished from noise."""
_LEAST = 1e-3
"""Share of the mean loss: a smaller rise is not a spike, however quiet the losses were."""


class StepSkipper:
    """Decides before each update whether to skip it: if loss or gradients are not finite, or the loss is above a limit,
    which is infinite at first.

    `average` replaces a rank's number, in place, by the mean over all ranks, which is NaN if any rank's is.
    """

    def __init__(
        self, device: torch.device | str, *, average: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self._average = average
        self.bad_in_a_row = torch.zeros((), dtype=torch.float32, device=device)
        """Number of latest steps in a row that were not finite."""
        self._skipped = torch.zeros((), dtype=torch.float32, device=device)
        self._limit: Tensor | None = None

    @torch.no_grad()
    def __call__(self, loss: Tensor, norm: Tensor | None) -> Tensor:
        """Return 1 if the step with this mean loss and gradient norm must be skipped, else 0: 0-d fp32, on the device.

        `norm` is None if gradients that are not finite are already skipped by other means, such as a loss scale.
        """
        value = loss.detach().to(self.bad_in_a_row.device, torch.float32)
        if norm is not None:
            # NaN if the norm is not finite
            value = torch.add(value, norm.to(value.device, torch.float32) * 0.0)
        if self._average is not None:
            value = self._average(value.clone() if norm is None else value)
        bad = (~value.isfinite()).float()
        self.bad_in_a_row.add_(bad)
        skip = torch.maximum(bad, (self.bad_in_a_row >= PATIENCE).float())
        self.bad_in_a_row.mul_(skip)
        if self._limit is not None:
            skip = torch.maximum(skip, (value > self._limit).float())
        self._skipped.add_(skip)
        return skip

    def skip_above(self, limit: float) -> None:
        """From now on skip steps with a loss above `limit`. Does not wait for the device."""
        if self._limit is None:
            self._limit = torch.zeros_like(self.bad_in_a_row)
        self._limit.fill_(limit)

    def require_finite(self, step: int) -> int:
        """Number of steps skipped up to `step`. Waits for the device. Raises NumericError if `PATIENCE` steps in a row
        were not finite, after which all have been skipped."""
        in_a_row, skipped = torch.stack([self.bad_in_a_row, self._skipped]).tolist()
        if in_a_row >= PATIENCE:
            raise NumericError(
                f"By step {step}, {PATIENCE} steps in a row had a loss or gradients that are not finite. These and all "
                f"later steps were skipped, so the weights have not changed since. {REMEDY}"
            )
        return int(skipped)

    def state_dict(self) -> dict[str, Tensor]:
        """State that a resumed run needs for the same decisions, by its names in checkpoints."""
        limit = torch.full_like(self.bad_in_a_row, math.inf) if self._limit is None else self._limit
        return {"row": self.bad_in_a_row.clone(), "skipped": self._skipped.clone(), "limit": limit.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the state of `state_dict`."""
        self.bad_in_a_row.copy_(state["row"])
        self._skipped.copy_(state["skipped"])
        if state["limit"].isfinite():
            self.skip_above(float(state["limit"]))


class SpikeDetector:
    """Distinguishes loss spikes from noise: they are `deviations` standard deviations above the mean of the last 50."""

    def __init__(self, deviations: float) -> None:
        self._deviations = deviations
        self.losses: deque[float] = deque(maxlen=HISTORY)
        """The latest losses: all state that a resumed run needs for the same decisions."""

    @property
    def limit(self) -> float:
        """Losses above this are spikes; infinite until enough losses are known."""
        if len(self.losses) < HISTORY:
            return math.inf
        mean = statistics.fmean(self.losses)
        return mean + max(self._deviations * statistics.pstdev(self.losses), _LEAST * abs(mean))

    def observe(self, losses: Sequence[float]) -> list[int]:
        """Indices of the spikes among the next losses. Losses that are not finite are left to the skipper."""
        limit = self.limit
        spikes = [index for index, loss in enumerate(losses) if math.isfinite(loss) and loss > limit]
        # A spike counts at most as the limit: it must not raise the normal range at once, but a loss that stays high
        # must become normal in the end.
        self.losses.extend(min(loss, limit) for loss in losses if math.isfinite(loss))
        return spikes
