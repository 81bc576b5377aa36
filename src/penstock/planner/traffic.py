"""Exposed seconds of transfers once a step or once a micro-batch: weights and gradients between replicas, activations
between stages, states to host memory; and of the update, which is memory traffic too."""

from __future__ import annotations

import math

from penstock.config.formats import BYTES
from penstock.config.numerics import numerics_of
from penstock.config.plan import Plan
from penstock.planner.memory import pass_bytes
from penstock.planner.operators import Workload
from penstock.planner.pipeline import stage_blocks
from penstock.planner.price import exposed_seconds, gather_seconds, group_of, reduce_seconds, send_seconds
from penstock.planner.rates import Rates
from penstock.planner.states import (
    DeviceShare,
    accumulation_bytes,
    orthogonal_share,
    update_bytes,
    whole_bytes,
)

IN_PLACE = 0.75
"""Factor for the bytes of a CPU's in-place update. Its bandwidth was measured by additions into a third array, whose
cache lines are read first, so that four accesses were counted as three."""
HOST_BYTES_PER_SECOND = 50e9
"""Bandwidth of host memory for one device's update there: eight devices share two sockets of 200 GB/s each."""
BUCKET_BYTES = 25 * 2**20
"""Bytes of gradients that replicas reduce at once."""
LEAST_EXPOSED = 0.1
"""Share of the reduction between shard groups that cannot be overlapped."""


