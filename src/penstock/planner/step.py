"""Seconds of one optimizer step: operators into blocks, blocks into stages, stages into a pipeline, replicas into one.

Overlap rules, all of them:

- Forward and backward of different micro-batches never overlap on one device.
- A pipeline of p stages and m micro-batches takes as long as its slowest stage does for all micro-batches, and once
  the other stages: (m-1) max + sum, the others' share divided by the number of virtual stages (Narayanan et al., SC
  2021, section 2.2). For equal stages the bubble is (p-1)/(v m) of the work. Where gradients of weights are put off
  (schedule=zero_bubble), it is what the schedule played through leaves idle.
- Sharded weights are gathered one block ahead: each block takes the longer of its computation and its transfers. A
  pipeline's stage gathers all of its own once a step, and scatters its gradients once.
- Gradients are reduced behind the last micro-batch's backward pass, all but those of the last block.
- Backward, tensor parallel collectives of inputs' gradients, and the second gathering of inputs, hide behind gradients
  of weights; the gathering of outputs' gradients cannot.
- What hides slows what it hides behind: a collective takes its share of the multiprocessors for as long as it lasts.
- On a CPU nothing hides: the cores that compute do the transfers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from penstock.config.numerics import BYTES, numerics_of
from penstock.config.plan import Plan
from penstock.planner.collectives import (
    Group,
    exposed_seconds,
    gather_seconds,
    group_of,
    reduce_seconds,
    send_seconds,
)
from penstock.planner.layout import blocks_by_stage, stage_blocks
from penstock.planner.memory import held
from penstock.planner.operators import COLLECTIVE, MATRIX, Op, Part, Workload
from penstock.planner.pipeline import StageTimes, zero_bubble_idle
from penstock.planner.price import collective_seconds, seconds
from penstock.planner.rates import Rates
from penstock.planner.recompute import computed_again
from penstock.planner.states import Holding, accumulation_bytes, holding, update_bytes, update_launches

PAGE_BYTES = 4096
MAPPED_ALONE_BYTES = 32 * 2**20
"""Blocks at least so large glibc maps on their own and gives back when they are freed, so that each first touch of
their pages faults, step after step: the upper bound of its threshold (mallopt(3), M_MMAP_THRESHOLD)."""
RETURNED_SHARE = 0.25
"""Share of a step's other activations and gradients that glibc hands back to the kernel and faults in again, left to
itself. It depends on what small thing happens to lie on top of the heap when gradients are cleared, and differs between
steps of one process: 0 to 0.3 of the pages were counted with seven models and batches, 0.3 to 0.85 with five large."""
IN_PLACE = 0.75
"""Traffic of a CPU's update in place over that of the additions that its bandwidth was measured with: these write to a
third array, whose lines are first read, four accesses for the three that are counted."""
BUCKET_BYTES = 25 * 2**20
"""Gradients that replicas reduce in one go."""
LEAST_EXPOSED = 0.1
"""Of a reduction between groups of shards, what has nothing left to hide behind."""


_ATTENTION = ("attention", "bmm", "softmax", "pointwise")


class Parts(NamedTuple):
    """Seconds by kind: matrix products, attention, other operators, and exposed collectives."""

    gemm: float = 0.0
    attention: float = 0.0
    pointwise: float = 0.0
    tensor: float = 0.0
    expert: float = 0.0
    context: float = 0.0

    @property
    def total(self) -> float:
        """All kinds together."""
        return sum(self)

    def plus(self, other: Parts, times: float = 1.0) -> Parts:
        """With `other` added so many times."""
        return Parts(*[mine + times * theirs for mine, theirs in zip(self, other)])

    def times(self, factor: float) -> Parts:
        """So many times as long."""
        return Parts(*[factor * mine for mine in self])


class PartTime(NamedTuple):
    """Seconds of one part for one micro-batch. `again` is what the backward pass computes a second time."""

    forward: Parts
    backward: Parts
    again: float
    weights: float
    """Of `backward`, the gradients of weights: what a split backward pass can put off."""
    launches: float

    @property
    def back(self) -> float:
        """Backward, with what is computed again."""
        return self.backward.total + self.again


class Layout(NamedTuple):
    """What of a Plan the time of a part depends on besides its operators."""

    tp: int
    cp: int
    ep: int
    tp_overlap: str
    recompute: str
    every: int
    compiled: bool


def layout_of(plan: Plan) -> Layout:
    """The layout of a plan."""
    return Layout(
        plan.tp,
        plan.cp,
        plan.ep,
        plan.tp_overlap,
        plan.recompute,
        plan.recompute_every,
        plan.compile != "none",
    )


@lru_cache(maxsize=8192)
def part_time(part: Part, rates: Rates, layout: Layout) -> PartTime:
    """The prices of a part's operators, added up."""
    forward, _ = _passed(part.forward, rates, layout)
    backward, weights = _passed(part.backward, rates, layout)
    again, launches = 0.0, float(sum(op.launches for op in (*part.forward, *part.backward)))
    repeated = computed_again(part, layout.recompute, compiled=layout.compiled) if part.block else ()
    if repeated:
        parts, _ = _passed(repeated, rates, layout)
        again = parts.total / layout.every
        launches += sum(op.launches for op in repeated) / layout.every
    return PartTime(forward, backward, again, weights, launches)


