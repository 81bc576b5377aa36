"""Every legal layout of a model on so many devices: predicted, ranked, and why the others lose.

The search is exhaustive over degrees, micro-batches, interleaving, sharding and recomputation, but for what is fixed.
Memory comes first, because it is cheap and rules most layouts out; times of blocks are shared between layouts that have
them in common.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any

from penstock.config import rules
from penstock.config.machine import Machine
from penstock.config.model import ModelConfig, ViTConfig, title
from penstock.config.plan import Plan
from penstock.errors import ConfigError, OutOfMemory
from penstock.planner.constants import DEFAULT, Constants
from penstock.planner.describe import attention_form, describe, totals
from penstock.planner.memory import memory
from penstock.planner.prediction import Prediction, predicted, room
from penstock.planner.rates import rates_of
from penstock.planner.shapes import Block, blocks_of, counted_tokens

LEAST_TOKENS = 8192
MOST_CONTEXT = 16
GIB = 2**30
_AXES = ("tp", "pp", "cp", "ep", "micro_batch", "virtual", "sharding", "shard", "recompute", "sp")
_FIELDS = tuple(f.name for f in fields(Plan))
_VALUES = attrgetter(*_FIELDS)
_SEARCHED = (*_AXES, "dp", "accumulate", "schedule")
_REST = attrgetter(*(name for name in _AXES if name != "micro_batch"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What a search tries. Empty tuples mean every legal value."""

    tp: tuple[int, ...] = ()
    pp: tuple[int, ...] = ()
    cp: tuple[int, ...] = ()
    """Left empty: powers of two that leave each device at least `LEAST_TOKENS` of a sample."""
    ep: tuple[int, ...] = ()
    micro_batch: tuple[int, ...] = ()
    virtual: tuple[int, ...] = ()
    sharding: tuple[str, ...] = ("ddp", "zero1", "zero2", "fsdp", "hsdp")
    shard: tuple[int, ...] = ()
    """Of hsdp. Left empty: as many replicas as lie in a node, and that doubled."""
    recompute: tuple[str, ...] = ("none", "selective", "operators", "early")
    sp: tuple[bool, ...] = (True,)
    """Sequence parallelism where there is tensor parallelism: it never costs more memory, nor more bytes sent."""


@dataclass(slots=True)
class Found:
    """What a search found: predictions that fit, best first, and what became of the others."""

    predictions: list[Prediction] = field(default_factory=list)
    tried: int = 0
    too_large: int = 0
    """Layouts that do not fit."""
    nearest: tuple[Plan, float] | None = None
    """Of the layouts that do not fit, the one that needs least memory, and how many bytes that is."""


def search(
    model: ModelConfig,
    machine: Machine,
    gpus: int,
    *,
    global_batch: int | None = None,
    base: Plan | None = None,
    fixed: frozenset[str] = frozenset(),
    space: Space | None = None,
    keep: int | None = 50,
) -> list[Prediction]:
    """The layouts of `model` on `gpus` devices of `machine` that fit, fastest first, at most `keep` of them.

    `base` gives what is not searched (precision, attention, compilation, optimizer), and of what is searched the
    fields named in `fixed`; `global_batch` defaults to what keeps each layout's devices busy, at least one sample per
    replica. Raises OutOfMemory saying what would make it fit where nothing does, and ConfigError where no degrees
    multiply to `gpus`.
    """
    found = explore(
        model, machine, gpus, global_batch=global_batch, base=base, fixed=fixed, space=space, keep=keep
    )
    if not found.predictions:
        raise OutOfMemory(nothing_fits(model, machine, gpus, found))
    return found.predictions


def default_base(machine: Machine, *, trainable: bool = False) -> Plan:
    """What a search holds fixed unless told otherwise: half precision with master weights, and fused kernels.

    `trainable` keeps to what `penstock train` can run: autocast in place of master weights.
    """
    if machine.device == "cpu":
        return Plan(optimizer="fused")
    if trainable and "bf16" in machine.peak_flops:
        return Plan(precision="O1", optimizer="fused", attention="flash", compile="blocks")
    dtype = "bf16" if "bf16" in machine.peak_flops else "fp16"
    return Plan(
        precision="O2",
        dtype="bf16" if dtype == "bf16" else "fp16",
        optimizer="fused",
        attention="flash" if dtype == "bf16" else "efficient",
        compile="blocks",
    )


