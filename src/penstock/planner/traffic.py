"""Exposed seconds of what leaves a device once a step or once a micro-batch: weights and gradients between replicas,
activations between stages, states to host memory; and of the update, which is traffic too."""

from __future__ import annotations

import math

from penstock.config.formats import BYTES
from penstock.config.numerics import numerics_of
from penstock.config.plan import Plan
from penstock.planner.collectives import (
    exposed_seconds,
    gather_seconds,
    group_of,
    reduce_seconds,
    send_seconds,
)
from penstock.planner.memory import held
from penstock.planner.operators import Workload
from penstock.planner.pipeline import stage_blocks
from penstock.planner.rates import Rates
from penstock.planner.states import DeviceShare, accumulation_bytes, update_bytes

IN_PLACE = 0.75
"""Traffic of a CPU's update in place over that of the additions that its bandwidth was measured with: these write to a
third array, whose lines are first read, four accesses for the three that are counted."""
HOST_BYTES_PER_SECOND = 50e9
"""Bandwidth of host memory for one device's share of an update there: eight of them on two sockets of 200 GB/s each."""
BUCKET_BYTES = 25 * 2**20
"""Gradients that replicas reduce in one go."""
LEAST_EXPOSED = 0.1
"""Share of the reduction between shard groups that cannot be overlapped."""


