"""Ways to make a run fit that has run out of memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from penstock.config.convert import word
from penstock.config.model import ModelConfig
from penstock.config.plan import Plan
from penstock.config.rules import problems
from penstock.errors import OutOfMemory, ran_out_of_memory
from penstock.tasks import Task


@contextmanager
def memory_advice(plan: Plan, task: Task, model: ModelConfig) -> Iterator[None]:
    """Turn an allocator's failure inside into an `OutOfMemory` with what would make the run fit."""
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
    resumed = f"To make it fit, {'; or '.join(ways)}; the run goes on so from its newest checkpoint. "
    resumed = resumed if ways else ""
    return f"{resumed}A new run can take a smaller model or {task.size_setting}."


def _smaller(plan: Plan, model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Ways to take less memory and leave a run resumable, in words and as settings of the Plan. Recomputation comes
    first: it changes no result."""
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
