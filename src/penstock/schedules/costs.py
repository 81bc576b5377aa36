"""Costs of the actions of a schedule, in any one unit of time and any one unit of memory.

Number types are preserved: whole numbers and Fractions give exact results, floats give floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from penstock.errors import ConfigError
from penstock.schedules.schedule import Kind

Number = int | float | Fraction
PerStage = Number | Sequence[Number]
"""One number for all stages, or one per stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Costs of the actions of one micro-batch, in any one unit of time and any one unit of memory."""

    forward: PerStage = 1
    backward_input: PerStage = 1
    """Time for the gradient of a stage's input. A whole backward, B, takes this and `backward_weight`."""
    backward_weight: PerStage = 1
    transfer: PerStage = 0
    """Time from a stage to the next, and for the gradient back, if the two are on different ranks; one number
    for each of the stages − 1 boundaries. A transfer delays the receiver and occupies neither rank."""
    activation: PerStage = 1
    """Memory that a stage holds from the start of a forward to the end of its backward, or of a split one's I."""
    kept_for_weight: PerStage | None = None
    """The part of `activation` that is held from the end of I to the end of W; None means all of it."""


def ratio(part: Number, whole: Number) -> Number:
    """`part / whole`, exact if both are exact."""
    if isinstance(part, float) or isinstance(whole, float):
        return part / whole
    return Fraction(part) / whole


def durations(costs: Costs, stages: int) -> dict[Kind, list[Number]]:
    """Time of each kind of computation, for each stage. Raises `ConfigError`."""
    forward = per_stage("forward", costs.forward, stages)
    into = per_stage("backward_input", costs.backward_input, stages)
    weight = per_stage("backward_weight", costs.backward_weight, stages)
    return {"F": forward, "B": [a + b for a, b in zip(into, weight)], "I": into, "W": weight}


def memory_changes(costs: Costs, stages: int) -> dict[Kind, list[Number]]:
    """Change of the held memory by each kind of computation, for each stage. Raises `ConfigError`."""
    whole = per_stage("activation", costs.activation, stages)
    kept_for_weight = whole
    if costs.kept_for_weight is not None:
        kept_for_weight = per_stage("kept_for_weight", costs.kept_for_weight, stages)
        for stage, (some, all_) in enumerate(zip(kept_for_weight, whole)):
            if some > all_:
                raise ConfigError(
                    f"kept_for_weight of stage {stage} is {some}, more than the {all_} of its activation; it must be a "
                    "part of the activation."
                )
    return {
        "F": whole,
        "B": [-a for a in whole],
        "I": [b - a for a, b in zip(whole, kept_for_weight)],
        "W": [-b for b in kept_for_weight],
    }


def per_stage(name: str, value: PerStage, stages: int) -> list[Number]:
    """A cost for each stage. Raises `ConfigError` for a wrong number of them and for negative ones."""
    if isinstance(value, Sequence):
        numbers = list(value)
        if len(numbers) != stages:
            places = "boundaries between stages" if name == "transfer" else "stages"
            raise ConfigError(
                f"{name} has {len(numbers)} values, but the schedule has {stages} {places}; give one for each, or one "
                "number for all."
            )
    else:
        numbers = [value] * stages
    if not all(number >= 0 for number in numbers):  # also refuses nan
        raise ConfigError(f"{name} is {value}, but a cost cannot be negative.")
    return numbers
