"""Parallel: several processes train one model."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from penstock.parallel.data import DataParallel as DataParallel
from penstock.parallel.data import replicate as replicate
from penstock.parallel.dims import ALONE as ALONE
from penstock.parallel.dims import ParallelDims as ParallelDims
from penstock.parallel.dims import fit_to_ranks as fit_to_ranks
from penstock.parallel.join import dims_of as dims_of
from penstock.parallel.join import joined as joined
from penstock.parallel.join import launched as launched
from penstock.parallel.join import local_device as local_device

if TYPE_CHECKING:
    from penstock.parallel.fsdp import Sharded as Sharded
    from penstock.parallel.fsdp import shard as shard
    from penstock.parallel.fsdp import whole_state as whole_state
    from penstock.parallel.recompute import recompute_blocks as recompute_blocks

_LATE = {"Sharded": "fsdp", "shard": "fsdp", "whole_state": "fsdp", "recompute_blocks": "recompute"}
"""Names that only training needs, and that take long to import, by module."""


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module 'penstock.parallel' has no attribute {name!r}")
    return getattr(importlib.import_module(f"penstock.parallel.{_LATE[name]}"), name)
