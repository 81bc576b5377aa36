"""A run whose gradients overflow at any loss scale ends with the name of the layer where the overflow begins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from penstock.checkpoint.coordinator import collect
from penstock.errors import NumericError
from penstock.precision import LossScaler
from penstock.precision.scaler import PATIENCE
from penstock.step import TrainStep


def require_scale(scaler: LossScaler | None, step: int) -> None:
    """Check that the loss scale still lets steps be taken. Waits for the device.

    Raises:
        NumericError: the latest steps have all overflowed at the lowest loss scale, and nothing is learned any more.
    """
    if scaler is not None and scaler.stuck.item() >= PATIENCE:
        raise NumericError(
            f"At step {step} the loss scale has fallen to {scaler.scale.item():g} and gradients still overflow in "
            "fp16, so that every step is skipped. Compute in a wider type (plan dtype=bf16, or precision=O0), or lower "
            "recipe.lr."
        )


@contextmanager
def naming_overflow(step: TrainStep, micro_batches: Sequence[Any]) -> Iterator[None]:
    """Inside, a NumericError of a run that can skip steps gets the name of the layer where an overflow begins.

    Such a run skips steps that overflow, so its weights are finite and the latest micro-batches can be run again. All
    ranks that train together must raise the same error.
    """
    try:
        yield
    except NumericError as error:
        if step.scaler is None and step.skips is None:
            raise
        first = step.first_overflow(micro_batches)
        places = collect(lambda: None if first is None else str(first))
        rank, place = next(((rank, place) for rank, place in enumerate(places) if place), (0, None))
        where = "the latest batch" if len(places) == 1 else f"the latest batch of rank {rank}"
        sentence = f"In {where} the overflow begins in {place}."
        sentence = sentence if place else "In the latest batch nothing overflows."
        raise NumericError(f"{error} {sentence}") from error