def _passed(operators: Iterable[Op], rates: Rates, layout: Layout) -> tuple[Parts, float]:
    """Seconds of one pass by kind, and of the gradients of weights in it."""
    gemm = attention = pointwise = expert = weights = shown = hidden = ring = 0.0
    for op in operators:
        kind = op.kind
        if kind in COLLECTIVE:
            if op.axis == "tensor":
                taken = collective_seconds(op, rates, layout.tp, 1)
                if op.hides:
                    hidden += taken
                else:
                    shown += taken
            elif op.axis == "expert":
                expert += collective_seconds(op, rates, layout.ep, layout.tp * layout.cp)
            else:
                ring += collective_seconds(op, rates, layout.cp, layout.tp)
            continue
        taken = seconds(op, rates)
        if kind in _ATTENTION and op.name.startswith("attention"):
            attention += taken
        elif kind in MATRIX:
            gemm += taken
            if op.over_rows:
                weights += taken
        else:
            pointwise += taken
    context = exposed_seconds(rates, ring, attention) if ring else 0.0
    tensor = shown + hidden
    if tensor:
        tensor = _tensor(rates, layout, shown, hidden, weights)
    return Parts(gemm, attention, pointwise, tensor, expert, context), weights


def _tensor(rates: Rates, layout: Layout, shown: float, hidden: float, weights: float) -> float:
    """Exposed seconds of tensor parallel collectives; a pass without gradients of weights hides none of them, unless
    products are cut into pieces, one per member, of which the first one's transfer stays visible."""
    if layout.tp_overlap == "none" or rates.cpu:
        return shown + hidden
    if layout.tp_overlap == "all":
        first = shown / layout.tp
        if not weights:
            return first + rates.taken * (shown - first)
        hidden, shown = hidden + shown - first, first
    return shown + exposed_seconds(rates, hidden, weights) if hidden else shown


@dataclass(slots=True)
class Step:
    """Seconds of one optimizer step by what takes them, and what the bubble is of."""

    seconds: dict[str, float] = field(default_factory=dict)
    bubble_fraction: float = 0.0
    """Idle seconds of the pipeline over the busy seconds of its slowest stage."""
    forward_seconds: float = 0.0
    """Of one stage and one micro-batch."""
    backward_seconds: float = 0.0
    weight_gradient_seconds: float = 0.0
    """Of `backward_seconds`, the gradients of weights."""

    @property
    def total(self) -> float:
        """The whole step."""
        return sum(self.seconds.values())


class _Stage(NamedTuple):
    """The slowest stage's work for one micro-batch."""

    parts: Parts
    again: float
    ends: float
    """Of the entrance or the exit, where it holds one."""
    forward: float
    backward: float
    weights: float
    others: float
    """What all the other stages take for one micro-batch."""
    data: float
    """Exposed gathering and scattering of sharded weights: per micro-batch, or per step of a pipeline."""
    every: Sequence[tuple[int, StageTimes]]
    """Stages in a row, where gradients of weights are put off."""


