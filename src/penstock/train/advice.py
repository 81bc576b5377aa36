"""Errors of a run that say what to change: gradients that overflow at any loss scale, and lack of memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from penstock.checkpoint.coordinator import collect
from penstock.config.convert import word
from penstock.config.model import ModelConfig
from penstock.config.plan import Plan
from penstock.config.rules import problems
from penstock.errors import NumericError, OutOfMemory, ran_out_of_memory
from penstock.precision import LossScaler
from penstock.precision.scaler import PATIENCE
from penstock.step import TrainStep
from penstock.tasks import Task


def require_scale(scaler: LossScaler | None, step: int) -> None:
    """Raise NumericError if the latest steps have all overflowed at the lowest loss scale, so that nothing is learned
    any more. Waits for the device."""
    if scaler is not None and scaler.stuck.item() >= PATIENCE:
        raise NumericError(
            f"At step {step} the loss scale has fallen to {scaler.scale.item():g} and gradients still overflow in "
            "fp16, so that every step is skipped. Compute in a wider type (plan dtype=bf16, or precision=O0), or lower "
            "recipe.lr."
        )


@contextmanager
def naming_overflow(step: TrainStep, micro_batches: Sequence[Any]) -> Iterator[None]:
    """Add the name of the layer where an overflow begins to a NumericError raised inside, if the run can skip steps.

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
        of_rank = "" if len(places) == 1 else f" of rank {rank}"
        begins = f"{of_rank} the overflow begins in {place}" if place else " nothing overflows"
        raise NumericError(f"{error} In the latest batch{begins}.") from error


@contextmanager
def memory_advice(plan: Plan, task: Task, model: ModelConfig) -> Iterator[None]:
    """Raise `OutOfMemory` in place of an allocator's error inside, with changes that would make the run fit."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not ran_out_of_memory(error):
            raise
        problem = ": ".join(["Memory ran out", *str(error).strip().splitlines()[:1]]).rstrip(".")
        ways = "; or ".join(_smaller(plan, model))
        ways = f"To make it fit, {ways}; the run then resumes from its newest checkpoint. " if ways else ""
        raise OutOfMemory(
            f"{problem}. {ways}A new run can take a smaller model or {task.size_setting}."
        ) from error


def _smaller(plan: Plan, model: ModelConfig) -> Iterator[str]:
    """Changes that need less memory and keep a run resumable, in words. Recomputation comes first, because it changes
    no result."""
    split = next((n for n in range(2, plan.micro_batch + 1) if plan.micro_batch % n == 0), 1)
    recomputes = plan.recompute in ("early", "full", "budget") and plan.recompute_every == 1
    ways: tuple[tuple[bool, str, dict[str, Any]], ...] = (
        (not recomputes, "recompute activations in the backward pass", {"recompute": "early", "recompute_every": 1.0}),
        (plan.attention in ("plain", "math"), "use an attention that stores no score matrix", {"attention": "sdpa"}),
        (plan.loss != "chunked", "compute logits for a few tokens at a time", {"loss": "chunked"}),
        (split > 1, "split the micro-batch",
         {"micro_batch": plan.micro_batch // split, "accumulate": plan.accumulate * split}),
        (plan.replicas > 1, "shard everything over the replicas", {"sharding": "fsdp"}),
        (plan.precision == "O0", "compute in half precision", {"precision": "O1"}),
    )  # fmt: skip
    before = problems(plan, model, run=True)
    for helps, words, fields in ways:
        if helps and problems(replace(plan, **fields), model, run=True) == before:
            changed = {name: value for name, value in fields.items() if getattr(plan, name) != value}
            if changed:
                settings = " ".join(f"{name}={word(value)}" for name, value in changed.items())
                yield f"{words} with the plan {settings}"
