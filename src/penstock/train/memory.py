"""What would make a run fit that has run out of memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.config.plan import Plan
from penstock.errors import OutOfMemory, ran_out_of_memory
from penstock.tasks import Task


@contextmanager
def memory_advice(plan: Plan, task: Task) -> Iterator[None]:
    """Turn an allocator's failure inside into an `OutOfMemory` with what would make the run fit."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not ran_out_of_memory(error):
            raise
        raise OutOfMemory(f"{_first_line(error)} {_advice(plan, task)}") from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"Memory ran out: {lines[0].rstrip('.')}." if lines else "Memory ran out."


def _advice(plan: Plan, task: Task) -> str:
    ways = []
    if plan.micro_batch > 1:
        half = (plan.micro_batch + 1) // 2
        ways.append(
            f"halve the micro-batch with the plan micro_batch={half} accumulate={plan.accumulate * 2}"
        )
    if plan.precision == "O0":
        ways.append("compute in half width with precision=O1")
    if plan.precision != "O3":
        ways.append("keep weights in half width too with precision=O3")
    if plan.attention in ("plain", "math"):
        ways.append("choose an attention that keeps no score matrix with attention=sdpa")
    ways.append(f"take a smaller model or {task.size_setting}")
    return f"To make it fit: {'; or '.join(ways)}."
