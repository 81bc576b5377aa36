"""Watches a run's losses: skips steps, notices spikes, and goes back to a checkpoint because of one."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock.config.run import Recipe
from penstock.errors import NumericError
from penstock.optim.clip import can_refuse
from penstock.train.skips import SpikeDetector, StepSkipper

_log = logging.getLogger(__name__)

MAX_REWINDS = 3
"""How often a run goes back to a checkpoint because of its loss before it ends."""


class LossMonitor:
    """The device's view of the losses (`skipper`) and the host's, under the recipe's policy for spikes.

    There is no skipper where a step cannot be skipped without waiting for the device; then a loss that is not finite
    ends the run when it is logged. `average` is as for `StepSkipper`; `logs` says whether this rank is the one to log.
    """

    def __init__(
        self,
        recipe: Recipe,
        optimizer: Optimizer,
        device: torch.device,
        *,
        average: Callable[[Tensor], Tensor] | None = None,
        logs: bool = True,
    ) -> None:
        self.skipper = StepSkipper(device, average=average) if can_refuse(optimizer, device) else None
        self._policy = recipe.spikes
        self.observes_before_saving = recipe.spikes == "rewind"
        """Whether a checkpoint must not hold steps whose losses have not been observed."""
        self._detector = SpikeDetector(recipe.spike_deviations)
        self._logs = logs
        self._skipped = 0
        self._rewinds = 0
        self.rewind_because_of: list[int] = []
        """The steps last observed whose spikes send the run back."""

    def observe(self, step: int, losses: Sequence[float]) -> dict[str, Any]:
        """Observe the losses of the steps up to `step`; returns numbers to record. Waits for the device.

        Raises:
            NumericError: see `StepSkipper.require_finite`.
        """
        total = self.skipper.require_finite(step) if self.skipper else 0
        skipped, self._skipped = total - self._skipped, total
        spikes = [step - len(losses) + 1 + index for index in self._detector.observe(losses)]
        if self.skipper and self._policy == "skip" and math.isfinite(self._detector.limit):
            self.skipper.skip_above(self._detector.limit)
        if skipped and self._logs:
            _log.warning("%d of the steps up to %d were skipped.", skipped, step)
        if spikes and self._logs:
            _log.warning("The loss had spikes at steps %s.", ", ".join(map(str, spikes)))
        self.rewind_because_of = spikes if self._policy == "rewind" else []
        return ({"skipped": skipped} if skipped else {}) | ({"spikes": spikes} if spikes else {})

    def unsettled(self) -> bool:
        """Whether the latest steps were not finite, so that the weights may be bad. Waits for the device."""
        return self.skipper is not None and self.skipper.bad_in_a_row() > 0

    def count_rewind(self) -> int:
        """Go back once more. Returns how often the run has gone back; raises NumericError after `MAX_REWINDS` times."""
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
        """State that a resumed run needs to decide alike. The names are those that checkpoints have."""
        skipper = self.skipper.state_dict() if self.skipper else None
        return {"guard": skipper, "spikes": self._detector.state_dict(), "rewinds": self._rewinds}

    def load_state_dict(self, state: Mapping[str, Any], *, rewinding: bool = False) -> None:
        """Restore the state of `state_dict`; a run that goes back remembers how often it has."""
        if self.skipper and state["guard"]:
            self.skipper.load_state_dict(state["guard"])
            self._skipped = self.skipper.skipped()
        self._detector.load_state_dict(state["spikes"])
        if not rewinding:
            self._rewinds = state["rewinds"]
