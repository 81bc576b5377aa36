"""What a checkpoint holds, as its user sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All of a run at one step, as one rank sees it.

    `weights` maps sets of tensors by Penstock's parameter names: `weights` itself, and `ema` where there is
    an average. `state` maps names to trees (see `penstock.checkpoint.tree`) that all ranks agree on:
    optimizer, scaler, loader position and so on; the optimizer's as `by_name` gives it, so that it can be
    read on another number of ranks. Tensors of both may be DTensors, of which each rank saves and reads its
    own part; any other tensor must be the same on all ranks.

    `local` is a tree of this rank's own, such as its random generators. On a number of ranks other than
    that which saved it nobody can say whose it is, and it comes back empty.
    """

    step: int
    weights: Mapping[str, Mapping[str, Tensor]]
    state: Mapping[str, Any]
    config: Mapping[str, Any]
    plan: str = ""
    local: Mapping[str, Any] = field(default_factory=dict)
    world: int = 1
    """Ranks that saved it. Filled in by loading; saving takes the number there is."""
