"""Parallel: several processes train one model."""

from __future__ import annotations

from penstock.parallel.data import DataParallel, replicate
from penstock.parallel.dims import ALONE, ParallelDims, fit_to_ranks
from penstock.parallel.fsdp import Sharded, shard, whole_state
from penstock.parallel.join import dims_of, joined, launched, local_device
from penstock.parallel.recompute import recompute_blocks

__all__ = [
    "ALONE",
    "DataParallel",
    "ParallelDims",
    "Sharded",
    "dims_of",
    "fit_to_ranks",
    "joined",
    "launched",
    "local_device",
    "recompute_blocks",
    "replicate",
    "shard",
    "whole_state",
]
