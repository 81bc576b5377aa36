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
from typing import NamedTuple, get_args

from penstock.config.machine import GemmSample, Machine
from penstock.config.plan import Plan, Precision
from penstock.planner.attention import keys_computed
from penstock.planner.constants import DEFAULT
from penstock.planner.gemm import Chip, tiled_seconds
from penstock.planner.host_time import IN_PLACE, TRACED_BACKWARD, host_seconds
from penstock.planner.operations import Op, OpKind, attention_form
from penstock.planner.rates import DEFAULT_MULTIPROCESSORS, Rates, rates_of
from penstock.planner.states import EIGHT_BIT, MOMENTS, update_launches

PAGE_BYTES = 4096
MAPPED_ALONE_BYTES = 32 * 2**20
"""Blocks at least so large glibc maps on their own and gives back when they are freed, so that each first touch of
their pages faults, step after step: the upper bound of its threshold (mallopt(3), M_MMAP_THRESHOLD)."""
RETURNED_SHARE = 0.25
"""Share of a step's other activations and gradients that glibc hands back to the kernel and faults in again, left to
itself. It depends on what small thing happens to lie on top of the heap when gradients are cleared, and differs between
steps of one process: 0 to 0.3 of the pages were counted with seven models and batches, 0.3 to 0.85 with five large."""
NEAR_SAMPLES = 4
"""Measured products between which the rate of an unmeasured shape is interpolated."""
NEAR = 1e-6
"""Squared distance in logarithms below which a shape is as good as measured."""
CPU_HALF_FUSED_SHARE = 0.12
"""Share of the half-precision product rate that torch's fused attention reaches on a CPU: it converts as it goes.
Measured with bf16 units, 197 tokens, forward and backward: the plain form was 3.4 times as fast. fp32 has no such
loss."""
OPTIMIZER_ACCESSES = 20
"""Numbers that the operators of an AdamW update read and write per parameter; one fused kernel reads 4 and writes 3."""
UPDATE_ACCESSES = 3
"""Of a fused update: a weight is read and written, and its gradient read; its moments come on top."""
NORM_ACCESSES = 1
"""Of the norm of all gradients, which clipping needs; what is not fused then scales them: two more."""

_MATRIX = ("gemm", "bmm", "conv")
_HALVES: dict[OpKind, float] = dict.fromkeys(get_args(OpKind), 2.0)
_MIXED = _HALVES | {"norm": 4.0, "pointwise": 3.0, "copy": 3.0, "reduce": 3.0}
_ELEMENT_BYTES: dict[Precision, dict[OpKind, float]] = {
    "O0": dict.fromkeys(get_args(OpKind), 4.0), "O1": _MIXED, "O2": _MIXED, "O3": _HALVES,
}  # fmt: skip
"""Of an element that an operation moves: O1 and O2 keep norms and, in part, the residual stream in fp32."""


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
    tokens: int = 0
    """Of one sample, where it is known."""
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


def gemm_rate(
    machine: Machine, type_: str, m: int, n: int, k: int, batch: int = 1, *, over_rows: bool = False
) -> float:
    """FLOP/s of `batch` products (m, k) @ (k, n) in one launch.

    Measured shapes are interpolated (by inverse square distance in the logarithms of m, n and k, over the nearest
    few); without any, the best known rate is lowered by what tiles and waves leave idle, as for layouts.
    Raises KeyError where the machine cannot compute in this type.
    """
    return _products(machine, type_).rate(m, n, k, batch, over_rows=over_rows)


class _Sample(NamedTuple):
    """A measured product as a point p of logarithms of m, n and k: |p|² and 2p, which tell its distance from any q as
    |p|² - 2p·q + |q|², and its rate.
    """

    square: float
    rows: float
    columns: float
    inner: float
    rate: float

    @classmethod
    def of(cls, sample: GemmSample) -> _Sample:
        x, y, z = math.log(sample.m), math.log(sample.n), math.log(sample.k)
        return cls(x * x + y * y + z * z, 2 * x, 2 * y, 2 * z, sample.flops_per_second)


