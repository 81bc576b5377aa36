"""The modules that are alive in this process, and which of them own given parameters."""

from __future__ import annotations

import gc
from collections.abc import Iterable

from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.precision.forward import unwrapped


def trained_by(optimizer: Optimizer) -> list[Tensor]:
    """All parameters of an optimizer's groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def roots_owning(wanted: set[int], beside: Iterable[nn.Module] = ()) -> list[nn.Module]:
    """The largest living modules that own a parameter whose `id` is in `wanted`, and contain none of `beside`.

    Looks at every object of the process: some tens of milliseconds, once per optimizer that needs it.
    """
    if not wanted:
        return []
    apart = list(beside)
    inside = {id(m) for root in apart for m in root.modules()}
    roots = {id(root) for root in apart}
    # By type: isinstance would ask objects that pretend to be of other classes, and wake lazy ones.
    living = [m for m in gc.get_objects() if issubclass(type(m), nn.Module) and "_modules" in m.__dict__]
    owning = []
    for module in living:
        if id(module) in inside or unwrapped(module) is not module:
            continue
        within = {id(m) for m in module.modules()}
        if not within & roots and any(id(p) in wanted for p in module.parameters()):
            owning.append((module, within))
    return [
        module
        for module, _ in owning
        if not any(id(module) in within and other is not module for other, within in owning)
    ]
