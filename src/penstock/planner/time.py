"""How long one optimizer step takes: a roofline over the operations of a model.

On a GPU each operation takes max(FLOPs / rate, bytes / bandwidth) (Williams, Waterman and Patterson, CACM 2009,
"Roofline: an insightful visual performance model"), where the rate of a matrix product depends on its type and shape;
on a CPU it takes what `host_time` says. Launches come on top on a CPU, which runs what it launches; a GPU is launched
ahead of, so there a step takes the longer of the two. Free of torch.

The constants below hold where a Machine has no measurement to say better; those of GPUs are in `constants`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from penstock.config.machine import GemmSample, Machine
from penstock.config.plan import Plan
from penstock.planner.attention import keys_computed
from penstock.planner.constants import DEFAULT
from penstock.planner.gemm import Chip, tiled_seconds
from penstock.planner.host_time import IN_PLACE, TRACED_BACKWARD, host_seconds
from penstock.planner.operations import Op
from penstock.planner.rates import DEFAULT_MULTIPROCESSORS, Rates, rates_of

PAGE_BYTES = 4096
MAPPED_ALONE_BYTES = 32 * 2**20
"""Blocks at least so large glibc maps on their own and gives back when they are freed, so that each first touch of
their pages faults, step after step: the upper bound of its threshold (mallopt(3), M_MMAP_THRESHOLD)."""
RETURNED_SHARE = 0.25
"""Share of a step's other activations and gradients that glibc hands back to the kernel and faults in again, left to
itself. It depends on what small thing happens to lie on top of the heap when gradients are cleared, and differs between
steps of one process: 0 to 0.3 of the pages were counted with seven models and batches, 0.3 to 0.85 with five large."""
UPDATE_LAUNCHES = 4
"""Small operators of a CPU's fused update for each tensor: its norm, its count of steps, its kernel, and Python."""
NEAR_SAMPLES = 4
"""Measured products between which the rate of an unmeasured shape is interpolated."""
CPU_HALF_FUSED_SHARE = 0.12
"""Share of the half-precision product rate that torch's fused attention reaches on a CPU: it converts as it goes.
Measured with bf16 units, 197 tokens, forward and backward: the plain form was 3.4 times as fast. fp32 has no such
loss."""
OPTIMIZER_OPERATORS = 10
"""Operators of one AdamW update written as single operations: decay, two moments, root, division, …"""
OPTIMIZER_ACCESSES = 20
"""Numbers those operators read and write per parameter; one fused kernel reads 4 and writes 3."""
FUSED_ACCESSES = 7
NORM_ACCESSES = 1
"""Of the norm of all gradients, which clipping needs; what is not fused then scales them: two more."""
MULTI_TENSOR_ELEMENTS = 320 * 65536
"""Numbers that one launch of a multi-tensor operator covers: 320 thread blocks of 65,536 each."""