class _Products(NamedTuple):
    """How fast a machine multiplies in one type."""

    samples: tuple[_Sample, ...]
    ceiling: float
    """No product is faster."""
    chip: Chip | None
    """How a GPU without measured products cuts them up."""

    def rate(self, m: int, n: int, k: int, batch: int, *, over_rows: bool) -> float:
        """As `gemm_rate`."""
        if self.samples:
            return min(_interpolated(self.samples, m, n, k), self.ceiling)
        if self.chip is None:
            return self.ceiling
        return 2.0 * m * n * k * batch / tiled_seconds(self.chip, m, n, k, batch, over_rows=over_rows)


@lru_cache(maxsize=256)
def _products(machine: Machine, type_: str) -> _Products:
    peak, best = machine.peak_flops[type_], machine.achievable_flops.get(type_)
    samples = tuple(_Sample.of(sample) for sample in machine.gemm if sample.dtype == type_)
    if samples or machine.device == "cpu":
        return _Products(samples, peak if samples else best or peak, None)
    rate = (best or DEFAULT.unmeasured_share * peak) * DEFAULT.gemm_share
    memory = _bandwidth(machine) * DEFAULT.memory_share
    sms = machine.multiprocessors or DEFAULT_MULTIPROCESSORS
    return _Products((), peak, Chip(rate, sms, DEFAULT.tile_depth, memory))


def step_seconds(work: Workload, machine: Machine, plan: Plan) -> dict[str, float]:
    """Seconds of one optimizer step by part: `gemm`, `attention`, `pointwise`, `optimizer`, `launch` and
    `pages` (what a CPU's kernel takes to map freed memory again).

    They sum to the whole step, `plan.accumulate` micro-batches and one update.
    """
    return step_parts(work, machine, plan)[0]


def step_parts(work: Workload, machine: Machine, plan: Plan) -> tuple[dict[str, float], float]:
    """`step_seconds`, and the seconds of one micro-batch's forward operations."""
    operations = _under_plan(work, plan)
    parts = dict.fromkeys(("gemm", "attention", "pointwise", "optimizer", "launch", "pages"), 0.0)
    launches = 0
    ahead = 0.0
    seconds = _Prices(machine, plan).seconds
    for op in operations:
        matrix = op.kind in _MATRIX
        part = "gemm" if matrix else "pointwise"
        if op.kind != "gemm" and op.name.startswith("attention"):
            part = "attention"
        taken = op.count * seconds(op)
        parts[part] += taken
        launches += op.count
        if op.phase == "forward":
            ahead += taken
    for part in parts:
        parts[part] *= plan.accumulate
    launches *= plan.accumulate
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
    return parts, ahead


