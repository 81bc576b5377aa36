"""Every legal layout of a model on so many devices: predicted, ranked, and why the others lose.

The search is exhaustive over degrees, micro-batches, interleaving, sharding and recomputation, but for what is fixed.
Memory comes first, because it is cheap and rules most layouts out; times of blocks are shared between layouts that have
them in common.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any

from penstock.config import rules
from penstock.config.convert import Count, require
from penstock.config.machine import Machine
from penstock.config.model import ModelConfig, ViTConfig, sequences, stacks, title
from penstock.config.plan import Plan
from penstock.errors import ConfigError, OutOfMemory
from penstock.planner.describe import attention_form, describe, totals
from penstock.planner.memory import held, memory
from penstock.planner.operators import Workload
from penstock.planner.prediction import Prediction, predicted, room
from penstock.planner.rates import rates_of
from penstock.planner.recompute import allowed_bytes
from penstock.planner.shapes import counted_tokens

LEAST_TOKENS = 8192
CONTEXT_DEGREES = (1, 2, 4, 8, 16)
GIB = 2**30
_FAR = 64
"""How far from the number of devices that was asked for another one is looked for."""
_TRIES, _PARTS = 6, 64
"""How often a budget is made smaller until it fits, and parts of a GiB that it is told in."""
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

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        # By name, because it imports this module.
        shown: str = importlib.import_module("penstock.planner.show").found_cell(self)
        return shown


class Layouts(list[Prediction]):
    """The layouts that a search found, the fastest first: a list that a notebook shows as a page."""

    def __init__(self, found: Found) -> None:
        super().__init__(found.predictions)
        self.found = found

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return self.found._repr_html_()


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
) -> Layouts:
    """The layouts of `model` on `gpus` devices of `machine` that fit, fastest first, at most `keep` of them. An odd
    micro-batch comes first only if it wins by more than the predictions' error.

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
    return Layouts(found)


def default_base(machine: Machine, *, trainable: bool = False) -> Plan:
    """What a search holds fixed unless told otherwise: half precision with master weights, and fused kernels.

    `trainable` keeps to what `penstock train` can run: autocast in place of master weights.
    """
    if machine.device == "cpu":
        return Plan(optimizer="fused")
    bf16 = "bf16" in machine.peak_flops
    return Plan(
        precision="O1" if trainable and bf16 else "O2", dtype="bf16" if bf16 else "fp16", optimizer="fused",
        attention="flash" if bf16 else "efficient", compile="blocks",
    )  # fmt: skip


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
) -> Found:
    """As `search`, with what became of the layouts that lose. Raises ConfigError as it does."""
    require("gpus", gpus, Count)
    base = base or default_base(machine, trainable=gpus == 1 and isinstance(model, ViTConfig))
    problems = rules.problems(base, model, machine, degrees=False)
    if problems:
        raise ConfigError(problems)
    batch = global_batch or default_batch(model, gpus)
    rates, parameters = rates_of(machine, base), totals(model).parameters
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
        if plan.recompute == "budget" and not plan.budget:
            plan = _budgeted(work, plan, limit, cpu=rates.cpu)
        parts = memory(work, plan, cpu=rates.cpu)
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
        given = [f"{name}={getattr(base, name)}" for name in _SEARCHED if name in fixed]
        kept = f" with {', '.join(given)}" if given else ""
        raise ConfigError(
            f"No layout has {gpus} devices and {batch} samples a step{kept}: tensor parallel degrees "
            f"must divide the heads, stages must divide the {_depth(model)} blocks, and replicas the samples. "
            f"{_neighbours(model, machine, gpus, batch, base, space or Space(), fixed)}"
        )
    found.predictions = _even_first([one for _, _, one in sorted(ranked)[:keep]])
    return found


def _budgeted(work: Workload, plan: Plan, limit: float, *, cpu: bool) -> Plan:
    """With a budget of recomputation that fills the `limit`; 0, which is the least, where nothing does."""
    if math.isinf(limit):
        return vary(plan, recompute="none")
    budget = limit
    for _ in range(_TRIES):
        plan = vary(plan, budget=max(0.0, math.floor(budget / GIB * _PARTS) / _PARTS))
        over = sum(memory(work, plan, cpu=cpu).values()) - limit
        if over <= 0 or not plan.budget:
            break
        kept = held(work, plan).blocks / allowed_bytes(work, plan) * plan.budget * GIB
        budget = min(budget, kept) - over
    return plan


