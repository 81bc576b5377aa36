"""Which layouts exist: how blocks fall on stages, and what degrees a model admits."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from penstock.config.plan import Plan
from penstock.planner.shapes import Shape


@lru_cache(maxsize=4096)
def stage_blocks(depth: int, stages: int) -> tuple[int, int, int]:
    """Blocks of the first, a middle and the last stage.

    Even where `stages` divides `depth`. Else, where it divides `depth + 2`, entrance and exit take a block's place
    each. Else the first stages take one more than the others, of which the last is one.
    """
    if stages == 1:
        return depth, depth, depth
    if depth % stages == 0:
        return depth // stages, depth // stages, depth // stages
    if (depth + 2) % stages == 0:
        each = (depth + 2) // stages
        return each - 1, each, each - 1
    each = -(-depth // stages)
    return each, each, each - 1


def blocks_by_stage(depth: int, stages: int) -> list[tuple[int, int]]:
    """Stages in a row and the blocks of each, as `stage_blocks` has them, for two stages at least; of those between the
    first and the last the later ones may have one less."""
    first, middle, last = stage_blocks(depth, stages)
    fewer = first + last + (stages - 2) * middle - depth
    return [(1, first), (stages - 2 - fewer, middle), (fewer, middle - 1), (1, last)]


def layout_problems(shape: Shape, plan: Plan) -> Iterator[str]:
    """Every reason why a model of `shape` cannot be laid out as `plan` says, in whole sentences."""
    yield from _tensor_problems(shape, plan)
    yield from _pipeline_problems(shape, plan)
    yield from _data_problems(shape, plan)


def _tensor_problems(shape: Shape, plan: Plan) -> Iterator[str]:
    for block in shape.blocks:
        if block.heads % plan.tp:
            yield (
                f"plan.tp={plan.tp} cannot share out the model's {block.heads} attention heads evenly; "
                f"use a tp of {_divisors(block.heads)}."
            )
            break
        if block.hidden % plan.tp:
            yield (
                f"plan.tp={plan.tp} cannot split the MLP's hidden width {block.hidden} evenly; "
                f"use a tp that divides it."
            )
            break
    if plan.sp and plan.tp == 1:
        yield "plan.sp=true splits what tensor parallelism leaves whole, but plan.tp=1; use sp=false, or a larger tp."
    for block in shape.blocks:
        if block.kv_heads % plan.tp and plan.tp % block.kv_heads:
            yield (
                f"plan.tp={plan.tp} can neither share out the model's {block.kv_heads} heads of keys evenly nor give "
                f"each to as many devices; use a tp that divides {block.kv_heads}, or a multiple of it."
            )
            break
        if plan.sp and block.tokens // plan.cp % plan.tp:
            yield (
                f"plan.sp=true cannot split {block.tokens // plan.cp} tokens over plan.tp={plan.tp} devices evenly; "
                "use sp=false, or a tp that divides them."
            )
            break
    tokens = min(block.tokens for block in shape.blocks)
    if plan.cp > tokens or any(block.tokens % plan.cp for block in shape.blocks):
        yield (
            f"plan.cp={plan.cp} cannot split the model's {tokens} tokens evenly; use a cp that divides them."
        )


def _pipeline_problems(shape: Shape, plan: Plan) -> Iterator[str]:
    if plan.pp > shape.depth:
        yield f"plan.pp={plan.pp} leaves stages without a block, for the model has {shape.depth}; use at most that."
    if plan.virtual > 1:
        if plan.schedule != "interleaved":
            yield (
                f"plan.virtual={plan.virtual} needs plan.schedule=interleaved, which plan.schedule={plan.schedule} "
                "is not."
            )
        if plan.schedule == "interleaved" and plan.accumulate % plan.pp:
            yield (
                f"plan.accumulate={plan.accumulate} is no multiple of plan.pp={plan.pp}, by which an interleaved "
                "schedule takes its micro-batches; use one that is, or schedule=1f1b with virtual=1."
            )
        if plan.pp == 1:
            yield f"plan.virtual={plan.virtual} cuts pipeline stages into chunks, but plan.pp=1; use virtual=1."
        if shape.depth % (plan.pp * plan.virtual) and (shape.depth + 2) % (plan.pp * plan.virtual):
            yield (
                f"plan.pp={plan.pp} times plan.virtual={plan.virtual} does not divide the model's {shape.depth} "
                f"blocks (nor {shape.depth + 2} with entrance and exit); choose another virtual."
            )


def _data_problems(shape: Shape, plan: Plan) -> Iterator[str]:
    if plan.sharding == "hsdp" and (plan.dp * plan.cp) % plan.shard:
        yield f"plan.shard={plan.shard} does not divide the {plan.dp * plan.cp} replicas; use a shard that does."
    if plan.sharding != "hsdp" and plan.shard > 1:
        yield f"plan.shard={plan.shard} is of plan.sharding=hsdp only; use shard=1, or sharding=hsdp."
    experts = max(block.experts for block in shape.blocks)
    if plan.ep > 1:
        if not experts:
            yield f"plan.ep={plan.ep} splits experts, but the model has none; use ep=1."
        elif experts % plan.ep:
            yield (
                f"plan.ep={plan.ep} cannot share out the model's {experts} experts evenly; use an ep of "
                f"{_divisors(experts)}."
            )
        if plan.dp % plan.ep:
            yield f"plan.ep={plan.ep} must divide plan.dp={plan.dp}, for experts are split over replicas."


def _divisors(number: int) -> str:
    found = [str(i) for i in range(1, number + 1) if number % i == 0]
    return ", ".join(found[:-1]) + f" or {found[-1]}" if len(found) > 1 else found[0]