def faulted_pages(work: Workload, operations: Iterable[Op], plan: Plan) -> float:
    """Pages that one step on a CPU maps anew, where freed memory goes back to the kernel."""
    sizes = _ELEMENT_BYTES[plan.precision]
    large = sum(
        op.count * size
        for op in operations
        # By its name, torch's sign of an operator that writes in place, and so allocates nothing.
        if not op.name.endswith("_") and (size := op.written_elements * sizes[op.kind]) >= MAPPED_ALONE_BYTES
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
    """Bytes moved and operators launched by one update; of AdamW (Loshchilov and Hutter, ICLR 2019, algorithm 2) unless
    the plan says otherwise.

    `loop` launches every operator for every tensor. `foreach` moves as much with a launch per chunk of tensors (on
    a CPU torch has no such kernel and loops inside). `fused` reads weight, gradient and both moments and writes
    all but the gradient. `contiguous` does so on flat buffers, into which the backward pass moves each
    gradient: two more accesses. The norm that gradients are clipped by reads them once more.
    """
    size = 2.0 if plan.precision == "O3" else 4.0
    kept = MOMENTS[plan.algorithm]
    moments = 2 * kept * (EIGHT_BIT if plan.algorithm == "adam8bit" else size)
    # Gradients in half become fp32 for the master weights, and these become weights in half again.
    cast = 12.0 if plan.precision == "O2" else 0.0
    if plan.optimizer in ("loop", "foreach"):
        accesses = OPTIMIZER_ACCESSES * (1 + kept) / 3 + NORM_ACCESSES + 2
        moved = accesses * size
    else:
        moved = (UPDATE_ACCESSES + NORM_ACCESSES + 2 * (plan.optimizer == "contiguous")) * size + moments
    return parameters * (moved + cast), update_launches(parameters, tensors, plan, device)


def _under_plan(work: Workload, plan: Plan) -> list[Op]:
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
    one = work.parameters // max(work.tensors, 1)
    cast = [
        Op("cast.weights", "copy", "forward", work.tensors, read_elements=one, written_elements=one),
        Op("cast.gradients", "copy", "backward", work.tensors, read_elements=one, written_elements=one),
    ]
    for op in work.operations:
        if op.kind == "norm":
            moved = max(op.written_elements, 1)
            cast.append(
                Op("cast.norm", "copy", op.phase, op.count, read_elements=moved, written_elements=moved)
            )
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


class _Prices:
    """What one operation costs, done once, on one device under one plan."""

    __slots__ = ("_bandwidth", "_machine", "_measured", "_plan", "_products", "_rates", "_sizes")

    def __init__(self, machine: Machine, plan: Plan) -> None:
        self._machine, self._plan = machine, plan
        self._bandwidth = _bandwidth(machine)
        self._products = _products(machine, compute_type(plan, machine))
        self._sizes = _ELEMENT_BYTES[plan.precision]
        self._rates = None if machine.device == "cpu" else rates_of(machine, plan)
        self._measured = plan.precision == "O0"

    def seconds(self, op: Op) -> float:
        """The roofline of `op`; on a CPU, what `host_time` says."""
        kind, rates = op.kind, self._rates
        moved = (op.read_elements + op.written_elements) * self._sizes[kind] / self._bandwidth
        if rates is None:
            fused = kind == "bmm" and self._is_fused_attention(op)
            return host_seconds(op, self._machine, self._rate, moved, fused=fused, measured=self._measured)
        if kind not in _MATRIX:
            return moved
        if kind == "bmm" and self._is_fused_attention(op):
            return _fused_seconds(op, rates, moved)
        chip = self._products.chip
        if chip is None:
            return max(moved, (op.flops + op.recomputed_flops) / self._rate(op))
        return max(moved, tiled_seconds(chip, op.m, op.n, op.k, op.batch, over_rows=_is_weight_gradient(op)))

    def _rate(self, op: Op) -> float:
        rate = self._products.rate(op.m, op.n, op.k, op.batch, over_rows=_is_weight_gradient(op))
        if self._rates is None and not self._measured and op.kind == "bmm" and self._is_fused_attention(op):
            rate *= CPU_HALF_FUSED_SHARE
        return rate

    def _is_fused_attention(self, op: Op) -> bool:
        """Whether a batched product is part of a fused kernel: by the plan, or by its name in a traced model."""
        # A product's rows are tokens.
        return "scaled_dot" in op.name or attention_form(self._plan, op.m, self._machine.device) == "fused"


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


def _is_weight_gradient(op: Op) -> bool:
    """Whether a product sums over rows of tokens: by its name, or in a traced model by its long inner length."""
    if op.phase == "forward" or op.kind != "gemm":
        return False
    return op.name.endswith(".weight") or ("." not in op.name and op.k > max(op.m, op.n))


def _bandwidth(machine: Machine) -> float:
    return machine.memory_bytes_per_second or math.inf


def _interpolated(samples: tuple[_Sample, ...], m: int, n: int, k: int) -> float:
    x, y, z = math.log(m), math.log(n), math.log(k)
    least = x * x + y * y + z * z
    apart = [square - a * x - b * y - c * z for square, a, b, c, _ in samples]
    bound = sorted(apart)[:NEAR_SAMPLES][-1]
    total = rates = 0.0
    for distance, sample in zip(apart, samples):
        if distance <= bound:
            weight = 1.0 / (distance + least + NEAR)
            total += weight
            rates += weight * sample.rate
    return rates / total
