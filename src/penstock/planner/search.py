"""Every legal layout of a model on a number of devices: predicted, ranked, with reasons why the others are slower.

The search is exhaustive over degrees, micro-batches, interleaving, sharding and recomputation, except for fixed fields.
Memory is predicted first, because that is cheap and rules most layouts out; block times are cached and shared between
layouts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

from penstock.config import rules
from penstock.config.convert import Count, require
from penstock.config.machine import Machine
from penstock.config.model import ModelConfig, stacks, title
from penstock.config.plan import BASELINE, Plan
from penstock.errors import ConfigError, OutOfMemory
from penstock.planner.describe import describe, totals
from penstock.planner.layouts import AXES, SEARCHED, Space, depth, divisors, layouts, stages, vary
from penstock.planner.loads import EVEN
from penstock.planner.memory import memory, pass_bytes
from penstock.planner.operators import Workload, counted_tokens
from penstock.planner.prediction import Prediction, prediction_of, room
from penstock.planner.rates import rates_of
from penstock.planner.recompute import allowed_bytes
from penstock.report.page import cell
from penstock.report.units import GIB

_FAR = 64
"""How far from the requested number of devices an alternative is searched."""
_TRIES, _PARTS = 6, 64
"""Number of attempts to reduce a budget until it fits, and the parts of a GiB to which it is rounded down."""
_SECONDS = attrgetter("iteration_seconds")
_REST = attrgetter(*(name for name in AXES if name != "micro_batch"))


class Layouts(list[Prediction]):
    """The layouts that a search found to fit, the fastest first, and counts of all: a list that a notebook shows as a
    page."""

    def __init__(self, fitting: Iterable[Prediction] = (), *, tried: int = 0, too_large: int = 0) -> None:
        super().__init__(fitting)
        self.tried, self.too_large = tried, too_large
        self.nearest: tuple[Plan, float] | None = None
        """The layout that needs least memory among those that do not fit, and its bytes."""

    def _repr_html_(self) -> str:
        """HTML for a notebook."""
        return cell(self)


def search(
    model: ModelConfig, machine: Machine, gpus: int, *, global_batch: int | None = None, base: Plan | None = None,
    fixed: frozenset[str] = frozenset(), space: Space | None = None, keep: int | None = 50,
    uneven: Mapping[int, float] = EVEN, name: str = "",
) -> Layouts:  # fmt: skip
    """The layouts of `model` on `gpus` devices of `machine` that fit, fastest first, at most `keep` of them. An odd
    micro-batch comes first only if it wins by more than the predictions' error.

    `base` has the fields that are not searched (precision, attention, compilation, optimizer), and the searched fields
    that `fixed` names; `global_batch` defaults to a size that keeps each layout's devices busy, at least one sample per
    replica. `name` is the model's name in messages where it is not a preset. Raises OutOfMemory saying what would make
    it fit where nothing does, and ConfigError where no degrees multiply to `gpus`.
    """
    result = explore(
        model, machine, gpus, global_batch=global_batch, base=base, fixed=fixed, space=space, keep=keep,
        uneven=uneven,
    )  # fmt: skip
    if not result:
        raise OutOfMemory(_nothing_fits(model, machine, gpus, result, uneven, global_batch, fixed, name))
    return result


def default_base(model: ModelConfig, machine: Machine, gpus: int) -> Plan:
    """The Plan that a search starts from by default: half precision with master weights (for an image model on one
    device, autocast), and fused kernels.
    """
    if machine.device == "cpu":
        return Plan(optimizer="fused")
    bf16, sinks = "bf16" in machine.peak_flops, any(stack.sinks for stack in stacks(model))
    return Plan(
        precision="O1" if gpus == 1 and model.graph.vision and bf16 else "O2", dtype="bf16" if bf16 else "fp16",
        optimizer="fused", attention="sdpa" if sinks else "flash" if bf16 else "efficient", compile="blocks",
    )  # fmt: skip


class Base(NamedTuple):
    """The settings that a search starts from, of a Plan line."""

    plan: Plan
    fixed: frozenset[str]
    """The fields that the line names."""
    assumed: str
    """The default settings for fields that the line leaves open; empty for none."""


def base_of(line: str | None, model: ModelConfig, machine: Machine, gpus: int) -> Base:
    """The settings of a Plan line. A line that names no precision is completed from `default_base`, unless it is the
    word `baseline`. Raises ConfigError as `Plan.parse`."""
    usual = default_base(model, machine, gpus)
    plan, fixed = Plan.parse(line or ""), Plan.named(line or "")
    if "precision" in fixed or BASELINE in (line or "").split():
        return Base(plan, fixed, "")
    names = ("precision", "dtype", "optimizer", "attention", "compile")
    taken = {name: getattr(usual, name) for name in names if name not in fixed}
    plan = replace(plan, **taken)
    return Base(plan, fixed, "" if line is None else replace(Plan(), **taken).line())


def explore(
    model: ModelConfig, machine: Machine, gpus: int, *, global_batch: int | None = None, base: Plan | None = None,
    fixed: frozenset[str] = frozenset(), space: Space | None = None, keep: int | None = 50,
    uneven: Mapping[int, float] = EVEN,
) -> Layouts:  # fmt: skip
    """Search as `search` does, but return an empty list where nothing fits. Raises ConfigError as `search` does."""
    require("gpus", gpus, Count)
    require("global_batch", global_batch, Count | None)
    require("keep", keep, Count | None)
    base = base or default_base(model, machine, gpus)
    problems = rules.problems(base, model, machine, degrees=False)
    if problems:
        raise ConfigError(problems)
    batch = global_batch or default_batch(model, gpus)
    rates, parameters = rates_of(machine, base), totals(model).parameters
    too_large: dict[tuple[object, ...], int] = {}
    limit, result = room(machine), Layouts()
    fitting: list[Prediction] = []

    def legal(devices: int, samples: int) -> Iterator[Plan]:
        return layouts(model, machine, devices, samples, base, space or Space(), fixed)

    for plan in legal(gpus, batch):
        result.tried += 1
        # If a micro-batch does not fit, a larger one does not either: nothing else in the plan shrinks with it.
        rest = _REST(plan)
        if plan.micro_batch >= too_large.get(rest, plan.micro_batch + 1):
            result.too_large += 1
            continue
        work = describe(model, plan, machine, uneven=uneven)
        if plan.recompute == "budget" and not plan.budget:
            plan = _budgeted(work, plan, limit, cpu=rates.cpu)
        parts = memory(work, plan, cpu=rates.cpu)
        needed_size = sum(parts.values())
        if needed_size > limit:
            too_large[rest] = plan.micro_batch
            result.too_large += 1
            if result.nearest is None or needed_size < result.nearest[1]:
                result.nearest = (plan, needed_size)
            continue
        fitting.append(prediction_of(work, machine, plan, rates, parameters, parts=parts))
        if keep is not None and len(fitting) > 40 * keep:
            fitting = sorted(fitting, key=_SECONDS)[:keep]
    if not result.tried:
        fixed_fields = [f"{name}={getattr(base, name)}" for name in SEARCHED if name in fixed]
        with_fields = f" with {', '.join(fixed_fields)}" if fixed_fields else ""
        near = _neighbours(model, gpus, batch, machine.devices_per_node, lambda n, b: any(legal(n, b)))
        raise ConfigError(
            f"No layout has {gpus} devices and {batch} samples a step{with_fields}: tensor parallel degrees "
            f"must divide the heads, stages must divide the {depth(model)} blocks, and replicas the samples. {near}"
        )
    result += _even_first(sorted(fitting, key=_SECONDS)[:keep])
    return result


def _budgeted(work: Workload, plan: Plan, limit: float, *, cpu: bool) -> Plan:
    """The plan with the recomputation budget that fills the `limit`; 0, the least, if none fits."""
    if math.isinf(limit):
        return vary(plan, recompute="none")
    budget = limit
    for _ in range(_TRIES):
        plan = vary(plan, budget=max(0.0, math.floor(budget / GIB * _PARTS) / _PARTS))
        over = sum(memory(work, plan, cpu=cpu).values()) - limit
        if over <= 0 or not plan.budget:
            break
        kept_bytes = pass_bytes(work, plan).blocks / allowed_bytes(work, plan) * plan.budget * GIB
        budget = min(budget, kept_bytes) - over
    return plan


def _neighbours(
    model: ModelConfig, gpus: int, batch: int, per_node: int, possible: Callable[[int, int], bool]
) -> str:
    """The global batches next to `batch` that have a layout on `gpus` devices, and the numbers of devices next to
    `gpus` that have a layout for `batch`."""
    degrees = itertools.product(divisors(min(gpus, per_node)), stages(model, gpus))
    replicas = {gpus // (tp * pp) for tp, pp in degrees if gpus % (tp * pp) == 0}
    # For each number of replicas, the next batch below and above.
    multiples = {count: batch // count * count for count in replicas}
    below = sorted({low for low in multiples.values() if 0 < low < batch}, reverse=True)
    above = sorted({low + count for count, low in multiples.items() if low + count > batch})
    batches = [next((b for b in side if possible(gpus, b)), None) for side in (below, above)]
    fewer, more = range(gpus - 1, max(0, gpus - _FAR), -1), range(gpus + 1, gpus + _FAR)
    devices = [next((n for n in side if possible(n, batch)), None) for side in (fewer, more)]
    remedies = [
        f"{words} {' or '.join(str(number) for number in numbers if number is not None)}"
        for words, numbers in (("global batch", batches), ("number of devices", devices))
        if any(number is not None for number in numbers)
    ]
    words = ", or the ".join(remedies)
    return f"Try the {words}." if words else "Try another number of devices, or another batch."


def _even_first(ranked: list[Prediction]) -> list[Prediction]:
    """Predictions, with an odd micro-batch first only if it wins by more than the error between predictions of one
    model: kernels are made for even sizes, and the loss of odd ones in them is not predicted."""
    if not ranked or ranked[0].interval is None or not _odd(ranked[0]):
        return ranked
    equal = ranked[0].iteration_seconds * (1 + ranked[0].interval.spread)
    even = next((i for i, prediction in enumerate(ranked) if not _odd(prediction)), 0)
    if ranked[even].iteration_seconds > equal:
        return ranked
    return [ranked[even], *ranked[:even], *ranked[even + 1 :]]


def _odd(prediction: Prediction) -> bool:
    return prediction.plan.micro_batch > 1 and prediction.plan.micro_batch % 2 == 1


def default_batch(model: ModelConfig, gpus: int) -> int:
    """Default number of samples of a step: a power of two near four million tokens, at least one per device."""
    target = max(gpus, 2**22 // max(1, counted_tokens(model)))
    batch = gpus
    while batch * 2 <= target:
        batch *= 2
    return batch


def _nothing_fits(
    model: ModelConfig, machine: Machine, gpus: int, result: Layouts, uneven: Mapping[int, float],
    global_batch: int | None, fixed: frozenset[str], name: str,
) -> str:  # fmt: skip
    """The reason why no layout fits, and what would make one fit: more devices, or the host's memory."""
    limit = room(machine)
    assert result.nearest is not None
    plan, smallest = result.nearest

    def fits(**changes: Any) -> bool:
        return needed_bytes(model, machine, vary(plan, **changes), uneven) <= limit

    size = f"{totals(model).parameters / 1e9:.1f} billion parameters"
    problem = (
        f"{name or title(model)} ({size}) fits in no layout on {gpus} {machine.name}: the smallest needs "
        f"{smallest / GIB:.1f} GiB and a device has room for {limit / GIB:.1f} GiB ({plan.line()})."
    )
    more = _enough(model, machine, gpus, plan, fixed, global_batch, uneven)
    shards = plan.sharding != "ddp" and plan.dp > 1
    remedies = {
        f"use {more} devices or more": more is not None,
        "keep the optimizer's states in host memory (offload=optimizer)": shards
        and fits(offload="optimizer"),
        "recompute blocks (recompute=full)": plan.recompute not in ("early", "full")
        and fits(recompute="full"),
    }
    words = [remedy for remedy, helps in remedies.items() if helps] or ["use devices with more memory"]
    return f"{problem} To make it fit: {'; or '.join(words)}."