def explore(
    model: ModelConfig,
    machine: Machine,
    gpus: int,
    *,
    global_batch: int | None = None,
    base: Plan | None = None,
    fixed: frozenset[str] = frozenset(),
    space: Space | None = None,
    keep: int | None = 50,
    constants: Constants = DEFAULT,
) -> Found:
    """As `search`, with what became of the layouts that lose. Raises ConfigError as it does."""
    if gpus < 1:
        raise ConfigError(f"gpus is {gpus}, but must be at least 1.")
    base = base or default_base(machine, trainable=gpus == 1 and isinstance(model, ViTConfig))
    problems = rules.problems(base, model, machine, layout=False)
    if problems:
        raise ConfigError(problems)
    batch = global_batch or default_batch(model, gpus)
    rates, parameters = rates_of(machine, base, constants), totals(model).parameters
    too_large: dict[tuple[object, ...], int] = {}
    limit = room(machine)
    found = Found()
    ranked: list[tuple[float, int, Prediction]] = []
    for plan in layouts(model, machine, gpus, batch, base, space or Space(), fixed):
        found.tried += 1
        # What a micro-batch is too large for, a larger one is too: of the rest of the plan nothing shrinks with it.
        rest = _REST(plan)
        if plan.micro_batch >= too_large.get(rest, plan.micro_batch + 1):
            found.too_large += 1
            continue
        work = describe(model, plan, machine.device)
        parts = memory(work, plan, constants, cpu=rates.cpu)
        needed = sum(parts.values())
        if needed > limit:
            too_large[rest] = plan.micro_batch
            found.too_large += 1
            if found.nearest is None or needed < found.nearest[1]:
                found.nearest = (plan, needed)
            continue
        one = predicted(work, machine, plan, rates, parameters, parts=parts)
        ranked.append((one.iteration_seconds, found.tried, one))
        if keep is not None and len(ranked) > 40 * keep:
            ranked = sorted(ranked)[:keep]
    if not found.tried:
        depth = _depth(blocks_of(model))
        raise ConfigError(
            f"No layout has {gpus} devices and {batch} samples a step{_as_fixed(base, fixed)}: tensor parallel degrees "
            f"must divide the heads, stages must divide the {depth} blocks, and replicas the samples. "
            "Try a number of devices that divides the batch, or another global batch."
        )
    found.predictions = [one for _, _, one in sorted(ranked)[:keep]]
    return found