def data_seconds(
    work: Workload,
    rates: Rates,
    plan: Plan,
    mine: DeviceShare,
    blocks: float,
    forward: float,
    backward: float,
) -> float:
    """Seconds per step of gathering weights and reducing gradients over replicas, beside a stage of `blocks` blocks
    that takes `forward` and `backward` seconds for a micro-batch."""
    numerics, found = numerics_of(plan), 0.0
    whole, size = BYTES[numerics.gathered], BYTES[numerics.reduction]
    if plan.pp > 1 and work.tied:
        pair = group_of(rates, 2, plan.tp * plan.cp * plan.dp * (plan.pp - 1))
        found = reduce_seconds(pair, work.tied * size)
    if not mine.gathers:
        return found + _reduced(work, rates, plan, mine, forward, backward)
    group, hides = group_of(rates, mine.replicas, plan.tp), plan.overlap and not rates.cpu
    alike = group_of(rates, mine.expert_replicas, plan.ep if plan.ep > 1 else plan.tp)
    # One block on average: its weights for the forward pass, again for the backward pass, and its gradients.
    gather = scatter = 0.0
    for members, moved in ((group, mine.block_dense), (alike, mine.block_experts)):
        gather += gather_seconds(members, moved * whole, work.pieces)
        scatter += gather_seconds(members, mine.learned * moved * size, work.pieces, scatters=True)
    again = 0.0 if plan.pp > 1 else gather
    each = gather + again + scatter
    if hides:
        each = exposed_seconds(rates, gather, forward / blocks)
        each += exposed_seconds(rates, again + scatter, backward / blocks)
        # The first block's gathering and the last one's scattering have nothing to hide behind.
        each += (gather + scatter) / max(1, work.units)
    # Embedding and head stay from forward to backward. They are gathered before the first block and scattered after
    # the last, behind nothing.
    ends = gather_seconds(group, mine.ends * whole) + gather_seconds(group, mine.ends * size, scatters=True)
    # Filling and emptying flat buffers takes a read and a write of each weight in each pass, of each gradient, and of
    # its division by the number of replicas.
    passes = 1 if plan.pp > 1 else 2
    each += (mine.block_dense + mine.block_experts) * (2 * passes * whole + 4 * size) / rates.memory
    ends += mine.ends * (2 * whole + 4 * size) / rates.memory
    # A pipeline's stage gathers its weights once a step and keeps them; else each micro-batch does.
    times = 1 if plan.pp > 1 else plan.accumulate
    found += times * blocks * each
    found += times * ends
    if plan.sharding == "hsdp":
        # Between the groups, behind what the transfers within them leave of the backward pass.
        outer = group_of(rates, max(1, plan.replicas // mine.replicas), plan.tp * mine.replicas)
        reduced = reduce_seconds(outer, mine.learned * mine.sharded * size)
        left = max(0.0, backward - (again + scatter) * work.depth / plan.pp)
        shown = max(LEAST_EXPOSED * reduced, exposed_seconds(rates, reduced, left))
        found += shown if hides else reduced
    return found


def _reduced(
    work: Workload, rates: Rates, plan: Plan, mine: DeviceShare, forward: float, backward: float
) -> float:
    """Per step: reducing gradients over replicas that hold whole weights, and sending updated ones round."""
    group = group_of(rates, plan.replicas, plan.tp)
    alike = group_of(rates, max(1, plan.replicas * plan.tp // plan.ep), plan.ep)
    numerics, hides = numerics_of(plan), plan.overlap and not rates.cpu
    size, whole, after, earlier = BYTES[numerics.reduction], 0.0, 0.0, 0.0
    for members, each in ((group, mine.held - mine.apart), (alike, mine.apart)):
        parameters = mine.learned * each
        calls = math.ceil(parameters * size / BUCKET_BYTES)
        if plan.sharding == "ddp":
            whole += reduce_seconds(members, parameters * size, calls)
        else:
            whole += gather_seconds(members, parameters * size, calls, scatters=True)
            after += gather_seconds(members, parameters * BYTES[numerics.gathered])
    if not whole:
        return 0.0
    if plan.sharding == "zero2":
        # Gradients cannot be kept whole, so each micro-batch reduces them.
        shown = exposed_seconds(rates, whole, backward) if hides else whole
        earlier = (plan.accumulate - 1) * shown
    if not hides:
        return earlier + whole + after
    last = 1.0 / max(1, work.units // plan.pp)
    behind = max(whole * last, exposed_seconds(rates, whole, backward))
    return earlier + behind + max(after * last, exposed_seconds(rates, after, forward))


def stage_seconds(work: Workload, rates: Rates, plan: Plan, chunk: float) -> float:
    """Seconds per step of sending activations and their gradients between stages, beside a chunk's forward pass of
    `chunk` seconds.

    Each stage receives before it computes: twice per micro-batch and virtual stage, and once more for each stage
    while the pipeline fills and drains.
    """
    one = transfer_seconds(work, rates, plan)
    # Between chunks a transfer can hide behind another micro-batch's forward pass through one, but for its latency.
    hides = plan.overlap and plan.virtual > 1
    shown = rates.constants.node_step_seconds + exposed_seconds(rates, one, chunk) if hides else one
    steady = 2.0 * plan.accumulate * plan.virtual * shown
    return steady + 2.0 * (plan.pp - 1) * one


def transfer_seconds(work: Workload, rates: Rates, plan: Plan) -> float:
    """Seconds of sending one micro-batch's activations from a stage to the next, or their gradients back."""
    block = work.blocks[-1].block
    assert block is not None
    tokens = work.samples * block.samples * work.tokens / plan.cp
    moved = tokens * block.stack.width * BYTES[numerics_of(plan).residual] / plan.tp
    one = send_seconds(rates, plan.tp * plan.cp * plan.dp, moved)
    if not plan.sp and plan.tp > 1:
        one += gather_seconds(group_of(rates, plan.tp, 1), moved * plan.tp)
    return one


def update_seconds(
    work: Workload, rates: Rates, plan: Plan, mine: DeviceShare, *, adds: bool = True
) -> float:
    """Seconds per step of the update, on the device or in host memory, and with `adds` of adding up gradients."""
    moved = mine.kept * update_bytes(plan)
    added = accumulation_bytes(plan, mine) if adds else 0.0
    if plan.offload == "optimizer":
        return moved / HOST_BYTES_PER_SECOND + added / rates.memory
    return (moved * (IN_PLACE if rates.cpu else 1.0) + added) / rates.memory


def offload_seconds(
    work: Workload, rates: Rates, plan: Plan, mine: DeviceShare, forward: float, backward: float
) -> float:
    """Seconds per step of copies to host memory and back, over each device's own link, behind a stage's two passes."""
    m, numerics = plan.accumulate, numerics_of(plan)
    if plan.offload == "none":
        return 0.0
    if plan.offload == "activations":
        blocks = max(stage_blocks(work, plan.pp, plan.virtual)[:3]) / work.depth
        one = blocks * held(work, plan).blocks / rates.host
        return m * (max(0.0, one - forward) + max(0.0, one - backward))
    gradient = BYTES[numerics.reduction]
    if not mine.gathers:
        # Gradients go once a step, updated weights come back, with nothing to hide behind.
        return mine.kept * (gradient + BYTES[numerics.gathered]) / rates.host
    there, back = mine.kept * gradient, (1 if plan.pp > 1 else 2) * mine.kept * BYTES[numerics.weights]
    return m * max(0.0, max(there, back) / rates.host - forward - backward)