def _neighbours(
    model: ModelConfig,
    machine: Machine,
    gpus: int,
    batch: int,
    base: Plan,
    space: Space,
    fixed: frozenset[str],
) -> str:
    """The global batches next to `batch` that have a layout on `gpus` devices, and the numbers of devices next to
    `gpus` that have one of `batch`."""

    def possible(devices: int, samples: int) -> bool:
        return next(layouts(model, machine, devices, samples, base, space, fixed), None) is not None

    degrees = itertools.product(_divisors(min(gpus, machine.devices_per_node)), _stages(model, gpus))
    replicas = {gpus // (tp * pp) for tp, pp in degrees if gpus % (tp * pp) == 0}
    # Of each number of replicas, what is next below and above.
    multiples = {count: batch // count * count for count in replicas}
    below = sorted({low for low in multiples.values() if 0 < low < batch}, reverse=True)
    above = sorted({low + count for count, low in multiples.items() if low + count > batch})
    batches = [next((b for b in side if possible(gpus, b)), None) for side in (below, above)]
    fewer, more = range(gpus - 1, max(0, gpus - _FAR), -1), range(gpus + 1, gpus + _FAR)
    devices = [next((n for n in side if possible(n, batch)), None) for side in (fewer, more)]
    found = [
        f"{words} {' or '.join(str(number) for number in numbers if number is not None)}"
        for words, numbers in (("global batch", batches), ("number of devices", devices))
        if any(number is not None for number in numbers)
    ]
    return (
        f"Try the {', or the '.join(found)}." if found else "Try another number of devices, or another batch."
    )


def _even_first(ranked: list[Prediction]) -> list[Prediction]:
    """With an odd micro-batch first only where it wins by more than predictions of one model are off: kernels are made
    for even ones, and what an odd one loses in them is not predicted."""
    if not ranked or ranked[0].interval is None or not _odd(ranked[0]):
        return ranked
    equal = ranked[0].iteration_seconds * (1 + ranked[0].interval.apart)
    even = next((i for i, one in enumerate(ranked) if not _odd(one)), 0)
    if ranked[even].iteration_seconds > equal:
        return ranked
    return [ranked[even], *ranked[:even], *ranked[even + 1 :]]


def _odd(one: Prediction) -> bool:
    return one.plan.micro_batch > 1 and one.plan.micro_batch % 2 == 1


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
    if "selective" in space.recompute and attention_form(base, model, machine.device) == "fused":
        # Nothing keeps scores that could be computed again.
        space = replace(space, recompute=tuple(kind for kind in space.recompute if kind != "selective"))
    per_node, experts = machine.devices_per_node, max(stack.experts for stack in stacks(model))
    degrees = itertools.product(
        space.tp or _divisors(min(gpus, per_node)), space.pp or _stages(model, gpus),
        space.cp or _context_degrees(model), space.ep or _divisors(max(1, experts)),
    )  # fmt: skip
    for tp, pp, cp, ep in degrees:
        dp = gpus // (tp * pp * cp)
        if dp * tp * pp * cp != gpus or batch % dp:
            continue
        corner = vary(
            base, tp=tp, pp=pp, cp=cp, dp=dp, ep=ep, sharding="ddp", shard=1, sp=False, virtual=1, schedule="1f1b"
        )  # fmt: skip
        if not rules.problems(corner, model):
            plain = base.schedule if base.schedule in ("gpipe", "zero_bubble") else "1f1b"
            for plan in _within(model, corner, machine, batch // dp, space, plain):
                if all(getattr(plan, name) == value for name, value in held.items()):
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
    splits = sorted({sp and legal(sp=True) for sp in space.sp})
    chunks = _chunks(model, corner.pp, space.virtual)
    sizes = [size for size in space.micro_batch or _divisors(samples) if samples % size == 0]
    for micro, virtual, (sharding, shard), kind, sp in itertools.product(
        sizes, chunks, shardings, space.recompute, splits
    ):
        if virtual == 1 or samples // micro % corner.pp == 0:
            yield vary(
                corner, micro_batch=micro, accumulate=samples // micro, virtual=virtual,
                schedule="interleaved" if virtual > 1 else plain, sharding=sharding, shard=shard, recompute=kind, sp=sp,
            )  # fmt: skip


def _shardings(corner: Plan, per_node: int, space: Space) -> Iterator[tuple[str, int]]:
    """Kinds of sharding, with the replicas of a group of hsdp: such as are neither one nor all of them."""
    replicas = corner.dp * corner.cp
    if replicas == 1:
        # One device alone shares nothing out, whatever the kind is that was asked for.
        only = space.sharding[0] if len(space.sharding) == 1 else "ddp"
        yield only if only != "hsdp" else "ddp", 1
        return
    sizes = space.shard or [max(1, per_node) << i for i in range(6)]
    for kind in space.sharding:
        if kind != "hsdp":
            yield kind, 1
        else:
            yield from ((kind, size) for size in sizes if 1 < size < replicas)


def _divisors(number: int) -> list[int]:
    small = [i for i in range(1, math.isqrt(number) + 1) if number % i == 0]
    return small + [number // i for i in reversed(small) if i * i != number]


def _depth(model: ModelConfig) -> int:
    return sum(stack.depth for stack in stacks(model))


def _stages(model: ModelConfig, gpus: int) -> list[int]:
    """Numbers of stages that share the blocks out evenly, entrance and exit counted or not."""
    n = _depth(model)
    return [p for p in range(1, min(n, gpus) + 1) if n % p == 0 or (p > 2 and (n + 2) % p == 0)]


def _context_degrees(model: ModelConfig) -> list[int]:
    """Those that leave each device enough of the tokens."""
    most = max(1, min(sequences(model)) // LEAST_TOKENS)
    return [degree for degree in CONTEXT_DEGREES if degree <= most]


def _chunks(model: ModelConfig, pp: int, wanted: Sequence[int]) -> list[int]:
    """Numbers of equal chunks of a stage. Embedding and head count as a block each where only so the stages come out
    even."""
    if pp == 1:
        return [1]
    pieces = next((n for n in (_depth(model), _depth(model) + 2) if n % pp == 0), pp)
    return [v for v in (wanted or _divisors(pieces // pp)) if pieces % (pp * v) == 0]


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
