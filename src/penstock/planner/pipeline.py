"""The bubble of a pipeline whose backward pass is split in two, from the room that plays schedules through."""

from __future__ import annotations

from functools import lru_cache

from penstock.schedules import Costs, generate, simulate
from penstock.schedules.closed_form import closed_form

STEPS = 64
"""Costs of a schedule without a closed form are rounded to so many parts of a forward pass, so that a search, which
meets the same schedule with nearly the same costs again and again, plays it through once."""


def zero_bubble_share(
    ranks: int, micro_batches: int, forward: float, backward_input: float, backward_weight: float
) -> float:
    """Idle time of ZB-H1 over that of 1F1B, for equal stages, as a share between 0 and 1.

    The closed form where there is one, which tests hold equal to the simulation, else the simulation.
    """
    whole = (ranks - 1) * (forward + backward_input + backward_weight)
    if whole <= 0:
        return 0.0
    form = closed_form(
        "zb-h1", ranks, micro_batches, forward=forward, backward_input=backward_input, backward_weight=backward_weight
    )  # fmt: skip
    if form is not None:
        return float(form.makespan - form.ideal) / whole
    unit = forward / STEPS or whole / STEPS
    return _played(
        ranks,
        micro_batches,
        round(forward / unit),
        round(backward_input / unit),
        round(backward_weight / unit),
    )


@lru_cache(maxsize=1024)
def _played(ranks: int, micro_batches: int, forward: int, backward_input: int, backward_weight: int) -> float:
    costs = Costs(forward=forward, backward_input=backward_input, backward_weight=backward_weight)
    found = simulate(generate("zb-h1", ranks, micro_batches), costs)
    whole = (ranks - 1) * (forward + backward_input + backward_weight)
    return float(found.makespan - found.ideal) / whole