def data_seconds(
    work: Workload, rates: Rates, plan: Plan, share: DeviceShare, blocks: float, forward: float, backward: float
) -> float:  # fmt: skip
    """Exposed seconds per step of gathering weights and reducing gradients over replicas, overlapped with a stage of
    `blocks` blocks that takes `forward` and `backward` seconds for a micro-batch."""
    numerics, total = numerics_of(plan), 0.0
    whole, size = BYTES[numerics.gathered], BYTES[numerics.reduction]
    if plan.pp > 1 and work.tied:
        pair = group_of(rates, 2, plan.tp * plan.cp * plan.dp * (plan.pp - 1))
        total = reduce_seconds(pair, work.tied * size)
    if not share.gathers:
        return total + _reduction_seconds(work, rates, plan, share, forward, backward)
    group, hides = group_of(rates, share.replicas, plan.tp), plan.overlap and not rates.cpu
    alike = group_of(rates, share.expert_replicas, plan.ep if plan.ep > 1 else plan.tp)
    # One block on average: its weights for the forward pass, again for the backward pass, and its gradients.
    dense, sparse, _ = whole_bytes(work, plan, share)
    gather = gather_seconds(group, dense, work.pieces) + gather_seconds(alike, sparse, work.pieces)
    scatter = 0.0
    for members, moved in ((group, share.block_dense), (alike, share.block_experts)):
        scatter += gather_seconds(members, share.learned * moved * size, work.pieces, scatters=True)
    again = 0.0 if plan.pp > 1 else gather
    block = gather + again + scatter
    if hides:
        block = exposed_seconds(rates, gather, forward / blocks)
        block += exposed_seconds(rates, again + scatter, backward / blocks)
        # The first block's gathering and the last one's scattering overlap nothing.
        block += (gather + scatter) / max(1, work.units)
    # Embedding and head stay from forward to backward. They are gathered before the first block and scattered after the
    # last, without overlap.
    ends = gather_seconds(group, share.ends * whole) + gather_seconds(group, share.ends * size, scatters=True)
    if not work.software.shards_in_place:
        # Filling and emptying flat buffers reads and writes each weight in each pass, each gradient, and a separate
        # division of gradients once more.
        passes = 1 if plan.pp > 1 else 2
        gradient = (4 if work.software.divides_gradients or rates.cpu else 2) * size
        gradients = (share.block_dense + share.block_experts) * gradient
        block += (2 * passes * (dense + sparse) + gradients) / rates.memory
        ends += share.ends * (2 * whole + gradient) / rates.memory
    # A pipeline's stage gathers its weights once a step and keeps them; else each micro-batch does.
    times = 1 if plan.pp > 1 else plan.accumulate
    total += times * blocks * block
    total += times * ends
    if plan.gather == "products":
        # Before each forward pass, the scales of all weights: each rank reads its shards, and all reduce the maxima.
        read = share.sharded * BYTES[numerics.weights] / rates.memory
        total += plan.accumulate * (read + reduce_seconds(group, 4.0 * share.tensors))
    if plan.sharding == "hsdp":
        # Between the groups, overlapped with the part of the backward pass that transfers within them leave free.
        outer = group_of(rates, max(1, plan.replicas // share.replicas), plan.tp * share.replicas)
        reduced = reduce_seconds(outer, share.learned * share.sharded * size)
        backward_left = max(0.0, backward - (again + scatter) * work.depth / plan.pp)
        shown = max(LEAST_EXPOSED * reduced, exposed_seconds(rates, reduced, backward_left))
        total += shown if hides else reduced
    return total


def _reduction_seconds(
    work: Workload, rates: Rates, plan: Plan, share: DeviceShare, forward: float, backward: float
) -> float:
    """Seconds per step of reducing gradients over replicas with unsharded weights, and of gathering updated ones."""
    group = group_of(rates, plan.replicas, plan.tp)
    alike = group_of(rates, max(1, plan.replicas * plan.tp // plan.ep), plan.ep)
    numerics, hides = numerics_of(plan), plan.overlap and not rates.cpu
    size, reducing, after, earlier = BYTES[numerics.reduction], 0.0, 0.0, 0.0
    for members, count in ((group, share.parameters - share.lone_experts), (alike, share.lone_experts)):
        parameters = share.learned * count
        calls = math.ceil(parameters * size / BUCKET_BYTES)
        if plan.sharding == "ddp" or work.software.sums_whole:
            reducing += reduce_seconds(members, parameters * size, calls)
        else:
            reducing += gather_seconds(members, parameters * size, calls, scatters=True)
        if plan.sharding != "ddp":
            after += gather_seconds(members, parameters * BYTES[numerics.gathered])
    if not reducing:
        return 0.0
    if plan.sharding == "zero2":
        # Gradients cannot be kept whole, so each micro-batch reduces them.
        shown = exposed_seconds(rates, reducing, backward) if hides else reducing
        earlier = (plan.accumulate - 1) * shown
    if not hides:
        return earlier + reducing + after
    last = 1.0 / max(1, work.units // plan.pp)
    behind = max(reducing * last, exposed_seconds(rates, reducing, backward))
    return earlier + behind + max(after * last, exposed_seconds(rates, after, forward))


def stage_seconds(work: Workload, rates: Rates, plan: Plan, chunk: float) -> float:
    """Seconds per step of sending activations and their gradients between stages, overlapped with a chunk's forward
    pass of `chunk` seconds.

    Each stage receives before it computes: twice per micro-batch and virtual stage, and once more for each stage
    while the pipeline fills and drains.
    """
    transfer = transfer_seconds(work, rates, plan)
    # A transfer between chunks can overlap another micro-batch's forward pass through a chunk, except its latency.
    hides = plan.overlap and plan.virtual > 1
    shown = rates.constants.node_step_seconds + exposed_seconds(rates, transfer, chunk) if hides else transfer
    steady = 2.0 * plan.accumulate * plan.virtual * shown
    return steady + 2.0 * (plan.pp - 1) * transfer


def transfer_seconds(work: Workload, rates: Rates, plan: Plan) -> float:
    """Seconds of sending one micro-batch's activations to the next stage, or their gradients back."""
    block = work.blocks[-1].block
    assert block is not None
    tokens = work.samples * block.samples * work.tokens / plan.cp
    moved = tokens * block.stack.width * BYTES[numerics_of(plan).residual] / plan.tp
    transfer = send_seconds(rates, plan.tp * plan.cp * plan.dp, moved)
    if not plan.sp and plan.tp > 1:
        transfer += gather_seconds(group_of(rates, plan.tp, 1), moved * plan.tp)
    return transfer


def update_seconds(work: Workload, rates: Rates, plan: Plan, share: DeviceShare) -> float:
    """Seconds per step of the update, on the device or in host memory, and of adding up gradients, unless products do;
    without the seconds of `owner_seconds`."""
    moved, added = share.updated * update_bytes(plan, orthogonal_share(work, plan)), 0.0
    if not work.software.adds_in_products:
        added = accumulation_bytes(plan, share, casts=work.software.casts_gradients)
    if plan.offload == "optimizer":
        return moved / HOST_BYTES_PER_SECOND + added / rates.memory
    return (moved * (IN_PLACE if rates.cpu else 1.0) + added) / rates.memory


def offload_seconds(
    work: Workload, rates: Rates, plan: Plan, share: DeviceShare, forward: float, backward: float
) -> float:
    """Seconds per step of copies to host memory and back, over each device's link, overlapped with a stage's passes."""
    m, numerics = plan.accumulate, numerics_of(plan)
    if plan.offload == "none":
        return 0.0
    if plan.offload == "activations":
        blocks = max(stage_blocks(work, plan.pp, plan.virtual)[:3]) / work.depth
        copy_seconds = blocks * pass_bytes(work, plan).blocks / rates.host
        return m * (max(0.0, copy_seconds - forward) + max(0.0, copy_seconds - backward))
    gradient = BYTES[numerics.reduction]
    if not share.gathers:
        # Gradients are sent once a step and updated weights come back, without overlap.
        return share.updated * (gradient + BYTES[numerics.gathered]) / rates.host
    to_host = share.updated * gradient
    from_host = (1 if plan.pp > 1 else 2) * share.updated * BYTES[numerics.weights]
    return m * max(0.0, max(to_host, from_host) / rates.host - forward - backward)
