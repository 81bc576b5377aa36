"""How long one optimizer step takes: its operations by `prices`, the update, launches and pages.

Launches come on top on a CPU, which runs what it launches; a GPU is launched
ahead of, so there a step takes the longer of the two. Free of torch.

The constants below hold where a Machine has no measurement to say better; those of GPUs are in `constants`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from penstock.config.machine import Machine
from penstock.config.plan import Plan
from penstock.planner.host_time import IN_PLACE
from penstock.planner.operations import Op, Operations
from penstock.planner.prices import Line, priced
from penstock.planner.products import bandwidth
from penstock.planner.states import EIGHT_BIT, MOMENTS, update_launches

PAGE_BYTES = 4096
MAPPED_ALONE_BYTES = 32 * 2**20
"""Blocks at least so large glibc maps on their own and gives back when they are freed, so that each first touch of
their pages faults, step after step: the upper bound of its threshold (mallopt(3), M_MMAP_THRESHOLD)."""
RETURNED_SHARE = 0.25
"""Share of a step's other activations and gradients that glibc hands back to the kernel and faults in again, left to
itself. It depends on what small thing happens to lie on top of the heap when gradients are cleared, and differs between
steps of one process: 0 to 0.3 of the pages were counted with seven models and batches, 0.3 to 0.85 with five large."""
OPTIMIZER_ACCESSES = 20
"""Numbers that the operators of an AdamW update read and write per parameter; one fused kernel reads 4 and writes 3."""
UPDATE_ACCESSES = 3
"""Of a fused update: a weight is read and written, and its gradient read; its moments come on top."""
NORM_ACCESSES = 1
"""Of the norm of all gradients, which clipping needs; what is not fused then scales them: two more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What one micro-batch makes a device do, forward and backward, as plain fp32 eager code would do it."""

    listed: Operations
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

    @property
    def operations(self) -> tuple[Op, ...]:
        """All operations, with their figures for these samples."""
        return self.listed.at(self.samples)


def step_seconds(work: Workload, machine: Machine, plan: Plan) -> dict[str, float]:
    """Seconds of one optimizer step by part: `gemm`, `attention`, `pointwise`, `optimizer`, `launch` and
    `pages` (what a CPU's kernel takes to map freed memory again).

    They sum to the whole step, `plan.accumulate` micro-batches and one update.
    """
    return step_parts(work, machine, plan)[0]


def step_parts(work: Workload, machine: Machine, plan: Plan) -> tuple[dict[str, float], float]:
    """`step_seconds`, and the seconds of one micro-batch's forward operations."""
    step = priced(work.listed, work.parameters, work.tensors, machine, plan)
    once, ahead = step.seconds(work.samples)
    parts = {part: plan.accumulate * seconds for part, seconds in once.items()}
    launches = plan.accumulate * step.launches
    moved, updates = optimizer_traffic(work.parameters, work.tensors, plan, machine.device)
    parts["optimizer"] = moved / bandwidth(machine)
    parts["pages"] = 0.0
    if machine.device == "cpu":
        parts["optimizer"] *= IN_PLACE
        each = machine.operator_seconds or machine.launch_seconds
        parts["launch"] = launches * each + updates * machine.launch_seconds
        if plan.host_memory == "release":
            parts["pages"] = faulted_pages(work, step.written, plan) * machine.page_seconds
    else:
        launched = (launches + updates) * machine.launch_seconds
        parts["launch"] = max(0.0, launched - sum(parts.values()))
    return parts, ahead


def faulted_pages(work: Workload, written: Iterable[tuple[int, Line]], plan: Plan) -> float:
    """Pages that one step on a CPU maps anew, where freed memory goes back to the kernel.

    `written` are the bytes of each result that an operation allocates, with how many times it does.
    """
    more, large = work.samples - 1, 0.0
    for count, (one, further) in written:
        size = one + more * further
        if size >= MAPPED_ALONE_BYTES:
            large += count * size
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
