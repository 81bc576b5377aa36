"""The random generators that a run draws from: started from its seed, stored with it, and restored afterwards."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from penstock.checkpoint.coordinator import collect
from penstock.parallel import ParallelDims


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of all random generators a step can draw from, as a tree of tensors and numbers."""
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def seed_random(seed: int, rank: int = 0, step: int = 0) -> None:
    """Start all generators from `seed`: of rank 0 from the seed itself, of every other rank, and of one that goes on at
    `step` without the state it had, from its own.
    """
    if rank or step:
        seed = int(np.random.SeedSequence([seed, rank, step]).generate_state(1, np.uint64)[0])
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore the generators' states from `random_state`."""
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def random_states(device: torch.device) -> list[dict[str, Any]]:
    """`random_state` of every rank, by rank, on all of them."""
    return collect(lambda: random_state(device))


def restore_random(
    states: Sequence[Mapping[str, Any]], device: torch.device, dims: ParallelDims, *, seed: int, step: int
) -> None:
    """Go on with this rank's generators in their states of `random_states` at `step`.

    With another number of ranks not each has a state to go on with. Then all but rank 0 start again from `seed`, rank
    and step, and what is drawn differs from an undisturbed run as it does between seeds.
    """
    if len(states) == dims.size or dims.random_rank == 0:
        set_random_state(states[dims.random_rank], device)
    else:
        seed_random(seed, dims.random_rank, step)


@contextmanager
def own_random(device: torch.device) -> Iterator[None]:
    """Inside, generators may be seeded and drawn from; afterwards they are as the caller had them."""
    before = random_state(device)
    try:
        yield
    finally:
        set_random_state(before, device)
