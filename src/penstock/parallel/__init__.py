"""Parallel: several processes train one model."""

from __future__ import annotations

from penstock.parallel.data import DataParallel, replicate
from penstock.parallel.fsdp import Sharded, shard, whole_state
from penstock.parallel.recompute import recompute_blocks
from penstock.parallel.world import ALONE, World, fit_to_world, joined, launched, local_device, world_of

__all__ = [
    "ALONE",
    "DataParallel",
    "Sharded",
    "World",
    "fit_to_world",
    "joined",
    "launched",
    "local_device",
    "recompute_blocks",
    "replicate",
    "shard",
    "whole_state",
    "world_of",
]
