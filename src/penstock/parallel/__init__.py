"""Parallel: several processes train one model."""

from __future__ import annotations

from penstock.parallel.data import DataParallel, replicate
from penstock.parallel.world import ALONE, World, fit_to_world, joined, launched, local_device, world_of

__all__ = [
    "ALONE",
    "DataParallel",
    "World",
    "fit_to_world",
    "joined",
    "launched",
    "local_device",
    "replicate",
    "world_of",
]
