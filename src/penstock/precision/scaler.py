"""Loss scaling for fp16 (Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2), decided on the
device.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from penstock.errors import CheckpointError, ConfigError


class LossScaler:
    """Multiplies the loss so that small gradients do not vanish in fp16, and follows overflows by itself.

    Dynamic: an overflow halves the scale, and the step is skipped by the optimizer's own kernel; `interval` clean
    steps in a row double it. It stays within `floor` and `ceiling`. Everything is 0-d tensors on the device, so no
    step waits for the host; `overflows` counts skipped steps and may be read when a log line is due.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        initial: float = 2.0**16,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
        floor: float = 1.0,
        ceiling: float = 2.0**24,
    ) -> None:
        problems = []
        if not 0.0 < floor <= initial <= ceiling:
            problems.append(
                f"The loss scale starts at {initial}, but must lie between its floor {floor} and ceiling {ceiling}, "
                f"all above 0."
            )
        if growth < 1.0 or not 0.0 < backoff <= 1.0:
            problems.append(
                f"The loss scale grows by {growth} and backs off by {backoff}; growth must be at least 1, back-off in "
                f"(0, 1]."
            )
        if interval < 1:
            problems.append(f"The loss scale grows every {interval} steps, but must wait at least 1.")
        if problems:
            raise ConfigError(problems)
        self.growth, self.backoff, self.interval = growth, backoff, interval
        self.floor, self.ceiling = floor, ceiling
        self.scale = torch.full((), initial, dtype=torch.float32, device=device)
        self.clean = torch.zeros((), dtype=torch.int32, device=device)
        """Steps without overflow since the scale last changed."""
        self.overflows = torch.zeros((), dtype=torch.float32, device=device)
        """Steps skipped so far."""

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss to call backward on: in fp32, since a scaled fp16 loss would itself overflow."""
        return loss.float() * self.scale

    @torch.no_grad()
    def update(self, found_inf: Tensor) -> None:
        """Adapt the scale after a step; `found_inf` is a 0-d fp32 tensor, 1 after an overflow and 0 otherwise."""
        torch._amp_update_scale_(self.scale, self.clean, found_inf, self.growth, self.backoff, self.interval)
        self.scale.clamp_(self.floor, self.ceiling)
        self.overflows.add_(found_inf)

    def state_dict(self) -> dict[str, Tensor]:
        """What a resumed run needs to go on exactly."""
        return {"scale": self.scale.clone(), "clean": self.clean.clone(), "overflows": self.overflows.clone()}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` gave. Raises CheckpointError when an entry is missing."""
        missing = sorted({"scale", "clean", "overflows"} - state_dict.keys())
        if missing:
            raise CheckpointError(
                f"The stored loss scaler lacks {', '.join(missing)}; it was not written by this version of Penstock."
            )
        for name in ("scale", "clean", "overflows"):
            getattr(self, name).copy_(state_dict[name])
