"""Seconds of one optimizer step on a layout: blocks into stages, stages into a pipeline, replicas into one step.

Overlap rules, all of them:

- Forward and backward of different micro-batches never overlap on one device.
- A pipeline of p stages and m micro-batches takes as long as its slowest stage does for all micro-batches, and once
  the other stages: (m-1) max + sum, the others' share divided by the number of virtual stages (Narayanan et al., SC
  2021, section 2.2). For equal stages the bubble is (p-1)/(v m) of the work. Where gradients of weights are put off
  (schedule=zero_bubble), it is what the schedule played through leaves idle.
- Sharded weights are gathered one block ahead: each block takes the longer of its computation and its transfers.
- Gradients are reduced behind the last micro-batch's backward pass, all but those of the last block.
- What hides slows what it hides behind: a collective takes its share of the multiprocessors for as long as it lasts.
- Tensor parallel collectives follow the rules in `block_time`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.config.plan import Plan
from penstock.planner.block_memory import block_bytes
from penstock.planner.block_time import BlockTime, Parts, block_time
from penstock.planner.collectives import (
    Group,
    exposed_seconds,
    gather_seconds,
    group_of,
    reduce_seconds,
    send_seconds,
)
from penstock.planner.gemm import gemm_seconds
from penstock.planner.holding import (
    expert_replicas,
    gathered_parameters,
    held_parameters,
    kept_parameters,
    sharded_parameters,
)
from penstock.planner.host_time import IN_PLACE
from penstock.planner.layout import blocks_by_stage, stage_blocks
from penstock.planner.pipeline import StageTimes, zero_bubble_idle
from penstock.planner.rates import Rates
from penstock.planner.shapes import Shape
from penstock.planner.states import (
    gradient_size,
    stored_size,
    update_bytes,
    update_launches,
    weight_size,
)

HOST_BYTES_PER_SECOND = 50e9
"""Of host memory, what one device's share of an update there moves: eight of them on two sockets of 200 GB/s each."""
LOSS_BYTES = {"none": 36, "blocks": 36, "whole": 10}
"""Traffic of cross-entropy per number of the output, forward and backward: a cast to fp32, log-softmax, its gradient
and the cast back, each an operator of its own unless the whole model is compiled."""


@dataclass(slots=True)
class Iteration:
    """Seconds of one optimizer step by what takes them, and what the bubble is of."""

    seconds: dict[str, float] = field(default_factory=dict)
    bubble_fraction: float = 0.0
    """Idle seconds of the pipeline over the busy seconds of its slowest stage."""
    forward_seconds: float = 0.0
    """Of one stage and one micro-batch."""
    backward_seconds: float = 0.0
    weight_gradient_seconds: float = 0.0
    """Of `backward_seconds`, the gradients of weights."""
    recompute_share: float = 0.0

    @property
    def total(self) -> float:
        """The whole step."""
        return sum(self.seconds.values())


@dataclass(slots=True)
class _Stage:
    """The slowest stage's work for one micro-batch."""

    parts: Parts
    again: float
    output: float
    forward: float
    backward: float
    weights: float
    """Of `backward`, the gradients of weights."""
    others: float
    """What all the other stages take for one micro-batch."""
    data: float
    """Exposed gathering and scattering of sharded weights, per micro-batch."""
    every: Sequence[tuple[int, StageTimes]] = ()
    """Stages in a row, where gradients of weights are put off."""


Memo = dict[tuple[object, ...], list[BlockTime]]
"""Times of blocks that a search has met: many layouts share them."""


