"""What a run makes of the losses it sees: steps skipped, leaps noticed, and how often it may go back because of one."""

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
from penstock.train.guard import Guard, Spikes

_log = logging.getLogger(__name__)

MAX_REWINDS = 3
"""How often a run goes back to a checkpoint because of its loss before it ends."""


class Watch:
    """The guard of the steps and the host's view of the losses, under the recipe's policy.

    Without a guard, where a step cannot be skipped without waiting for the device, a loss that is not finite ends the
    run when it is logged. `average` is as for `Guard`; `told` says whether this rank is the one to log.
    """

    def __init__(
        self,
        recipe: Recipe,
        optimizer: Optimizer,
        device: torch.device,
        *,
        average: Callable[[Tensor], Tensor] | None = None,
        told: bool = True,
    ) -> None:
        self.guard = Guard(device, average=average) if can_refuse(optimizer, device) else None
        self._policy = recipe.spikes
        self._spikes = Spikes(recipe.spike_deviations)
        self._told = told
        self._skipped = 0
        self._rewinds = 0
        self.leaps: list[int] = []
        """The steps of the last window whose losses leapt up, where the run is to go back because of them."""

    def see(self, step: int, losses: Sequence[float]) -> dict[str, Any]:
        """Take in the losses of the steps up to `step`; what is worth recording of them. Waits for the device.

        Raises:
            NumericError: see `Guard.require_finite`.
        """
        total = self.guard.require_finite(step) if self.guard else 0
        skipped, self._skipped = total - self._skipped, total
        leaps = [step - len(losses) + 1 + place for place in self._spikes.see(losses)]
        if self.guard and self._policy == "skip" and math.isfinite(self._spikes.limit):
            self.guard.forbid_above(self._spikes.limit)
        if skipped and self._told:
            _log.warning("%d of the steps up to %d were skipped.", skipped, step)
        if leaps and self._told:
            _log.warning("The loss leapt up at steps %s.", ", ".join(map(str, leaps)))
        self.leaps = leaps if self._policy == "rewind" else []
        return ({"skipped": skipped} if skipped else {}) | ({"leaps": leaps} if leaps else {})

    @property
    def looks_before_saving(self) -> bool:
        """Whether a checkpoint must not be made of steps whose losses nobody has seen."""
        return self._policy == "rewind"

    def unsettled(self) -> bool:
        """Whether the latest steps were not finite, so that nobody knows yet whether the weights are any good. Waits
        for the device.
        """
        return self.guard is not None and self.guard.row() > 0

    def count_rewind(self) -> int:
        """Go back once more; returns how often that makes. Raises NumericError where it was enough already."""
        if self._rewinds == MAX_REWINDS:
            raise NumericError(
                f"The loss leapt up at step {self.leaps[0]} after the run had gone back to a checkpoint {MAX_REWINDS} "
                "times already. Lower recipe.lr or lengthen recipe.warmup_steps in a new run, or resume with "
                "--recipe.spikes log."
            )
        self._rewinds += 1
        self.leaps = []
        return self._rewinds

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to judge alike."""
        guard = self.guard.state_dict() if self.guard else None
        return {"guard": guard, "spikes": self._spikes.state_dict(), "rewinds": self._rewinds}

    def load_state_dict(self, state: Mapping[str, Any], *, rewinding: bool = False) -> None:
        """Restore what `state_dict` gave; a run that goes back remembers how often it has."""
        if self.guard and state["guard"]:
            self.guard.load_state_dict(state["guard"])
            self._skipped = self.guard.skipped()
        self._spikes.load_state_dict(state["spikes"])
        if not rewinding:
            self._rewinds = state["rewinds"]