def needed_bytes(
    model: ModelConfig, machine: Machine, plan: Plan, uneven: Mapping[int, float] = EVEN
) -> float:
    """Bytes of the fullest device."""
    cpu = machine.device == "cpu"
    work = describe(model, plan, machine, uneven=uneven)
    return sum(memory(work, plan, cpu=cpu).values())


def _enough(
    model: ModelConfig, machine: Machine, gpus: int, base: Plan, fixed: frozenset[str], global_batch: int | None,
    uneven: Mapping[int, float],
) -> int | None:  # fmt: skip
    """A number of devices on which the same search finds a layout that fits: the smallest if that is within a node,
    else a number of whole nodes, at most a sixteenth above the smallest."""
    space = Space(micro_batch=(1,), recompute=("none", "early"), sharding=("zero1", "fsdp"))
    limit, node = room(machine), machine.devices_per_node

    def fits(devices: int) -> bool:
        batch = global_batch or default_batch(model, devices)
        plans = layouts(model, machine, devices, batch, base, space, fixed)
        return any(needed_bytes(model, machine, plan, uneven) <= limit for plan in plans)

    fewest = next((gpus << doublings for doublings in range(1, 14) if fits(gpus << doublings)), None)
    if fewest is None:
        return None
    step = max(1, fewest // 32) if fewest <= node else node * max(1, fewest // 32 // node)
    between = range(fewest // 2 // step * step + step, fewest, step)
    return next((devices for devices in between if fits(devices)), fewest)