def iteration(
    shape: Shape, rates: Rates, plan: Plan, memo: Memo | None = None, *, held: float | None = None
) -> Iteration:
    """One optimizer step of a model of `shape` under `plan`.

    `held` is the number of parameters of the fullest device, if known. `memo` holds the times of blocks over calls that
    differ in degrees, micro-batch and recomputation only.
    """
    if memo is None:
        times = [block_time(block, rates, plan) for block in shape.blocks]
    else:
        key = (plan.tp, plan.sp, plan.cp, plan.ep, plan.micro_batch, plan.recompute)
        found = memo.get(key)
        times = memo[key] = found or [block_time(block, rates, plan) for block in shape.blocks]
    stage = _stage(shape, rates, plan, times)
    m = plan.accumulate
    parts = stage.parts
    seconds = {
        "gemm": m * parts.gemm,
        "attention": m * parts.attention,
        "pointwise": m * parts.pointwise,
        "recompute": m * stage.again,
        "output": m * stage.output,
        "tensor": m * parts.tensor,
        "expert": m * parts.expert,
        "context": m * parts.context,
        "pipeline": 0.0,
        "bubble": 0.0,
        "data": m * stage.data,
        "optimizer": 0.0,
        "offload": 0.0,
        "step": 0.0,
        "straggling": 0.0,
        "launch": 0.0,
    }
    one = parts.total + stage.again + stage.output + stage.data
    result = Iteration(
        seconds,
        forward_seconds=stage.forward,
        backward_seconds=stage.backward,
        weight_gradient_seconds=stage.weights,
    )
    if plan.pp > 1:
        bubble = stage.others / plan.virtual
        if plan.schedule == "zero_bubble":
            bubble = zero_bubble_idle(stage.every, m)
        seconds["bubble"] = bubble
        seconds["pipeline"] = _transfers(shape, rates, plan)
        result.bubble_fraction = bubble / (m * one)
    held = held_parameters(shape, plan) if held is None else held
    seconds["data"] += _reduction(shape, rates, plan, held, stage)
    kept = kept_parameters(shape, plan, held)
    seconds["optimizer"] = _update(shape, rates, plan, kept) + _accumulation(rates, plan, held)
    if plan.offload != "none":
        seconds["offload"] = _offload(shape, rates, plan, kept, stage)
    if plan.gpus > 1:
        seconds["step"] = rates.step_seconds
    group, outer = data_group(rates, plan)
    replicas = group.size * (outer.size if outer else 1)
    nodes = -(-replicas * plan.tp // rates.per_node)
    if replicas > 1 and nodes > 1:
        seconds["straggling"] = rates.straggling * math.log2(nodes) * sum(seconds.values())
    tensors = kernels = 0.0
    for block, time in zip(shape.blocks, times):
        kernels += time.launches * block.count / plan.pp * m
        if plan.optimizer == "loop":
            tensors += block.tensors * block.count / plan.pp
    kernels += update_launches(kept, tensors, plan)
    seconds["launch"] = (
        max(0.0, kernels * rates.launch_seconds - sum(seconds.values())) if not rates.cpu else 0.0
    )
    return result


def _stage(shape: Shape, rates: Rates, plan: Plan, times: list[BlockTime]) -> _Stage:
    """The slowest stage, and the sum of the others."""
    n = shape.depth
    parts, again, forward, backward, weights = Parts(), 0.0, 0.0, 0.0, 0.0
    for block, time in zip(shape.blocks, times):
        share = block.count / n
        parts.plus(time.forward, share)
        parts.plus(time.backward, share)
        again += time.again.total * share
        forward += time.forward.total * share
        backward += (time.backward.total + time.again.total) * share
        weights += time.weights * share
    data = _gathering(shape, rates, plan, forward, backward) if plan.sharding in ("fsdp", "hsdp") else 0.0
    one = forward + backward + data
    entrance, output = _ends(shape, rates, plan)
    if plan.pp == 1:
        whole = Parts()
        whole.plus(parts, n)
        return _Stage(
            whole, n * again, entrance + output, n * forward, n * backward, n * weights, 0.0, n * data
        )
    first, middle, last = stage_blocks(n, plan.pp)
    stages = [(first * one + entrance, first, entrance), (last * one + output, last, output)]
    if plan.pp > 2:
        stages.append((middle * one, middle, 0.0))
    slowest = max(stages)
    total = n * one + entrance + output
    count = slowest[1]
    whole = Parts()
    whole.plus(parts, count)
    every: list[tuple[int, StageTimes]] = []
    if plan.schedule == "zero_bubble":
        # Of the output's three equal products one is the gradient of its weights; the entrance's is half of its work.
        every = [
            (count, (b * (forward + data), b * (backward - weights), b * weights))
            for count, b in blocks_by_stage(n, plan.pp)
        ]
        ahead, behind, late = every[0][1]
        every[0] = (1, (ahead + entrance / 2, behind, late + entrance / 2))
        ahead, behind, late = every[-1][1]
        every[-1] = (1, (ahead + output / 3, behind + output / 3, late + output / 3))
    return _Stage(
        whole, count * again, slowest[2], count * forward, count * backward, count * weights, total - slowest[0],
        count * data, every,
    )  # fmt: skip


def _ends(shape: Shape, rates: Rates, plan: Plan) -> tuple[float, float]:
    """Seconds of the entrance and of the exit with its loss, forward and backward, for one micro-batch."""
    tokens = max(1, plan.micro_batch * shape.samples_are_tokens // plan.cp)
    entrance = 6.0 * tokens * shape.width * rates.stream / rates.memory
    if shape.entrance_flops:
        entrance += 3.0 * plan.micro_batch * shape.entrance_flops / rates.half
    rows = max(1, plan.micro_batch * shape.output_tokens // plan.cp)
    columns = -(-shape.output // plan.tp)
    output = gemm_seconds(rates, rows, columns, shape.width, linear=False)
    output += gemm_seconds(rates, rows, shape.width, columns, linear=False)
    output += gemm_seconds(rates, shape.width, columns, rows, linear=False, over_rows=True)
    output += float(rows) * columns * LOSS_BYTES[plan.compile] / rates.memory
    if plan.tp > 1:
        group = group_of(rates, plan.tp, 1)
        moved = float(rows) * shape.width * rates.compute
        output += gather_seconds(group, moved) * (2 if plan.sp else 1) + 3 * reduce_seconds(group, rows * 4.0)
        entrance += reduce_seconds(group, moved)
    return entrance, output


def data_group(rates: Rates, plan: Plan) -> tuple[Group, Group | None]:
    """The replicas that share weights out among them, and, with hsdp, those that hold equal shares.

    Context parallel devices hold the same weights, so they are of the group too.
    """
    size, stride = plan.dp * plan.cp, plan.tp
    if plan.sharding == "hsdp":
        inner = min(plan.shard, size)
        return group_of(rates, inner, stride), group_of(rates, max(1, size // inner), stride * inner)
    return group_of(rates, size, stride), None


def _gathering(shape: Shape, rates: Rates, plan: Plan, forward: float, backward: float) -> float:
    """Exposed seconds per block and micro-batch of gathering weights (twice) and scattering gradients (once)."""
    if data_group(rates, plan)[0].size == 1:
        return 0.0
    per_device = sum(b.count * sum(gathered_parameters(b, plan)) for b in shape.blocks) / shape.depth
    gather, again, scatter = _sharing(shape, rates, plan)
    # Flat buffers are filled and emptied on the device's own time: a read and a write of each weight, of each
    # gradient, and of its division by the number of replicas.
    passes = 1 if plan.pp > 1 else 2
    copies = per_device * (2 * passes * weight_size(plan) + 4 * gradient_size(plan)) / rates.memory
    if not plan.overlap:
        return gather + again + scatter + copies
    exposed = exposed_seconds(rates, gather, forward) + exposed_seconds(rates, again + scatter, backward)
    # The first block's gathering and the last one's scattering have nothing to hide behind.
    ends = (gather + scatter) / shape.depth
    return exposed + ends + copies


def _sharing(shape: Shape, rates: Rates, plan: Plan) -> tuple[float, float, float]:
    """Seconds of gathering one block's weights for its forward pass, again for its backward pass, and of scattering its
    gradients, on the mean over blocks."""
    group, _ = data_group(rates, plan)
    _, replicas = expert_replicas(plan)
    alike = group_of(rates, replicas, plan.tp * plan.ep)
    gather = scatter = 0.0
    for block in shape.blocks:
        dense, experts = gathered_parameters(block, plan)
        share = block.count / shape.depth
        for members, size in ((group, dense), (alike, experts)):
            gather += share * gather_seconds(members, size * weight_size(plan))
            scatter += share * gather_seconds(members, size * gradient_size(plan))
    return gather, 0.0 if plan.pp > 1 else gather, scatter


def _reduction(shape: Shape, rates: Rates, plan: Plan, held: float, stage: _Stage) -> float:
    """Exposed seconds per step of reducing gradients over replicas, and of what else is said once per step."""
    group, outer = data_group(rates, plan)
    seconds = 0.0
    if plan.pp > 1 and shape.tied:
        pair = group_of(rates, 2, plan.tp * plan.cp * plan.dp * (plan.pp - 1))
        seconds += reduce_seconds(pair, shape.output * shape.width / plan.tp * gradient_size(plan))
    if plan.sharding in ("fsdp", "hsdp"):
        if outer is not None:
            whole = reduce_seconds(outer, sharded_parameters(shape, plan, held) * gradient_size(plan))
            # Behind what the transfers within the group leave of the backward pass.
            _, again, scatter = _sharing(shape, rates, plan)
            left = max(0.0, stage.backward - (again + scatter) * shape.depth / plan.pp)
            seconds += max(0.1 * whole, exposed_seconds(rates, whole, left)) if plan.overlap else whole
        return seconds
    if group.size == 1:
        return seconds
    size = held * gradient_size(plan)
    whole = reduce_seconds(group, size)
    after = 0.0
    if plan.sharding in ("zero1", "zero2"):
        whole = gather_seconds(group, size)
        after = gather_seconds(group, held * weight_size(plan))
        if plan.sharding == "zero2":
            # Gradients cannot be kept whole, so each micro-batch reduces them.
            shown = exposed_seconds(rates, whole, stage.backward) if plan.overlap else whole
            seconds += (plan.accumulate - 1) * shown
    if not plan.overlap:
        return seconds + whole + after
    last = 1.0 / max(1, shape.depth // plan.pp)
    seconds += max(whole * last, exposed_seconds(rates, whole, stage.backward))
    return seconds + max(after * last, exposed_seconds(rates, after, stage.forward))


def _transfers(shape: Shape, rates: Rates, plan: Plan) -> float:
    """Exposed seconds of activations and their gradients between stages.

    Each stage receives before it computes: twice per micro-batch and virtual stage, and once more for each stage
    while the pipeline fills and drains.
    """
    tokens = plan.micro_batch * shape.samples_are_tokens / plan.cp
    moved = tokens * shape.width * rates.stream / plan.tp
    one = send_seconds(rates, plan.tp * plan.cp * plan.dp, moved)
    if not plan.sp and plan.tp > 1:
        one += gather_seconds(group_of(rates, plan.tp, 1), moved * plan.tp)
    # Between chunks a transfer can hide behind another micro-batch's work, but for its latency.
    shown = rates.node_step if plan.overlap and plan.virtual > 1 else one
    steady = 2.0 * plan.accumulate * plan.virtual * shown
    return steady + 2.0 * (plan.pp - 1) * one


def _update(shape: Shape, rates: Rates, plan: Plan, kept: float) -> float:
    """Seconds of the update of `kept` parameters, on the device or in host memory, and of Muon's products."""
    moved = kept * update_bytes(plan)
    if plan.offload == "optimizer":
        return moved / HOST_BYTES_PER_SECOND
    seconds = moved * (IN_PLACE if rates.cpu else 1.0) / rates.memory
    if plan.algorithm == "muon":
        # Whole matrices are needed; the devices that hold parts of the same ones share them out among them.
        group, replicas = expert_replicas(plan) if plan.sharding != "ddp" else (1, 1)
        for block in shape.blocks:
            experts = block.newton_schulz_flops(block.experts / plan.ep) - block.newton_schulz_flops(0)
            flops = block.newton_schulz_flops(0) / group + experts / replicas
            seconds += block.count / plan.pp * flops / plan.tp / rates.half
    return seconds


def _offload(shape: Shape, rates: Rates, plan: Plan, kept: float, stage: _Stage) -> float:
    """Exposed seconds of a step's copies to host memory and back, over a link of each device's own; `kept` parameters
    are updated there.
    """
    m = plan.accumulate
    if plan.offload == "activations":
        activations = sum(block.count * block_bytes(block, plan)[0] for block in shape.blocks)
        one = activations / shape.depth * max(stage_blocks(shape.depth, plan.pp)) / rates.host
        return m * (max(0.0, one - stage.forward) + max(0.0, one - stage.backward))
    if plan.sharding not in ("fsdp", "hsdp"):
        # Gradients go once a step, updated weights come back, with nothing to hide behind.
        return kept * (gradient_size(plan) + weight_size(plan)) / rates.host
    there, back = kept * gradient_size(plan), (1 if plan.pp > 1 else 2) * kept * stored_size(plan)
    return m * max(0.0, max(there, back) / rates.host - stage.forward - stage.backward)


def _accumulation(rates: Rates, plan: Plan, held: float) -> float:
    """Adding each micro-batch's gradients to those of the step: both are read, one is written."""
    if plan.accumulate == 1 and plan.pp == 1:
        return 0.0
    sharded = plan.dp * plan.cp if plan.sharding in ("fsdp", "zero2") else 1
    if plan.sharding == "hsdp":
        sharded = plan.shard
    size = gradient_size(plan)
    return plan.accumulate * held / sharded * (2 * size + weight_size(plan)) / rates.memory
