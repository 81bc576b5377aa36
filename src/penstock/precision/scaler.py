"""Loss scaling for fp16 (Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2), decided on the
device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import CheckpointError, ConfigError
from penstock.optim.clip import overflow_of

Agree = Callable[[Tensor], None]
"""Makes ranks decide alike: replaces a 0-d fp32 flag, in place on every rank, by the largest of the ranks' flags."""

PATIENCE = 4
"""Consecutive overflows at the floor after which a run is considered lost."""
# Attributes that are saved, each with its name in files.
_ENTRIES = {"scale": "scale", "clean": "clean", "overflows": "overflows", "spared": "spared", "stuck": "lost"}


def agree_over(group: dist.ProcessGroup | None = None) -> Agree:
    """A function that takes the maximum over the ranks of a process group; None is the default group at each call."""

    def agree(found_inf: Tensor) -> None:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
            dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=group)

    return agree


class LossScaler:
    """Multiplies the loss so that small gradients do not vanish in fp16, and adapts the factor to overflows.

    Dynamic: `hysteresis` overflows in a row halve the scale, each overflowed step being skipped by the optimizer's own
    kernel; `interval` clean steps in a row double it. It stays within `floor` and `ceiling`. With `dynamic` false the
    scale is constant, and overflowed steps are still skipped. Everything is 0-d tensors on the device, so no step waits
    for the host; `overflows` counts skipped steps and is meant to be read only for a log line.

    `agree` makes ranks that share a step decide alike: sharded and model parallel training pass their own function.
    """

    def __init__(
        self, device: torch.device | str = "cpu", *, initial: float = 2.0**16, growth: float = 2.0,
        backoff: float = 0.5, interval: int = 2000, floor: float = 1.0, ceiling: float = 2.0**24,
        hysteresis: int = 1, dynamic: bool = True, agree: Agree | None = None,
    ) -> None:  # fmt: skip
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
        if hysteresis < 1:
            problems.append(
                f"The loss scale falls after {hysteresis} overflows, but must wait for at least 1."
            )
        if problems:
            raise ConfigError(problems)
        self.growth, self.backoff, self.interval = growth, backoff, interval
        self.floor, self.ceiling = floor, ceiling
        self.hysteresis, self.dynamic = hysteresis, dynamic
        self.agree = agree
        self.scale = torch.full((), initial, dtype=torch.float32, device=device)
        self.clean = torch.zeros((), dtype=torch.int32, device=device)
        """Steps without overflow since the scale last changed."""
        self.overflows = torch.zeros((), dtype=torch.float32, device=device)
        """Steps skipped so far."""
        self.spared = torch.zeros((), dtype=torch.float32, device=device)
        """Consecutive overflows that hysteresis has tolerated."""
        self.stuck = torch.zeros((), dtype=torch.float32, device=device)
        """Consecutive overflows at the floor, or at a constant scale: from `PATIENCE` on the run is considered lost."""

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss to call backward on: in fp32, since a scaled fp16 loss would itself overflow."""
        return loss.float() * self.scale

    def judge(self, norm: Tensor) -> Tensor:
        """Whether gradients of this norm overflowed, on any rank: 0-d fp32, 1 or 0."""
        found_inf = overflow_of(norm)
        if self.agree is not None:
            self.agree(found_inf)
        return found_inf

    @torch.no_grad()
    def update(self, found_inf: Tensor, *, stepped: bool = True) -> None:
        """Adapt the scale after a step; `found_inf` is a 0-d fp32 tensor, 1 after an overflow and 0 otherwise.

        Without `stepped` the gradients were discarded: then an overflow counts, but not a clean step.
        """
        if not stepped:
            self.clean.sub_((1.0 - found_inf).to(self.clean.dtype))
        self.overflows.add_(found_inf)
        at_floor = (self.scale <= self.floor).float() if self.dynamic else 1.0
        self.stuck.add_(found_inf * at_floor).mul_(found_inf)
        if not self.dynamic:
            return
        falls = found_inf
        if self.hysteresis > 1:
            self.spared.add_(found_inf).mul_(found_inf)
            falls = found_inf * (self.spared >= self.hysteresis)
            self.spared.mul_(1.0 - falls)
        # An overflow that hysteresis tolerates also resets the count of clean steps.
        self.clean.add_(1).mul_(found_inf == 0)
        grows = self.clean >= self.interval
        self.clean.masked_fill_(grows, 0)
        factor = torch.where(falls > 0, self.backoff, torch.where(grows, self.growth, 1.0))
        self.scale.mul_(factor).clamp_(self.floor, self.ceiling)

    def state_dict(self) -> dict[str, Tensor]:
        """The state that a resumed run needs to continue exactly."""
        return {name: getattr(self, attribute).clone() for attribute, name in _ENTRIES.items()}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Restore the result of `state_dict`; a constant scale does not change. Raises CheckpointError when an entry is
        missing."""
        missing = sorted(set(_ENTRIES.values()) - state_dict.keys())
        if missing:
            raise CheckpointError(
                f"The stored loss scaler lacks {', '.join(missing)}; it was not written by this version of Penstock."
            )
        for attribute, name in _ENTRIES.items():
            if name == "scale" and not self.dynamic:
                continue
            getattr(self, attribute).copy_(state_dict[name])
