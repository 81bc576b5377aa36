"""Weights, gradients and optimizer states on each device of a layout, and the traffic of one update.

Muon's products and transfers are operators: of the devices that share a matrix, one (its owner) orthogonalises the
whole matrix; it gathers the update and scatters the result in bf16 (`penstock.optim.muon`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from penstock.config.formats import BYTES
from penstock.config.numerics import numerics_of
from penstock.config.optimizers import OPTIMIZERS
from penstock.config.plan import Plan
from penstock.planner.operators import COLLECTIVE, MATRIX, Op, Workload
from penstock.planner.pipeline import stage_blocks
from penstock.planner.price import gather_seconds, group_of, seconds
from penstock.planner.rates import Rates, rates_of

HOST_LAUNCHES = {"loop": 26, "foreach": 22, "fused": 12, "contiguous": 5}
"""Small operators of a CPU's update per tensor: clearing the gradient, its norm, the step counter, the update, and
Python, which is most of it. Counted in seconds of ViT-digits' update, less the bytes that it moves."""
ORTHOGONALISING = 19
"""Operators of Newton–Schulz iterations on one matrix: its cast, norm, limit and division, and five times three."""
HOST_UPDATE_LAUNCHES = 150
"""The same per update: with eight elements in each tensor, 20 to 320 tensors took 0.2 ms beyond their own share."""
MULTI_TENSOR_ELEMENTS = 320 * 65536
"""Elements that one launch of a multi-tensor operator covers: 320 thread blocks of 65,536 each."""
ITERATIONS = 5
_HALF = 2.0


class DeviceShare(NamedTuple):
    """Parameters of the largest stage on one device."""

    parameters: float
    """Parameters before data parallel sharding."""
    sharded: float
    """Parameters on this device after sharding."""
    updated: float
    """Parameters that this device updates."""
    learned: float
    """Share of the parameters that learn."""
    tensors: float
    """Number of tensors that hold these parameters."""
    replicas: int
    """Replicas that weights are sharded over."""
    expert_replicas: int
    """Number of devices that hold the same experts, over which each expert is sharded."""
    lone_experts: float
    """Parameters of experts, if they are replicated on other devices than the rest; else 0."""
    gathers: bool
    """Whether weights are gathered for each pass."""
    block_dense: float
    """Average parameters of one block without its experts, gathered from the replicas that hold shards."""
    block_experts: float
    """Parameters of the block's experts, gathered from fewer replicas; 0 if no other replica holds the same experts."""
    ends: float
    """Gathered parameters of entrance and exit if one stage has both, else of the larger."""


