"""Every legal layout of a model on a number of devices: degrees, micro-batches, chunks, sharding, recomputation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any

from penstock.config import rules
from penstock.config.machine import Machine
from penstock.config.model import ModelConfig, stacks
from penstock.config.plan import Plan
from penstock.planner.describe import describe

LEAST_TOKENS = 8192
CONTEXT_DEGREES = (1, 2, 4, 8, 16)
AXES = ("tp", "pp", "cp", "ep", "micro_batch", "virtual", "sharding", "shard", "recompute", "sp", "gather")
SEARCHED = (*AXES, "dp", "accumulate", "schedule")
_FIELDS = tuple(f.name for f in fields(Plan))
_VALUES = attrgetter(*_FIELDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Values that a search tries. An empty tuple means every legal value."""

    tp: tuple[int, ...] = ()
    pp: tuple[int, ...] = ()
    cp: tuple[int, ...] = ()
    """Context parallel degrees. Empty: powers of two that leave each device at least `LEAST_TOKENS` of a sample."""
    ep: tuple[int, ...] = ()
    micro_batch: tuple[int, ...] = ()
    virtual: tuple[int, ...] = ()
    sharding: tuple[str, ...] = ("ddp", "zero1", "zero2", "fsdp", "hsdp")
    shard: tuple[int, ...] = ()
    """Sizes of a shard group under hsdp. Empty: the replicas of one node, times powers of two up to 32."""
    recompute: tuple[str, ...] = ("none", "selective", "elementwise", "operators", "early")
    sp: tuple[bool, ...] = (True,)
    """Sequence parallelism where there is tensor parallelism: it never costs more memory, nor more bytes sent."""
    gather: tuple[str, ...] = ("products",)
    """Types in which sharded weights may be gathered, in addition to the precision level's own: `products`, the type of
    matrix products, halves the bytes."""


def vary(plan: Plan, **changes: Any) -> Plan:
    """A copy of `plan` with fields changed to values that are known to be valid, without the checks of construction."""
    varied = object.__new__(Plan)
    for name, value in (*zip(_FIELDS, _VALUES(plan)), *changes.items()):
        object.__setattr__(varied, name, value)
    return varied


def layouts(
    model: ModelConfig, machine: Machine, gpus: int, batch: int, base: Plan, space: Space,
    fixed: frozenset[str] = frozenset(),
) -> Iterator[Plan]:  # fmt: skip
    """Every legal layout in `space` that has the `fixed` fields of `base`."""
    fixed_values = {name: getattr(base, name) for name in SEARCHED if name in fixed}
    space = replace(space, **{name: (value,) for name, value in fixed_values.items() if name in AXES})
    scores = (op.scores for _, op in describe(model, base, machine).operators())
    if "selective" in space.recompute and not any(scores):
        # No scores are stored that could be recomputed.
        space = replace(space, recompute=tuple(kind for kind in space.recompute if kind != "selective"))
    per_node, experts = machine.devices_per_node, max(stack.experts * stack.mixes for stack in stacks(model))
    most = max(1, min(model.graph.lengths) // LEAST_TOKENS)
    degrees = itertools.product(
        space.tp or divisors(min(gpus, per_node)), space.pp or stages(model, gpus),
        space.cp or [degree for degree in CONTEXT_DEGREES if degree <= most], space.ep or divisors(max(1, experts)),
    )  # fmt: skip
    for tp, pp, cp, ep in degrees:
        dp = gpus // (tp * pp * cp)
        if dp * tp * pp * cp != gpus or batch % dp:
            continue
        corner = vary(
            base, tp=tp, pp=pp, cp=cp, dp=dp, ep=ep, sharding="ddp", shard=1, sp=False, virtual=1, schedule="1f1b",
            gather="level",
        )  # fmt: skip
        if not rules.problems(corner, model):
            plain = base.schedule if base.schedule in ("gpipe", "zero_bubble") else "1f1b"
            for plan in _within(model, corner, machine, batch // dp, space, plain):
                if all(getattr(plan, name) == value for name, value in fixed_values.items()):
                    yield plan


def _within(
    model: ModelConfig, corner: Plan, machine: Machine, samples: int, space: Space, plain: str
) -> Iterator[Plan]:
    """Micro-batches, chunks, sharding and recomputation at the degrees of `corner`; `plain` is the schedule of a stage
    in one chunk."""

    def legal(**changes: Any) -> bool:
        return not rules.problems(vary(corner, **changes), model)

    shardings = [
        (kind, size)
        for kind, size in _shardings(corner, machine.devices_per_node // corner.tp, space)
        if legal(sharding=kind, shard=size)
    ]
    kinds = ("fsdp", "hsdp") if "products" in space.gather else ()
    gather = {kind: "products" for kind in kinds if legal(sharding=kind, gather="products")}
    splits = sorted({sp and legal(sp=True) for sp in space.sp})
    chunks = _chunks(model, corner.pp, space.virtual)
    sizes = [size for size in space.micro_batch or divisors(samples) if samples % size == 0]
    for micro, virtual, (sharding, shard), kind, sp in itertools.product(
        sizes, chunks, shardings, space.recompute, splits
    ):
        if virtual == 1 or samples // micro % corner.pp == 0:
            yield vary(
                corner, micro_batch=micro, accumulate=samples // micro, virtual=virtual,
                schedule="interleaved" if virtual > 1 else plain, sharding=sharding, shard=shard, recompute=kind, sp=sp,
                gather=gather.get(sharding, "level"),
            )  # fmt: skip


def _shardings(corner: Plan, per_node: int, space: Space) -> Iterator[tuple[str, int]]:
    """Kinds of sharding; for hsdp, with each group size above one and below all replicas."""
    replicas = corner.replicas
    if replicas == 1:
        # A single replica shards nothing, whichever kind of sharding the search asks for.
        only = space.sharding[0] if len(space.sharding) == 1 else "ddp"
        yield only if only != "hsdp" else "ddp", 1
        return
    sizes = space.shard or [max(1, per_node) << i for i in range(6)]
    for kind in space.sharding:
        if kind != "hsdp":
            yield kind, 1
        else:
            yield from ((kind, size) for size in sizes if 1 < size < replicas)


def divisors(number: int) -> list[int]:
    """All divisors of a number, in order."""
    small = [i for i in range(1, math.isqrt(number) + 1) if number % i == 0]
    return small + [number // i for i in reversed(small) if i * i != number]


def depth(model: ModelConfig) -> int:
    """Blocks of all stacks."""
    return sum(len(stack.layers) for stack in stacks(model))


def stages(model: ModelConfig, gpus: int) -> list[int]:
    """Numbers of stages that split the blocks evenly, with or without counting entrance and exit."""
    n = depth(model)
    return [p for p in range(1, min(n, gpus) + 1) if n % p == 0 or (p > 2 and (n + 2) % p == 0)]


def _chunks(model: ModelConfig, pp: int, wanted: Sequence[int]) -> list[int]:
    """Numbers of equal chunks of a stage, each of at least one block. Embedding and head count as a block each where
    stages are even only then."""
    if pp == 1:
        return [1]
    blocks = depth(model)
    pieces = next((n for n in (blocks, blocks + 2) if n % pp == 0), pp)
    return [v for v in wanted or divisors(pieces // pp) if pieces % (pp * v) == 0 and pp * v <= blocks]