def default_batch(model: ModelConfig, gpus: int) -> int:
    """Samples of a step where none are asked for: a power of two near four million tokens, one per device at least."""
    wanted = max(gpus, 2**22 // max(1, counted_tokens(model)))
    batch = gpus
    while batch * 2 <= wanted:
        batch *= 2
    return batch


def vary(plan: Plan, **changes: Any) -> Plan:
    """A copy of `plan` with fields changed to values known to be sound: without the checks of construction."""
    other = object.__new__(Plan)
    for name, value in zip(_FIELDS, _VALUES(plan)):
        object.__setattr__(other, name, value)
    for name, value in changes.items():
        object.__setattr__(other, name, value)
    return other


def _as_fixed(base: Plan, fixed: frozenset[str]) -> str:
    degrees = [f"{name}={getattr(base, name)}" for name in _SEARCHED if name in fixed]
    return f" with {', '.join(degrees)}" if degrees else ""


def layouts(
    model: ModelConfig,
    machine: Machine,
    gpus: int,
    batch: int,
    base: Plan,
    space: Space,
    fixed: frozenset[str] = frozenset(),
) -> Iterator[Plan]:
    """Every legal layout in `space` that has the `fixed` fields of `base`."""
    held = {name: getattr(base, name) for name in _SEARCHED if name in fixed}
    space = replace(space, **{name: (value,) for name, value in held.items() if name in _AXES})
    blocks = blocks_of(model)
    if "selective" in space.recompute and attention_form(base, model.tokens, machine.device) == "fused":
        # Nothing keeps scores that could be computed again.
        space = replace(space, recompute=tuple(kind for kind in space.recompute if kind != "selective"))
    for plan in _legal(blocks, machine, gpus, batch, base, space):
        if all(getattr(plan, name) == value for name, value in held.items()):
            yield plan


def _legal(
    blocks: Sequence[Block], machine: Machine, gpus: int, batch: int, base: Plan, space: Space
) -> Iterator[Plan]:
    for tp in _tensor_degrees(blocks, machine, gpus, space.tp):
        for pp in _stages(blocks, gpus // tp, space.pp):
            for cp in _context_degrees(blocks, space.cp):
                if gpus % (tp * pp * cp):
                    continue
                dp = gpus // (tp * pp * cp)
                if batch % dp:
                    continue
                for ep in _expert_degrees(blocks, dp, space.ep):
                    corner = vary(base, tp=tp, pp=pp, cp=cp, dp=dp, ep=ep, sp=False, shard=1)
                    shardings = list(_shardings(corner, machine.devices_per_node // tp, space))
                    yield from _within(blocks, corner, batch // dp, shardings, space)


def _shardings(corner: Plan, per_node: int, space: Space) -> Iterator[tuple[str, int]]:
    """Kinds of sharding, with the replicas of a group of hsdp: such as are neither one nor all of them."""
    replicas = corner.dp * corner.cp
    if replicas == 1:
        # One device alone shares nothing out, whatever the kind is that was asked for.
        only = space.sharding[0] if len(space.sharding) == 1 else "ddp"
        yield only if only != "hsdp" else "ddp", 1
        return
    for kind in space.sharding:
        if kind != "hsdp":
            yield kind, 1
            continue
        sizes = space.shard or [max(1, per_node) << i for i in range(6)]
        yield from (("hsdp", size) for size in sizes if 1 < size < replicas and replicas % size == 0)


def _within(
    blocks: Sequence[Block], corner: Plan, samples: int, shardings: Sequence[tuple[str, int]], space: Space
) -> Iterator[Plan]:
    """Micro-batches, chunks, sharding and recomputation at fixed degrees."""
    chunks = _chunks(blocks, corner.pp, space.virtual)
    plain = corner.schedule if corner.schedule in ("gpipe", "zero_bubble") else "1f1b"
    even = all(block.tokens // corner.cp % corner.tp == 0 for block in blocks)
    splits = sorted({sp and even for sp in space.sp}) if corner.tp > 1 else [False]
    for micro in _micro_batches(samples, space.micro_batch):
        for virtual in chunks:
            schedule = "interleaved" if virtual > 1 else plain
            if virtual > 1 and samples // micro % corner.pp:
                continue
            for sharding, shard in shardings:
                for kind in space.recompute:
                    for sp in splits:
                        yield vary(
                            corner, micro_batch=micro, accumulate=samples // micro, virtual=virtual,
                            schedule=schedule, sharding=sharding, shard=shard, recompute=kind, sp=sp,
                        )  # fmt: skip


def _depth(blocks: Sequence[Block]) -> int:
    return sum(block.count for block in blocks)


def _divisors(number: int) -> list[int]:
    small = [i for i in range(1, math.isqrt(number) + 1) if number % i == 0]
    return small + [number // i for i in reversed(small) if i * i != number]


def _tensor_degrees(blocks: Sequence[Block], machine: Machine, gpus: int, wanted: Sequence[int]) -> list[int]:
    """Degrees that divide heads and hidden width, inside a node unless asked for."""
    found = wanted or _divisors(min(gpus, machine.devices_per_node))
    return [
        tp
        for tp in found
        if gpus % tp == 0
        and all(
            block.heads % tp == 0 == block.hidden % tp
            and (block.kv_heads % tp == 0 or tp % block.kv_heads == 0)
            for block in blocks
        )
    ]


def _stages(blocks: Sequence[Block], devices: int, wanted: Sequence[int]) -> list[int]:
    """Numbers of stages that share the blocks out evenly, entrance and exit counted or not."""
    n = _depth(blocks)
    found = wanted or [p for p in range(1, min(n, devices) + 1) if n % p == 0 or (p > 2 and (n + 2) % p == 0)]
    return [p for p in found if devices % p == 0]


def _context_degrees(blocks: Sequence[Block], wanted: Sequence[int]) -> list[int]:
    tokens = min(block.tokens for block in blocks)
    if wanted:
        return [cp for cp in wanted if tokens % cp == 0]
    degrees = [1]
    while (
        2 * degrees[-1] <= MOST_CONTEXT
        and tokens % (2 * degrees[-1]) == 0
        and tokens >= 2 * degrees[-1] * LEAST_TOKENS
    ):
        degrees.append(2 * degrees[-1])
    return degrees


def _expert_degrees(blocks: Sequence[Block], dp: int, wanted: Sequence[int]) -> list[int]:
    experts = max(block.experts for block in blocks)
    if not experts:
        return [1]
    return [ep for ep in (wanted or _divisors(experts)) if experts % ep == 0 and dp % ep == 0]


def _chunks(blocks: Sequence[Block], pp: int, wanted: Sequence[int]) -> list[int]:
    if pp == 1:
        return [1]
    # Embedding and head count as a block each where only so the stages come out even.
    pieces = next((n for n in (_depth(blocks), _depth(blocks) + 2) if n % pp == 0), 0)
    if not pieces:
        return [1]
    return [v for v in (wanted or _divisors(pieces // pp)) if pieces % (pp * v) == 0]


def _micro_batches(samples: int, wanted: Sequence[int]) -> list[int]:
    if wanted:
        return [size for size in wanted if samples % size == 0]
    return _divisors(samples)


def nothing_fits(model: ModelConfig, machine: Machine, gpus: int, found: Found) -> str:
    """Why no layout fits, and what would make one fit: more devices, or the host's memory."""
    name = title(model)
    limit = room(machine)
    assert found.nearest is not None
    plan, needed = found.nearest

    def fits(**changes: Any) -> bool:
        return needed_bytes(model, machine, vary(plan, **changes)) <= limit

    says = (
        f"{name} ({totals(model).parameters / 1e9:.1f} billion parameters) fits in no layout on {gpus} {machine.name}: "
        f"the smallest needs {needed / GIB:.1f} GiB of the {limit / GIB:.1f} GiB that a device has to give "
        f"({plan.line()})."
    )
    remedies = []
    more = _enough(model, machine, gpus, plan, limit)
    if more is not None:
        remedies.append(f"use {more} devices or more")
    if plan.sharding != "ddp" and plan.dp > 1 and fits(offload="optimizer"):
        remedies.append("keep the optimizer's states in host memory (offload=optimizer)")
    if plan.algorithm == "adamw" and fits(algorithm="adam8bit"):
        remedies.append("keep its moments in eight bits (algorithm=adam8bit)")
    if plan.recompute not in ("early", "full"):
        remedies.append("recompute blocks (recompute=full)")
    if not remedies:
        remedies.append("use devices with more memory")
    return f"{says} To make it fit: {'; or '.join(remedies)}."


def needed_bytes(model: ModelConfig, machine: Machine, plan: Plan) -> float:
    """Bytes of the fullest device."""
    cpu = machine.device == "cpu"
    return sum(memory(describe(model, plan, machine.device), plan, cpu=cpu).values())


def _enough(model: ModelConfig, machine: Machine, gpus: int, base: Plan, limit: float) -> int | None:
    """The smallest number of devices, by doubling, on which a layout of one sample at a time fits."""
    space = Space(micro_batch=(1,), recompute=("none", "full"), sharding=("zero1", "fsdp"))
    for doublings in range(1, 14):
        devices = gpus << doublings
        for plan in layouts(model, machine, devices, devices, base, space):
            if needed_bytes(model, machine, plan) <= limit:
                return devices
    return None