def step(
    work: Workload, rates: Rates, plan: Plan, *, waits: bool = False, adds_in_products: bool = False
) -> Step:
    """One optimizer step under `plan`, of which `work` is one micro-batch.

    `waits` says that the devices wait between two steps until the host has read the loss, as some frameworks make them;
    Penstock's own training does not. `adds_in_products` says that the products that make gradients of weights add them
    to those of earlier micro-batches, as Megatron's do: then no pass of its own does.
    """
    sums = _sums(work, rates, layout_of(plan))
    hold = holding(work, plan)
    stage = _stage(work, rates, plan, sums, hold)
    m, parts = plan.accumulate, stage.parts
    # A pipeline's stage gathers its weights once a step and keeps them; else each micro-batch does.
    gathered = (1 if plan.pp > 1 else m) * stage.data
    found = {
        "gemm": m * parts.gemm,
        "attention": m * parts.attention,
        "pointwise": m * parts.pointwise,
        "recompute": m * stage.again,
        "output": m * stage.ends,
        "tensor": m * parts.tensor,
        "expert": m * parts.expert,
        "context": m * parts.context,
        "pipeline": 0.0,
        "bubble": 0.0,
        "data": gathered + _reduction(work, rates, plan, hold, stage),
        "optimizer": _update(work, rates, plan, hold, adds_in_products=adds_in_products),
        "offload": _offload(work, rates, plan, hold, stage) if plan.offload != "none" else 0.0,
        "step": rates.step_seconds if waits and plan.gpus > 1 else 0.0,
        "straggling": 0.0,
        "launch": 0.0,
        "pages": 0.0,
    }
    result = Step(
        found,
        forward_seconds=stage.forward,
        backward_seconds=stage.backward,
        weight_gradient_seconds=stage.weights,
    )
    if plan.pp > 1:
        one = parts.total + stage.again + stage.ends
        bubble = stage.others / plan.virtual
        if plan.schedule == "zero_bubble":
            bubble = zero_bubble_idle(stage.every, m)
        found["bubble"] = bubble
        found["pipeline"] = _transfers(work, rates, plan, stage.forward / plan.virtual)
        result.bubble_fraction = bubble / (m * one)
    replicas = plan.dp * plan.cp
    nodes = -(-replicas * plan.tp // rates.per_node)
    if replicas > 1 and nodes > 1:
        found["straggling"] = rates.straggling * math.log2(nodes) * sum(found.values())
    _launches(work, rates, plan, sums.launches, hold, found)
    return result


def _launches(
    work: Workload, rates: Rates, plan: Plan, each: float, hold: Holding, found: dict[str, float]
) -> None:
    """What the host takes to launch operators. A CPU runs what it launches; a GPU is launched ahead of."""
    launches = plan.accumulate / plan.pp * each
    updates = update_launches(hold.kept, hold.tensors, plan, cpu=rates.cpu)
    if rates.cpu:
        found["launch"] = launches * rates.operator_seconds + updates * rates.launch_seconds
        if plan.host_memory == "release" and rates.page_seconds:
            found["pages"] = faulted_pages(work, plan) * rates.page_seconds
    else:
        found["launch"] = max(0.0, (launches + updates) * rates.launch_seconds - sum(found.values()))


def faulted_pages(work: Workload, plan: Plan) -> float:
    """Pages that one step on a CPU maps anew, where freed memory goes back to the kernel."""
    large = sum(
        count * op.written
        for count, op in work.operators()
        # By its name, torch's sign of an operator that writes in place, and so allocates nothing.
        if op.written >= MAPPED_ALONE_BYTES and not op.name.endswith("_")
    )
    # Gradients are cleared to None, unless they lie in one flat buffer.
    gradients = work.parameters * BYTES[numerics_of(plan).gradients]
    freed = 0.0 if plan.optimizer == "contiguous" else gradients
    kept = sum(held(work, plan).kept.values())
    others = max(0.0, (kept - large) * plan.accumulate + freed)
    return (large * plan.accumulate + RETURNED_SHARE * others) / PAGE_BYTES


class _Sums(NamedTuple):
    """Prices of a workload's parts for one micro-batch: of a block on the mean, and of the ends."""

    parts: Parts
    again: float
    forward: float
    backward: float
    """With what is computed again."""
    weights: float
    entrance: float
    exit: float
    launches: float
    """Of all."""


@lru_cache(maxsize=8192)
def _sums(work: Workload, rates: Rates, layout: Layout) -> _Sums:
    n = max(1, work.depth)
    parts, again, forward, backward, weights, launches = Parts(), 0.0, 0.0, 0.0, 0.0, 0.0
    ends = {"entrance": 0.0, "exit": 0.0}
    for part in work.parts:
        time = part_time(part, rates, layout)
        launches += part.count * time.launches
        if part.name in ends:
            ends[part.name] = time.forward.total + time.back
            continue
        share = part.count / n
        parts = parts.plus(time.forward, share).plus(time.backward, share)
        again += time.again * share
        forward += time.forward.total * share
        backward += time.back * share
        weights += time.weights * share
    return _Sums(parts, again, forward, backward, weights, ends["entrance"], ends["exit"], launches)


def _stage(work: Workload, rates: Rates, plan: Plan, sums: _Sums, hold: Holding) -> _Stage:
    """The slowest stage, and the sum of the others."""
    n = max(1, work.depth)
    parts, again, forward, backward, weights, entrance, exit_, _ = sums
    data = _gathering(work, rates, plan, hold, forward, backward) if hold.gathers else 0.0
    if plan.pp == 1:
        return _Stage(
            parts.times(n),
            n * again,
            entrance + exit_,
            n * forward,
            n * backward,
            n * weights,
            0.0,
            n * data,
            (),
        )
    one = forward + backward
    first, middle, last = stage_blocks(n, plan.pp)
    stages = [(first * one + entrance, first, entrance), (last * one + exit_, last, exit_)]
    if plan.pp > 2:
        stages.append((middle * one, middle, 0.0))
    slowest, count, ends = max(stages)
    every: list[tuple[int, StageTimes]] = []
    if plan.schedule == "zero_bubble":
        # Of the output's three equal products one is the gradient of its weights; the entrance's is half of its work.
        every = [
            (row, (b * forward, b * (backward - weights), b * weights))
            for row, b in blocks_by_stage(n, plan.pp)
        ]
        ahead, behind, late = every[0][1]
        every[0] = (1, (ahead + entrance / 2, behind, late + entrance / 2))
        ahead, behind, late = every[-1][1]
        every[-1] = (1, (ahead + exit_ / 3, behind + exit_ / 3, late + exit_ / 3))
    return _Stage(
        parts.times(count), count * again, ends, count * forward, count * backward, count * weights,
        n * one + entrance + exit_ - slowest, count * data, every,
    )  # fmt: skip


def data_group(rates: Rates, plan: Plan) -> tuple[Group, Group | None]:
    """The replicas that share weights out among them, and, with hsdp, those that hold equal shares.

    Context parallel devices hold the same weights, so they are of the group too.
    """
    size, stride = plan.dp * plan.cp, plan.tp
    if plan.sharding == "hsdp":
        inner = min(plan.shard, size)
        return group_of(rates, inner, stride), group_of(rates, max(1, size // inner), stride * inner)
    return group_of(rates, size, stride), None


def _gathering(
    work: Workload, rates: Rates, plan: Plan, hold: Holding, forward: float, backward: float
) -> float:
    """Exposed seconds per block and micro-batch of gathering weights (twice) and scattering gradients (once)."""
    numerics = numerics_of(plan)
    gather, again, scatter = _sharing(work, rates, plan, hold)
    # Flat buffers are filled and emptied on the device's own time: a read and a write of each weight, of each
    # gradient, and of its division by the number of replicas.
    passes = 1 if plan.pp > 1 else 2
    moved = 2 * passes * BYTES[numerics.gathered] + 4 * BYTES[numerics.reduction]
    copies = (hold.block_dense + hold.block_experts) * moved / rates.memory
    if not plan.overlap or rates.cpu:
        return gather + again + scatter + copies
    exposed = exposed_seconds(rates, gather, forward) + exposed_seconds(rates, again + scatter, backward)
    # The first block's gathering and the last one's scattering have nothing to hide behind.
    return exposed + (gather + scatter) / max(1, work.units) + copies


def _sharing(work: Workload, rates: Rates, plan: Plan, hold: Holding) -> tuple[float, float, float]:
    """Seconds of gathering one block's weights for its forward pass, again for its backward pass, and of scattering its
    gradients, on the mean over blocks."""
    numerics = numerics_of(plan)
    group, _ = data_group(rates, plan)
    alike = group_of(rates, hold.expert_replicas, plan.tp * plan.ep)
    calls = work.units / max(1, work.depth)
    gather = scatter = 0.0
    for members, size in ((group, hold.block_dense), (alike, hold.block_experts)):
        gather += gather_seconds(members, size * BYTES[numerics.gathered], calls)
        scatter += gather_seconds(members, size * BYTES[numerics.reduction], calls)
    return gather, 0.0 if plan.pp > 1 else gather, scatter


def _reduction(work: Workload, rates: Rates, plan: Plan, hold: Holding, stage: _Stage) -> float:
    """Exposed seconds per step of reducing gradients over replicas, and of what else is said once per step."""
    numerics = numerics_of(plan)
    size = BYTES[numerics.reduction]
    hides = plan.overlap and not rates.cpu
    group, outer = data_group(rates, plan)
    found = 0.0
    if plan.pp > 1 and work.tied:
        pair = group_of(rates, 2, plan.tp * plan.cp * plan.dp * (plan.pp - 1))
        found += reduce_seconds(pair, work.tied * size)
    if hold.gathers:
        if outer is not None:
            whole = reduce_seconds(outer, hold.sharded * size)
            # Behind what the transfers within the group leave of the backward pass.
            _, again, scatter = _sharing(work, rates, plan, hold)
            left = max(0.0, stage.backward - (again + scatter) * work.depth / plan.pp)
            found += max(LEAST_EXPOSED * whole, exposed_seconds(rates, whole, left)) if hides else whole
        return found
    if group.size == 1:
        return found
    calls = math.ceil(hold.held * size / BUCKET_BYTES)
    whole = reduce_seconds(group, hold.held * size, calls)
    after = 0.0
    if plan.sharding in ("zero1", "zero2"):
        whole = gather_seconds(group, hold.held * size, calls)
        after = gather_seconds(group, hold.held * BYTES[numerics.gathered])
        if plan.sharding == "zero2":
            # Gradients cannot be kept whole, so each micro-batch reduces them.
            shown = exposed_seconds(rates, whole, stage.backward) if hides else whole
            found += (plan.accumulate - 1) * shown
    if not hides:
        return found + whole + after
    last = 1.0 / max(1, work.units // plan.pp)
    found += max(whole * last, exposed_seconds(rates, whole, stage.backward))
    return found + max(after * last, exposed_seconds(rates, after, stage.forward))


def _transfers(work: Workload, rates: Rates, plan: Plan, chunk: float) -> float:
    """Exposed seconds of activations and their gradients between stages.

    Each stage receives before it computes: twice per micro-batch and virtual stage, and once more for each stage
    while the pipeline fills and drains.
    """
    block = work.blocks[-1].block
    assert block is not None
    moved = work.samples * work.tokens / plan.cp * block.width * BYTES[numerics_of(plan).residual] / plan.tp
    one = send_seconds(rates, plan.tp * plan.cp * plan.dp, moved)
    if not plan.sp and plan.tp > 1:
        one += gather_seconds(group_of(rates, plan.tp, 1), moved * plan.tp)
    # Between chunks a transfer can hide behind another micro-batch's forward pass through one, but for its latency.
    hides = plan.overlap and plan.virtual > 1
    shown = rates.node_step + exposed_seconds(rates, one, chunk) if hides else one
    steady = 2.0 * plan.accumulate * plan.virtual * shown
    return steady + 2.0 * (plan.pp - 1) * one


def _update(work: Workload, rates: Rates, plan: Plan, hold: Holding, *, adds_in_products: bool) -> float:
    """Seconds of the update, on the device or in host memory, of Muon's products, and of adding up gradients."""
    moved = hold.kept * update_bytes(plan)
    added = 0.0 if adds_in_products else accumulation_bytes(plan, hold)
    if plan.offload == "optimizer":
        return moved / rates.host_update + added / rates.memory
    found = (moved * (IN_PLACE if rates.cpu else 1.0) + added) / rates.memory
    if plan.algorithm == "muon":
        # Whole matrices are needed; the devices that hold parts of the same ones share them out among them.
        for part in work.blocks:
            block = part.block
            assert block is not None
            dense = block.newton_schulz_flops(0)
            experts = block.newton_schulz_flops(block.experts / plan.ep) - dense
            flops = dense / hold.replicas + experts / hold.expert_replicas
            found += part.count / plan.pp * flops / plan.tp / rates.product_rate
    return found


def _offload(work: Workload, rates: Rates, plan: Plan, hold: Holding, stage: _Stage) -> float:
    """Exposed seconds of a step's copies to host memory and back, over a link of each device's own."""
    m, numerics = plan.accumulate, numerics_of(plan)
    if plan.offload == "activations":
        one = (
            sum(held(work, plan).blocks.values())
            / work.depth
            * max(stage_blocks(work.depth, plan.pp))
            / rates.host
        )
        return m * (max(0.0, one - stage.forward) + max(0.0, one - stage.backward))
    gradient = BYTES[numerics.reduction]
    if not hold.gathers:
        # Gradients go once a step, updated weights come back, with nothing to hide behind.
        return hold.kept * (gradient + BYTES[numerics.gathered]) / rates.host
    there, back = hold.kept * gradient, (1 if plan.pp > 1 else 2) * hold.kept * BYTES[numerics.weights]
    return m * max(0.0, max(there, back) / rates.host - stage.forward - stage.backward)
