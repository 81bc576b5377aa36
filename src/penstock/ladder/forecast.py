"""What the planner says of several processes: one rank's step by its operators, and its collectives by the planner's
model of communication. Free of torch.

On GPUs collectives hide behind forward and backward as `penstock.planner.iteration` says. Ranks on one CPU share it:
each has its part of every rate, and nothing hides, for the transfers are done by the cores that compute.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from penstock.config.machine import Machine
from penstock.config.plan import Plan
from penstock.planner.collectives import Group, exposed_seconds, gather_seconds, reduce_seconds
from penstock.planner.iteration import data_group
from penstock.planner.prediction import Prediction, predict_workload
from penstock.planner.rates import Rates, rates_of
from penstock.planner.time import Workload

BUCKET_BYTES = 25 * 2**20
"""Gradients that replicas reduce in one go."""
BACKWARD_SHARE = 2 / 3
"""Of forward and backward, the backward pass: two products for each one."""
_COMPUTING = ("gemm", "attention", "pointwise", "launch", "pages")


@dataclass(frozen=True, slots=True)
class Link:
    """What was measured between the ranks."""

    bandwidth: float
    """Bus bandwidth of a large all-reduce, bytes per second."""
    seconds: float
    """Of a small one."""


def rank_machine(machine: Machine, ranks: int, link: Link) -> Machine:
    """What each of `ranks` processes on this one machine has of it."""
    linked = replace(
        machine,
        devices_per_node=max(ranks, machine.devices_per_node),
        collective_bytes_per_second=link.bandwidth,
    )
    if machine.device != "cpu":
        return linked
    return replace(
        linked,
        peak_flops={name: rate / ranks for name, rate in machine.peak_flops.items()},
        achievable_flops={name: rate / ranks for name, rate in machine.achievable_flops.items()},
        memory_bytes=machine.memory_bytes / ranks,
        memory_bytes_per_second=machine.memory_bytes_per_second / ranks,
        gemm=tuple(replace(s, flops_per_second=s.flops_per_second / ranks) for s in machine.gemm),
        kernels=tuple(replace(s, per_second=s.per_second / ranks) for s in machine.kernels),
    )


def predict_ranks(work: Workload, machine: Machine, plan: Plan, *, blocks: int, link: Link) -> Prediction:
    """One optimizer step of `plan.dp` ranks, each with a micro-batch of `work`, on this one machine.

    `blocks` are gathered one by one where weights are shared out. Seconds are of the slowest rank, bytes of the
    fullest, samples per second of all ranks together.
    """
    mine = rank_machine(machine, plan.dp, link)
    if plan.precision == "O1" and plan.sharding != "ddp":
        # Shards are gathered in half, so that autocast keeps no copies of the whole.
        copies = work.activation_parts.get("cast_weights", 0)
        parts = {name: size for name, size in work.activation_parts.items() if name != "cast_weights"}
        work = replace(work, activation_bytes=work.activation_bytes - copies, activation_parts=parts)
    one = replace(plan, dp=1, sharding="ddp", shard=1, offload="none")
    alone = predict_workload(work, mine, one)
    rates = rates_of(mine, plan)
    group, outer = data_group(rates, plan)
    shares = 1 if plan.sharding == "ddp" else group.size
    seconds = dict(alone.seconds)
    seconds["optimizer"] /= shares
    computing = sum(seconds[part] for part in _COMPUTING) / plan.accumulate
    seconds["data"] = _communication(work, plan, rates, (group, outer), computing, blocks)
    seconds["data"] += _calls(work, plan, blocks) * (link.seconds if rates.cpu else 0.0)
    memory = _memory(work, plan, alone.memory, shares, blocks)
    total = sum(seconds.values())
    slower = sum(alone.seconds.values()) / total
    return replace(
        alone,
        plan=plan,
        iteration_seconds=total,
        samples_per_second=work.samples * plan.accumulate * plan.dp / total,
        memory_bytes=sum(memory.values()),
        fits=not mine.memory_bytes or sum(memory.values()) <= mine.memory_bytes,
        model_flops_per_second_per_gpu=alone.model_flops_per_second_per_gpu * slower,
        mfu=alone.mfu * slower,
        hfu=alone.hfu * slower,
        seconds=seconds,
        memory=memory,
        gpus=plan.dp,
        global_batch=work.samples * plan.accumulate * plan.dp,
    )


def _communication(
    work: Workload,
    plan: Plan,
    rates: Rates,
    groups: tuple[Group, Group | None],
    computing: float,
    blocks: int,
) -> float:
    """Seconds of collectives that show, of one step."""
    group, outer = groups
    backward = computing * BACKWARD_SHARE
    hides = plan.overlap and not rates.cpu

    def shown(transfer: float, behind: float) -> float:
        # Of what hides, the last block's part has nothing left to hide behind.
        return max(transfer / blocks, exposed_seconds(rates, transfer, behind)) if hides else transfer

    if plan.sharding == "ddp":
        return shown(reduce_seconds(group, work.parameters * _gradient_size(plan)), backward)
    gather = gather_seconds(group, work.parameters * _gathered_size(plan))
    scatter = gather_seconds(group, work.parameters * 4.0)
    # Into flat buffers and out of them: each gathered weight and each gradient is written and read once more.
    copies = work.parameters * 2 * (2 * _gathered_size(plan) + 4.0) / rates.memory
    each = shown(gather, computing - backward) + shown(gather + scatter, backward) + copies
    total = plan.accumulate * each
    if outer is not None:
        total += shown(reduce_seconds(outer, work.parameters / group.size * 4.0), backward)
    return total


def _calls(work: Workload, plan: Plan, blocks: int) -> int:
    """Collectives of one step."""
    if plan.sharding == "ddp":
        return math.ceil(work.parameters * _gradient_size(plan) / BUCKET_BYTES)
    units = blocks + 1
    return plan.accumulate * 3 * units + (units if plan.sharding == "hsdp" else 0)


def _gathered_size(plan: Plan) -> int:
    return 4 if plan.precision == "O0" else 2


def _gradient_size(plan: Plan) -> int:
    """Bytes per gradient that replicas reduce: as the weights, or in fp32 once micro-batches have added up."""
    if plan.precision == "O3":
        return 2
    return 2 if plan.precision == "O2" and plan.accumulate == 1 else 4


def _memory(work: Workload, plan: Plan, alone: dict[str, int], shares: int, blocks: int) -> dict[str, int]:
    """Bytes of one rank: replicas keep buckets of gradients beside, shards their part of the states and two blocks
    whole. Under O2 shards are the fp32 weights themselves.
    """
    parts = dict(alone)
    if plan.sharding == "ddp":
        if plan.precision != "O2" or plan.accumulate == 1:
            parts["buckets"] = work.parameters * _gradient_size(plan)
        return parts
    if plan.precision == "O2":
        parts["weights"] = parts.pop("master_weights")
        parts["gradients"] = min(parts["gradients"], work.parameters * 4)
    for name in ("weights", "optimizer", "gradients", "temporary"):
        parts[name] = -(-parts[name] // shares)
    parts["gathered"] = 2 * work.parameters * _gathered_size(plan) // blocks
    return parts