def device_share(work: Workload, plan: Plan) -> DeviceShare:
    """Parameters on each device of a layout."""
    group = min(plan.shard, plan.replicas) if plan.sharding == "hsdp" else plan.replicas
    sharding = plan.sharding if plan.replicas > 1 else "ddp"
    # Replicas that hold the same experts: `ep` has split experts over all devices of a stage.
    alike = group if plan.ep == 1 else max(1, group * plan.tp // plan.ep)
    return _device_share(work, plan.pp, plan.virtual, group, alike, sharding)


@lru_cache(maxsize=8192)
def _device_share(
    work: Workload, pp: int, virtual: int, group: int, alike: int, sharding: str
) -> DeviceShare:
    ends = [part.parameters for part in work.parts if part.block is None]
    parameters, depth, end = float(work.parameters), max(1, work.depth), sum(ends)
    experts = float(sum(part.count * part.experts for part in work.blocks))
    dense, sparse = (parameters - end - experts) / depth, experts / depth
    if not work.depth:
        dense, end = end, 0
    elif pp > 1:
        first, middle, last, _ = stage_blocks(work, pp, virtual, "learned")
        entrance, exit_ = ends[0], ends[1] + work.tied
        block, end = dense + sparse, max(entrance, exit_)
        parameters = max(first * block + entrance, middle * block, last * block + exit_)
        experts = sparse * max(stage_blocks(work, pp, virtual, "experts")[:3])
    # Experts are sharded over fewer replicas, for ep has split them already.
    sharded = (parameters - experts) / group + experts / alike
    whole = sharding == "ddp"
    return DeviceShare(
        parameters, sharded, work.learned * (parameters if whole else sharded), work.learned,
        work.learned_tensors * work.tensors / pp, 1 if whole else group, 1 if whole else alike,
        experts if alike != group else 0.0,
        sharding in ("fsdp", "hsdp"), dense, sparse if alike > 1 else 0.0, end,
    )  # fmt: skip


def whole_bytes(work: Workload, plan: Plan, share: DeviceShare) -> tuple[float, float, float]:
    """Bytes of a gathered block without its experts, of its experts, and the most of gathered weights on a device."""
    numerics = numerics_of(plan)
    narrow, each = BYTES[numerics.gathered_linears], BYTES[numerics.gathered]
    dense, experts = (
        share.block_dense * work.weight_bytes(narrow),
        share.block_experts * work.weight_bytes(each),
    )
    # Of the current block and of the next one, and of the ends.
    most = 2 * (dense + experts) / work.pieces + share.ends * each
    if plan.pp > 1:  # A stage's unsharded weights stay from its first micro-batch to its last.
        most = share.parameters * work.weight_bytes(each)
        most -= share.block_dense * work.depth / plan.pp * (each - narrow)
    return dense, experts, most


def orthogonal_share(work: Workload, plan: Plan) -> float:
    """Share of the parameters on a device whose updates the optimizer orthogonalises."""
    elements = sum(count * op.batch * op.n * op.k for count, op in orthogonalised(work, plan))
    return min(1.0, elements / (work.learned * work.parameters)) if elements else 0.0


def orthogonalised(work: Workload, plan: Plan) -> tuple[tuple[int, Op], ...]:
    """The `learned_matrices` whose updates the plan's optimizer orthogonalises: all, or none."""
    return learned_matrices(work) if OPTIMIZERS[plan.algorithm].matrices == "orthogonal" else ()


@lru_cache(maxsize=1024)
def learned_matrices(work: Workload) -> tuple[tuple[int, Op], ...]:
    """The blocks' products whose weights are trained, each with its number of occurrences: `batch` matrices of (n, k);
    the adapters' if there are any."""
    every = [
        (part.count, op) for part in work.blocks for op in part.forward if op.kind == "gemm" and op.weights
    ]
    adapters = [(count, op) for count, op in every if op.adapter]
    return tuple((count, op) for count, op in adapters or every if op.weights >= op.batch * op.n * op.k)


def orthogonalising_bytes(work: Workload, plan: Plan) -> float:
    """Temporary bytes of orthogonalising the largest matrix or stack: the update in fp32 and in bf16, three steps of
    the iteration, and two products with its transpose."""
    sizes = (
        (op.batch * op.n * op.k, op.batch * min(op.n, op.k) ** 2) for _, op in orthogonalised(work, plan)
    )
    return max((12.0 * whole + 4.0 * square for whole, square in sizes), default=0.0)


def state_elements(work: Workload, plan: Plan, share: DeviceShare) -> float:
    """Elements that the optimizer keeps on a device: its moments. Orthogonalised matrices have one moment, factored
    ones only means of rows and columns."""
    row = OPTIMIZERS[plan.algorithm]
    if row.matrices == "orthogonal":
        rest = OPTIMIZERS["adamw"].moments - row.moments
        return share.updated * (row.moments + rest * (1.0 - orthogonal_share(work, plan)))
    if row.matrices == "factored":
        return share.updated * _factored(work) / work.parameters
    return share.updated * row.moments


@lru_cache(maxsize=1024)
def _factored(work: Workload) -> float:
    """Rows and columns of all tensors of two dimensions or more, and the elements of the others."""
    kept = 0.0
    for part in work.parts:
        for op in part.forward:
            matrix = op.batch * op.n * op.k if op.kind in MATRIX else 0.0
            if op.weights >= matrix > 0:
                kept += part.count * (op.batch * (op.n + op.k) + op.weights - matrix)
            elif op.module == "table" and op.n:
                kept += part.count * (op.weights / op.n + op.n * op.tensors)
            elif op.kind not in MATRIX:
                kept += part.count * op.weights
    return kept


def update_bytes(plan: Plan, orthogonal: float = 0.0) -> float:
    """Bytes per weight that one update reads and writes, gradient clipping among them, by the row of `OPTIMIZERS`; with
    the share `orthogonal` of the weights updated by Muon, whose products are listed separately, and the rest by AdamW.

    A fused update reads weight, gradient and moments and writes all but the gradient; on flat buffers (`contiguous`)
    the backward pass moves each gradient there, two more accesses. AdamW written as single operators makes twenty
    accesses. The norm for gradient clipping reads gradients once more, and unfused updates then scale them. Master
    weights add a gradient in fp32, its unscaling where the type is fp16, and the copy back.
    """
    numerics, number = numerics_of(plan), updated_bytes(plan)
    matrices = OPTIMIZERS[plan.algorithm]
    row = OPTIMIZERS["adamw"] if matrices.matrices == "orthogonal" else matrices
    gradient, moment = BYTES[numerics.reduction], BYTES[numerics.moments]
    if plan.optimizer in ("loop", "foreach") or "fused" not in row.forms:
        moved = (row.accesses + 3) * number
    else:
        # Weight in and out, the gradient for its norm and for the update.
        moved = (4 + 2 * (plan.optimizer == "contiguous")) * number + 2 * row.moments * moment
    moved += orthogonal * ((matrices.accesses + 3) * number - moved)
    if numerics.masters == "copy":
        # The gradient is cast to fp32, and the new weight to half precision.
        moved += (gradient + 4.0) * (gradient == 2) + 8.0 * numerics.scales + 4.0 + 2.0
    return moved


def updated_bytes(plan: Plan) -> float:
    """Bytes per element in which an update computes."""
    numerics = numerics_of(plan)
    return 2.0 if numerics.masters == "none" and BYTES[numerics.weights] == 2 else 4.0


def update_launches(
    parameters: float, tensors: float, plan: Plan, *, cpu: bool = False, matrices: float = 0.0
) -> int:
    """Operators that one update of these numbers of parameters and tensors launches. On a GPU `loop` launches every
    operator for every tensor, and `foreach` one per chunk of tensors; on a CPU torch has no such kernel and loops
    internally, and Python's overhead is counted as operators too. `matrices` of the tensors are orthogonalised
    singly."""
    row = OPTIMIZERS["adamw" if matrices else plan.algorithm]
    alone = math.ceil(matrices) * (OPTIMIZERS[plan.algorithm].operators + ORTHOGONALISING)
    tensors -= matrices
    if cpu:
        return math.ceil(tensors) * HOST_LAUNCHES[plan.optimizer] + HOST_UPDATE_LAUNCHES + alone
    chunks = max(1, math.ceil(parameters / MULTI_TENSOR_ELEMENTS))
    if plan.optimizer in ("loop", "foreach"):
        return math.ceil(tensors if plan.optimizer == "loop" else chunks) * (row.operators + 2) + alone
    return (2 * chunks if plan.optimizer == "fused" else 3) + alone


def accumulation_bytes(plan: Plan, share: DeviceShare, *, casts: bool = False) -> float:
    """Bytes moved by adding each micro-batch's gradients to those of the step: both are read, one is written. With
    `casts` the micro-batch's gradients are first written in the type of the step's, and read in that type."""
    if plan.accumulate == 1 and plan.pp == 1:
        return 0.0
    # A pipeline's stage accumulates unsharded gradients, and shards them once.
    shards_sums = (share.gathers and plan.pp == 1) or plan.sharding == "zero2"
    numerics, summed = numerics_of(plan), share.sharded if shards_sums else share.parameters
    element_bytes = (4 if casts else 2) * BYTES[numerics.reduction] + BYTES[numerics.gathered]
    return plan.accumulate * share.learned * summed * element_bytes


def newton_schulz(op: Op, size: float = _HALF) -> tuple[Op, ...]:
    """The products of one iteration on the matrices of a linear layer: `op.batch` matrices of (n, k), in elements of
    `size` bytes."""
    short, long = min(op.n, op.k), int(max(op.n, op.k))
    square, whole = op.batch * short * short * size, op.batch * short * long * size

    def product(name: str, n: int, k: int, read: float, written: float) -> Op:
        return Op(f"{op.name}.{name}", "gemm", batch=op.batch, m=short, n=n, k=k, read=read, written=written)

    return (
        product("gram", int(short), long, whole, square),
        product("gram.square", int(short), int(short), 2 * square, square),
        product("turn", long, int(short), 2 * whole + square, whole),
    )


def update_operators(
    work: Workload, plan: Plan, share: DeviceShare, size: float = _HALF
) -> Iterator[tuple[float, Op]]:
    """The operators by which one device orthogonalises updates, each with its number of runs; collectives run once per
    matrix, with its bytes. Empty for other optimizers."""
    adapted = any(op.adapter for _, op in orthogonalised(work, plan))
    every = orthogonalised(work if adapted else work.whole or work, plan)
    owners = plan.tp * share.replicas
    matrices = sum(count for count, op in every if not _is_whole(op, plan))
    # Matrices are assigned in turn: the device with the most takes part in the last, incomplete round too.
    turns = math.ceil(matrices / plan.pp / owners) / matrices if matrices else 0.0
    for count, op in every:
        own = count / plan.pp
        if _is_whole(op, plan):
            op = op._replace(batch=op.batch / (plan.ep * share.expert_replicas))
        elif owners > 1:
            sent = op.batch * op.n * op.k * _HALF
            yield own, Op(f"{op.name}.to_owner", "gather", read=sent)
            yield own, Op(f"{op.name}.from_owner", "scatter", read=sent)
            own = count * turns
        for product in newton_schulz(op, size):
            yield ITERATIONS * own, product


def _is_whole(op: Op, plan: Plan) -> bool:
    """Whether each device has whole matrices of this product: of some experts."""
    return plan.ep > 1 and op.module == "experts"


@lru_cache(maxsize=4096)
def owner_seconds(work: Workload, rates: Rates, plan: Plan, share: DeviceShare) -> tuple[float, float]:
    """Seconds per step of one device: of the iterations for its own matrices, and of gathering updates to their owners
    and scattering them. Iterations are in bf16 under every Plan, except on a CPU without bf16 units, where fp32 is
    faster."""
    peak = rates.machine.peak_flops
    slow = peak.get("bf16", 0.0) < peak.get("fp32", 0.0)
    own = replace(plan, precision="O0" if slow else "O1", dtype="bf16", products="plain")
    iterating = rates_of(rates.machine, own)
    group = group_of(rates, plan.tp * share.replicas, 1)
    products = sent = 0.0
    for times, op in update_operators(work, plan, share, 4.0 if slow else _HALF):
        if op.kind in COLLECTIVE:
            sent += times * gather_seconds(group, op.read, scatters=op.kind == "scatter")
        else:
            products += times * seconds(op, iterating)
    return products, sent
