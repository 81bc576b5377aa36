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
    """Check that steps are still taken at the current loss scale. Waits for the device.

    Raises:
        NumericError: the latest steps have all overflowed at the lowest loss scale, so nothing is learned any more.
    """
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
        where = "the latest batch" if len(places) == 1 else f"the latest batch of rank {rank}"
        sentence = f"In {where} the overflow begins in {place}."
        sentence = sentence if place else "In the latest batch nothing overflows."
        raise NumericError(f"{error} {sentence}") from error


@contextmanager
def memory_advice(plan: Plan, task: Task, model: ModelConfig) -> Iterator[None]:
    """Turn an allocator's failure inside into an `OutOfMemory` with changes that would make the run fit."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not ran_out_of_memory(error):
            raise
        raise OutOfMemory(f"{_first_line(error)} {_advice(plan, task, model)}") from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"Memory ran out: {lines[0].rstrip('.')}." if lines else "Memory ran out."


def _advice(plan: Plan, task: Task, model: ModelConfig) -> str:
    ways = [f"{words} with the plan {line}" for words, line in _smaller(plan, model)]
    resumed = f"To make it fit, {'; or '.join(ways)}; the run then resumes from its newest checkpoint. "
    resumed = resumed if ways else ""
    return f"{resumed}A new run can take a smaller model or {task.size_setting}."


def _smaller(plan: Plan, model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Changes that need less memory and keep a run resumable, in words and as settings of the Plan. Recomputation comes
    first, because it changes no result."""
    split = next((n for n in range(2, plan.micro_batch + 1) if plan.micro_batch % n == 0), 1)
    ways: tuple[tuple[str, dict[str, Any]], ...] = (
        ("compute activations again in the backward pass", {"recompute": "early", "recompute_every": 1.0}),
        ("choose an attention that keeps no score matrix", {"attention": "sdpa"}),
        ("make logits for some tokens at a time", {"loss": "chunked"}),
        (
            "split the micro-batch",
            {"micro_batch": plan.micro_batch // split, "accumulate": plan.accumulate * split},
        ),
        ("shard everything over the replicas", {"sharding": "fsdp"}),
        ("compute in half width", {"precision": "O1"}),
    )
    kept_back = {
        "recompute": plan.recompute in ("early", "full", "budget") and plan.recompute_every == 1,
        "attention": plan.attention not in ("plain", "math"),
        "sharding": plan.replicas == 1,
        "precision": plan.precision != "O0",
    }
    before = problems(plan, model, run=True)
    for words, fields in ways:
        changed = replace(plan, **fields)
        applies = changed != plan and not kept_back.get(next(iter(fields)), False)
        if applies and problems(changed, model, run=True) == before:
            changes = (name for name in fields if getattr(plan, name) != fields[name])
            yield words, " ".join(f"{name}={word(fields[name])}" for name in changes)