_MATRIX = ("gemm", "bmm", "conv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What one micro-batch makes a device do, forward and backward, as plain fp32 eager code would do it."""

    operations: tuple[Op, ...]
    samples: int
    parameters: int
    tensors: int
    """Parameter tensors: an optimizer that loops launches its operators for each."""
    activation_bytes: int
    """Kept from forward for backward, under the plan at hand."""
    activation_parts: dict[str, int] = field(default_factory=dict)
    """The same by kind, where it is known."""
    working_bytes: int = 0
    """What the backward pass of the last block needs on top, while all others' activations are still kept."""


def compute_type(plan: Plan, machine: Machine) -> str:
    """The key of `machine.peak_flops` that matrix products run under; fp32 where the wish is not on offer."""
    if plan.precision != "O0":
        wish: str = plan.dtype
    elif plan.matmul == "highest":
        wish = "fp32"
    else:
        wish = "tf32" if machine.device == "cuda" else "fp32_medium"
    return wish if wish in machine.peak_flops or plan.precision != "O0" else "fp32"


@lru_cache(maxsize=65536)
def gemm_rate(
    machine: Machine, type_: str, m: int, n: int, k: int, batch: int = 1, *, over_rows: bool = False
) -> float:
    """FLOP/s of `batch` products (m, k) @ (k, n) in one launch.

    Measured shapes are interpolated (by inverse square distance in the logarithms of m, n and k, over the nearest
    few); without any, the best known rate is lowered by what tiles and waves leave idle, as for layouts.
    Raises KeyError where the machine cannot compute in this type.
    """
    samples = [sample for sample in machine.gemm if sample.dtype == type_]
    if samples:
        return min(_interpolated(samples, m, n, k), machine.peak_flops[type_])
    ceiling = machine.achievable_flops.get(type_)
    if machine.device == "cpu":
        return ceiling or machine.peak_flops[type_]
    rate = (ceiling or DEFAULT.unmeasured_share * machine.peak_flops[type_]) * DEFAULT.gemm_share
    memory = _bandwidth(machine) * DEFAULT.memory_share
    sms = machine.multiprocessors or DEFAULT_MULTIPROCESSORS
    chip = Chip(rate, sms, DEFAULT.tile_depth, memory)
    return 2.0 * m * n * k * batch / tiled_seconds(chip, m, n, k, batch, over_rows=over_rows)


def step_seconds(work: Workload, machine: Machine, plan: Plan) -> dict[str, float]:
    """Seconds of one optimizer step by part: `gemm`, `attention`, `pointwise`, `optimizer`, `launch` and
    `pages` (what a CPU's kernel takes to map freed memory again).

    They sum to the whole step, `plan.accumulate` micro-batches and one update.
    """
    operations = _under_plan(work, plan, machine)
    parts = dict.fromkeys(("gemm", "attention", "pointwise", "optimizer", "launch", "pages"), 0.0)
    launches = 0
    type_ = compute_type(plan, machine)
    for op in operations:
        parts[_part(op)] += op.count * _op_seconds(op, machine, plan, type_) * plan.accumulate
        launches += op.count * plan.accumulate
    moved, updates = optimizer_traffic(work.parameters, work.tensors, plan, machine.device)
    parts["optimizer"] = moved / _bandwidth(machine)
    launched = (launches + updates) * machine.launch_seconds
    if machine.device == "cpu":
        parts["optimizer"] *= IN_PLACE
        each = machine.operator_seconds or machine.launch_seconds
        parts["launch"] = launches * each + updates * machine.launch_seconds
        if plan.host_memory == "release":
            parts["pages"] = faulted_pages(work, operations, plan) * machine.page_seconds
    else:
        parts["launch"] = max(0.0, launched - sum(parts.values()))
    return parts


def faulted_pages(work: Workload, operations: Iterable[Op], plan: Plan) -> float:
    """Pages that one step on a CPU maps anew, where freed memory goes back to the kernel."""
    large = sum(
        op.count * size
        for op in operations
        # By its name, torch's sign of an operator that writes in place, and so allocates nothing.
        if not op.name.endswith("_")
        and (size := op.written_elements * _element_bytes(op, plan)) >= MAPPED_ALONE_BYTES
    )
    # Gradients are cleared to None, unless they lie in one flat buffer.
    freed = (
        0
        if plan.optimizer == "contiguous"
        else work.parameters * (2 if plan.precision in ("O2", "O3") else 4)
    )
    others = max(0.0, work.activation_bytes * plan.accumulate + freed - large * plan.accumulate)
    return (large * plan.accumulate + RETURNED_SHARE * others) / PAGE_BYTES


def optimizer_traffic(parameters: int, tensors: int, plan: Plan, device: str) -> tuple[float, int]:
    """Bytes moved and operators launched by one AdamW update (Loshchilov and Hutter, ICLR 2019, algorithm 2).

    `loop` launches every operator for every tensor. `foreach` moves as much with a launch per chunk of tensors (on
    a CPU torch has no such kernel and loops inside). `fused` reads weight, gradient and both moments and writes
    all but the gradient. `contiguous` does so on flat buffers, into which the backward pass moves each
    gradient: two more accesses. The norm that gradients are clipped by reads them once more.
    """
    size = 2 if plan.precision == "O3" else 4
    # Gradients in half become fp32 for the master weights, and these become weights in half again.
    cast = parameters * 12.0 if plan.precision == "O2" else 0.0
    chunks = max(1, math.ceil(parameters / MULTI_TENSOR_ELEMENTS))
    if plan.optimizer in ("loop", "foreach"):
        each = tensors if plan.optimizer == "loop" or device == "cpu" else chunks
        accesses = OPTIMIZER_ACCESSES + NORM_ACCESSES + 2
        return parameters * accesses * size + cast, each * (OPTIMIZER_OPERATORS + 2)
    if plan.optimizer == "fused":
        each = tensors * UPDATE_LAUNCHES if device == "cpu" else 2 * chunks
        return parameters * (FUSED_ACCESSES + NORM_ACCESSES) * size + cast, each
    return parameters * (FUSED_ACCESSES + NORM_ACCESSES + 2) * size + cast, 3


def _under_plan(work: Workload, plan: Plan, machine: Machine) -> list[Op]:
    """The operations as the plan runs them: attention fused or not, casts under autocast, compiled runs of
    pointwise operations merged into one."""
    operations: Iterable[Op] = work.operations
    if plan.precision == "O1":
        operations = [*_casts(work), *operations]
    if plan.compile != "none":
        operations = _merged(operations)
    return list(operations)


def _casts(work: Workload) -> list[Op]:
    """What autocast adds: each weight to half and its gradient back, and the output of each norm to half."""
    cast = [
        Op(name="cast.weights", kind="copy", phase="forward", count=work.tensors,
           read_elements=work.parameters // max(work.tensors, 1),
           written_elements=work.parameters // max(work.tensors, 1)),
        Op(name="cast.gradients", kind="copy", phase="backward", count=work.tensors,
           read_elements=work.parameters // max(work.tensors, 1),
           written_elements=work.parameters // max(work.tensors, 1)),
    ]  # fmt: skip
    for op in work.operations:
        if op.kind == "norm":
            moved = max(op.written_elements, 1)
            cast.append(
                Op(name="cast.norm", kind="copy", phase=op.phase, count=op.count, read_elements=moved,
                   written_elements=moved)
            )  # fmt: skip
    return cast


def _merged(operations: Iterable[Op]) -> list[Op]:
    """Neighbouring operations other than matrix products become one kernel: it reads what the largest reads."""
    merged: list[Op] = []
    for op in operations:
        last = merged[-1] if merged else None
        mergeable = last is not None and last.kind not in _MATRIX and op.kind not in _MATRIX
        if last is not None and mergeable and last.count == op.count and last.phase == op.phase:
            merged[-1] = Op(
                name=f"{last.name}+{op.name}", kind="pointwise", phase=op.phase, count=op.count,
                read_elements=max(last.read_elements, op.read_elements),
                written_elements=max(last.written_elements, op.written_elements),
            )  # fmt: skip
        else:
            merged.append(op)
    return merged


def _op_seconds(op: Op, machine: Machine, plan: Plan, type_: str) -> float:
    """The roofline of one operation done once, products in `type_`."""
    moved = (op.read_elements + op.written_elements) * _element_bytes(op, plan)
    seconds = moved / _bandwidth(machine)
    fused = _is_fused_attention(op, plan)
    if fused and machine.device != "cpu":
        return _fused_seconds(op, rates_of(machine, plan), seconds)
    rate = math.inf
    if op.kind in _MATRIX:
        over_rows = _is_weight_gradient(op)
        rate = gemm_rate(machine, type_, op.m, op.n, op.k, op.batch, over_rows=over_rows)
    if machine.device == "cpu":
        if plan.precision != "O0" and fused:
            rate *= CPU_HALF_FUSED_SHARE
        return host_seconds(
            op, machine, gemm_rate=rate, moved_seconds=seconds, measured=plan.precision == "O0", fused=fused
        )
    if op.kind in _MATRIX:
        seconds = max(seconds, (op.flops + op.recomputed_flops) / rate)
    return seconds


def _fused_seconds(op: Op, rates: Rates, moved_seconds: float) -> float:
    """One product of a fused attention kernel, or, traced, all of them, with as large a share of its exponentials."""
    traced, ahead = "scaled_dot" in op.name, op.phase == "forward"
    keys = op.k if op.n != op.m and not traced else op.n
    padded = keys_computed(op.m, keys) / keys
    again = TRACED_BACKWARD if traced and not ahead else 1.0
    products = 1.0 if traced else 0.5 if ahead else 0.25
    computed = (
        again * (op.flops + op.recomputed_flops) / (rates.attention if ahead else rates.attention_backward)
    )
    exponentials = products * op.batch * op.m * keys / rates.exponentials
    # Keys and values stream in while others are computed with.
    return padded * (computed + exponentials) + (moved_seconds / 2 if ahead else moved_seconds)


def _element_bytes(op: Op, plan: Plan) -> float:
    """Bytes of an element that an operation moves: autocast keeps norms and the residual stream in fp32."""
    if plan.precision == "O0":
        return 4.0
    if plan.precision == "O3" or op.kind in _MATRIX or op.kind == "softmax":
        return 2.0
    return 3.0 if op.kind == "copy" else 4.0 if op.kind == "norm" else 3.0


def _is_fused_attention(op: Op, plan: Plan) -> bool:
    """Whether a product is part of a fused attention kernel: by the plan, or by its name in a traced model."""
    if op.kind != "bmm":
        return False
    if "scaled_dot" in op.name or plan.attention in ("sdpa", "flash"):
        return True
    # As `operations.attention_form` takes `auto` on a CPU; a product's rows are tokens.
    half = plan.precision != "O0" and plan.dtype == "bf16"
    return plan.attention == "auto" and not (half and op.m <= 512)


def _is_weight_gradient(op: Op) -> bool:
    """Whether a product sums over rows of tokens: by its name, or in a traced model by its long inner length."""
    if op.kind != "gemm" or op.phase != "backward":
        return False
    return op.name.endswith(".weight") or ("." not in op.name and op.k > max(op.m, op.n))


def _part(op: Op) -> str:
    if op.name.startswith("attention") and op.kind != "gemm":
        return "attention"
    return "gemm" if op.kind in _MATRIX else "pointwise"


def _bandwidth(machine: Machine) -> float:
    return machine.memory_bytes_per_second or math.inf


def _interpolated(samples: Iterable[GemmSample], m: int, n: int, k: int) -> float:
    near: list[tuple[float, float]] = []
    for sample in samples:
        apart = math.log(sample.m / m) ** 2 + math.log(sample.n / n) ** 2 + math.log(sample.k / k) ** 2
        near.append((apart, sample.flops_per_second))
    near.sort()
    weights = [(1.0 / (apart + 1e-6), rate) for apart, rate in near[:NEAR_SAMPLES]]
    return sum(weight * rate for weight, rate in weights) / sum(weight for weight, _ in weights)
