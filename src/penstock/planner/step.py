"""Seconds of one optimizer step, added up from operators to blocks, stages, a pipeline and its replicas.

Overlap rules, all of them:

- Forward and backward of different micro-batches never overlap on one device.
- A pipeline of p stages and m micro-batches takes the slowest stage's time for all micro-batches, plus the other
  stages' time once: (m-1) max + sum, the others' share divided by the number of virtual stages (Narayanan et al., SC
  2021, section 2.2). For equal stages the bubble is (p-1)/(v m) of the work. Where gradients of weights are deferred
  (schedule=zero_bubble), it is the idle time from simulating the schedule.
- Sharded weights are gathered one block ahead: each block takes the longer of its computation and its transfers. A
  pipeline's stage gathers all of its own once a step, and scatters its gradients once.
- Gradient reduction overlaps the last micro-batch's backward pass, except for the last block's gradients.
- In the backward pass, tensor parallel collectives of inputs' gradients, and the second gathering of inputs, overlap
  the gradients of weights; the gathering of outputs' gradients cannot.
- An overlapped collective slows the computation: it takes its share of the multiprocessors for as long as it lasts.
- On a CPU nothing overlaps: the computing cores do the transfers.
- A host launches ahead of its device, but waits in the forward pass of a mixture until counts of tokens have arrived.
  So each pass takes at least as long as its launches; if micro-batches overlap exchanges, both passes together do.

Other transfers between devices, and those to host memory, are in `traffic`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from penstock.config.formats import BYTES
from penstock.config.numerics import numerics_of
from penstock.config.plan import Plan
from penstock.planner import traffic
from penstock.planner.memory import pass_bytes
from penstock.planner.operators import COLLECTIVE, MATRIX, Op, Part, Place, Workload
from penstock.planner.pipeline import StageTimes, stage_blocks, zero_bubble_idle
from penstock.planner.price import collective_seconds, exposed_seconds, seconds
from penstock.planner.rates import Rates
from penstock.planner.recompute import Recompute, computed_again
from penstock.planner.states import DeviceShare, device_share, orthogonalised, owner_seconds, update_launches

PAGE_BYTES = 4096
MAPPED_ALONE_BYTES = 32 * 2**20
"""Size from which on glibc maps a block separately and unmaps it when freed, so that the first touch of each page
faults in every step: the upper bound of its threshold (mallopt(3), M_MMAP_THRESHOLD)."""
TRIMMED_BYTES = 2 * MAPPED_ALONE_BYTES
"""Free memory at the end of the heap from which on glibc returns it: the upper bound of its threshold (mallopt(3),
M_TRIM_THRESHOLD), which a block of `MAPPED_ALONE_BYTES` that was freed once sets. ViT-digits at batch 16 to 256 frees 3
to 39 MB a step, of which 0 to 1.7 MB were counted as mapped again."""
RETURNED_SHARE = 0.25
"""Share of a step's other activations and gradients that glibc, with default settings, returns to the kernel and faults
in again. It depends on which small block is at the top of the heap when gradients are cleared, and differs between
steps: 0 to 0.3 of the pages were counted with seven models and batches, 0.3 to 0.85 with five large."""

_ATTENTION = ("attention", "bmm", "softmax", "dropout", "torch_dropout", "pointwise")


class KindSeconds(NamedTuple):
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

    def plus(self, other: KindSeconds, times: float = 1.0) -> KindSeconds:
        """The sum with `times` times `other`."""
        return KindSeconds(*[first + times * second for first, second in zip(self, other)])


class PartTime(NamedTuple):
    """Seconds of one part for one micro-batch. `recomputed` is the recomputation in the backward pass."""

    forward: KindSeconds = KindSeconds()
    backward: KindSeconds = KindSeconds()
    recomputed: float = 0.0
    weights: float = 0.0
    """Part of `backward` for the gradients of weights, which a split backward pass can defer."""
    launches: float = 0.0
    forward_launches: float = 0.0
    """Launches of the forward pass alone."""

    @property
    def back(self) -> float:
        """Backward, recomputation included."""
        return self.backward.total + self.recomputed

    def plus(self, other: PartTime, times: float) -> PartTime:
        """The sum with `times` times `other`."""
        return PartTime(
            self.forward.plus(other.forward, times), self.backward.plus(other.backward, times),
            *[first + times * second for first, second in zip(self[2:], other[2:])],
        )  # fmt: skip


class PartLayout(NamedTuple):
    """The fields of a Plan that decide the time of a part, together with its operators."""

    tp: int
    cp: int
    ep: int
    tp_overlap: str
    recompute: Recompute


def layout_of(plan: Plan, work: Workload | None = None) -> PartLayout:
    """The layout of a plan; a recomputation budget needs the workload."""
    return PartLayout(plan.tp, plan.cp, plan.ep, plan.tp_overlap, Recompute.of(plan, work))


@lru_cache(maxsize=8192)
def part_time(part: Part, rates: Rates, layout: PartLayout) -> PartTime:
    """The prices of a part's operators, added up."""
    forward, _ = _passed(part.forward, rates, layout)
    backward, weights = _passed(part.backward, rates, layout)
    again, ahead = 0.0, float(sum(op.launches for op in part.forward))
    launches = ahead + sum(op.launches for op in part.backward)
    for how in layout.recompute.ways(part):
        repeated = computed_again(part, how)
        again += how.share * _passed(repeated, rates, layout)[0].total
        launches += how.share * sum(op.launches for op in repeated)
    return PartTime(forward, backward, again, weights, launches, ahead)


def _passed(operators: Iterable[Op], rates: Rates, layout: PartLayout) -> tuple[KindSeconds, float]:
    """Seconds of one pass by kind, and the part for gradients of weights."""
    members = {"tensor": (layout.tp, 1), "expert": (layout.ep, 1), "context": (layout.cp, layout.tp)}
    sent: defaultdict[tuple[str, str], float] = defaultdict(float)
    gemm = attention = pointwise = weights = shared = 0.0
    for op in operators:
        if op.kind in COLLECTIVE:
            beside = "beside" if op.beside and not rates.cpu else ""
            how = "uncut" if op.uncut else "hidden" if op.hides else beside
            sent[op.axis, how] += collective_seconds(op, rates, *members[op.axis])
            continue
        taken = seconds(op, rates)
        if op.module == "perceptron":  # beside a mixture these are the experts that every token visits
            shared += taken
        if op.kind in _ATTENTION and op.module in ("attention", "cross"):
            attention += taken
        elif op.kind in MATRIX:
            gemm += taken
            if op.over_rows:
                weights += taken
        else:
            pointwise += taken
    travel = sent["expert", "hidden"]
    left = (1.0 - rates.constants.exchange_hidden_share) * travel
    expert = sent["expert", ""] + exposed_seconds(rates, sent["expert", "beside"], shared)
    expert += max(left, exposed_seconds(rates, travel, gemm + attention + pointwise))
    context = sent["context", ""] + exposed_seconds(rates, sent["context", "hidden"], attention)
    tensor = _tensor(rates, layout, sent["tensor", ""], sent["tensor", "hidden"], weights)
    return KindSeconds(gemm, attention, pointwise, tensor + sent["tensor", "uncut"], expert, context), weights


def _tensor(rates: Rates, layout: PartLayout, shown: float, hidden: float, weights: float) -> float:
    """Exposed seconds of tensor parallel collectives; a pass without gradients of weights overlaps none of them, unless
    products are cut into pieces, one per member; then the first piece's transfer stays exposed."""
    if layout.tp_overlap == "none" or rates.cpu:
        return shown + hidden
    if layout.tp_overlap == "all":
        first = shown / layout.tp
        if not weights:
            return first + rates.collective_share * (shown - first)
        hidden, shown = hidden + shown - first, first
    return shown + exposed_seconds(rates, hidden, weights) if hidden else shown


@dataclass(slots=True)
class StepTime:
    """Seconds of one optimizer step by cause, and the stage times from which the bubble follows."""

    seconds: dict[str, float] = field(default_factory=dict)
    bubble_fraction: float = 0.0
    """Idle seconds of the pipeline over the busy seconds of its slowest stage."""
    forward_seconds: float = 0.0
    """Forward pass of one stage and one micro-batch."""
    backward_seconds: float = 0.0
    weight_gradient_seconds: float = 0.0
    """Part of `backward_seconds` for the gradients of weights."""

    @property
    def total(self) -> float:
        """The whole step."""
        return sum(self.seconds.values())


class _Stage(NamedTuple):
    """Blocks and ends of the slowest stage."""

    blocks: float
    ends: float
    """Seconds of the entrance or the exit, where it holds one, for one micro-batch."""
    others: float
    """The same for all other stages together."""


def step(work: Workload, rates: Rates, plan: Plan) -> StepTime:
    """One optimizer step under `plan`; `work` is one of its micro-batches."""
    times = _times(work, rates, layout_of(plan, work))
    share, m = device_share(work, plan), plan.accumulate
    block, stage = times.block, _slowest(work, plan, times)
    n = stage.blocks
    forward, backward = n * block.forward.total, n * block.back
    both = KindSeconds(*[m * n * one for one in block.forward.plus(block.backward)])._asdict()
    by_part = both | {
        "recompute": m * n * block.recomputed, "output": m * stage.ends,
        "data": traffic.data_seconds(work, rates, plan, share, n, forward, backward),
        "optimizer": traffic.update_seconds(work, rates, plan, share),
        "offload": traffic.offload_seconds(work, rates, plan, share, forward, backward),
        "host_wait": rates.constants.host_wait_seconds if work.software.host_waits and plan.gpus > 1 else 0.0,
        "pipeline": 0.0, "bubble": 0.0, "launch": m * n * times.waits,
    }  # fmt: skip
    if orthogonalised(work, plan):
        products, by_part["owners"] = owner_seconds(work, rates, plan, share)
        by_part["optimizer"] += products
    result = StepTime(by_part, 0.0, forward, backward, n * block.weights)
    if plan.pp > 1:
        by_part["bubble"] = _bubble(work, plan, times, stage)
        by_part["pipeline"] = traffic.stage_seconds(work, rates, plan, forward / plan.virtual)
        result.bubble_fraction = by_part["bubble"] / (m * (forward + backward + stage.ends))
    nodes = -(-plan.replicas * plan.tp // rates.machine.devices_per_node) if plan.replicas > 1 else 1
    by_part["straggling"] = rates.constants.straggling * math.log2(nodes) * sum(by_part.values())
    launch, by_part["pages"] = _host(work, rates, plan, times.launches, share, sum(by_part.values()))
    by_part["launch"] += launch
    return result


class _Times(NamedTuple):
    """Prices of a workload's parts for one micro-batch."""

    block: PartTime
    """A block on average."""
    entrance: float
    exit: float
    launches: float
    """Launches of all parts."""
    waits: float
    """Seconds by which the host's launches of a block exceed the device's time for it, where it cannot run ahead."""

    @property
    def one(self) -> float:
        """Seconds of a block, both passes."""
        return self.block.forward.total + self.block.back + self.waits


@lru_cache(maxsize=8192)
def _times(work: Workload, rates: Rates, layout: PartLayout) -> _Times:
    block, launches = PartTime(), 0.0
    ends: dict[Place, float] = {"entrance": 0.0, "exit": 0.0}
    for part in work.parts:
        time = part_time(part, rates, layout)
        launches += part.count * time.launches
        if part.place in ends:
            ends[part.place] = time.forward.total + time.back
        else:
            block = block.plus(time, part.count / max(1, work.depth))
    each, own = rates.machine.launch_seconds, work.software.block_host_seconds / 2
    ahead = own + each * block.forward_launches - block.forward.total
    behind = own + each * (block.launches - block.forward_launches) - block.back
    waits = max(0.0, ahead + behind) if work.software.hides_exchange else max(0.0, ahead) + max(0.0, behind)
    if rates.cpu or layout.ep == 1:
        waits = 0.0
    return _Times(block, ends["entrance"], ends["exit"], launches, waits)


def _slowest(work: Workload, plan: Plan, times: _Times) -> _Stage:
    n = max(1, work.depth)
    if plan.pp == 1:
        return _Stage(n, times.entrance + times.exit, 0.0)
    one = times.one
    first, middle, last, _ = stage_blocks(work, plan.pp, plan.virtual)
    slowest, blocks, ends = max(
        (first * one + times.entrance, first, times.entrance), (middle * one, middle, 0.0),
        (last * one + times.exit, last, times.exit),
    )  # fmt: skip
    return _Stage(blocks, ends, n * one + times.entrance + times.exit - slowest)


def _bubble(work: Workload, plan: Plan, times: _Times, stage: _Stage) -> float:
    """Idle seconds of the slowest stage."""
    if plan.schedule != "zero_bubble":
        return stage.others / plan.virtual
    forward, backward, weights = times.one - times.block.back, times.block.back, times.block.weights
    every: list[tuple[int, StageTimes]] = [
        (count, (n * forward, n * (backward - weights), n * weights))
        for count, n in stage_blocks(work, plan.pp).runs
    ]
    # One of the output's three equal products is the gradient of its weights; for the entrance it is half of the work.
    (_, (f, i, w)), (_, (last_f, last_i, last_w)) = every[0], every[-1]
    each = times.exit / 3
    every[0] = (1, (f + times.entrance / 2, i, w + times.entrance / 2))
    every[-1] = (1, (last_f + each, last_i + each, last_w + each))
    return zero_bubble_idle(every, plan.accumulate)


def _host(
    work: Workload, rates: Rates, plan: Plan, launched: float, share: DeviceShare, device: float
) -> tuple[float, float]:
    """Seconds that the host adds to the device's by launching and by mapping pages. A CPU launches and computes in
    turn; a GPU's launches run ahead, and recorded passes are one launch each."""
    launches = plan.accumulate / plan.pp * launched
    matrices = sum(count for count, _ in orthogonalised(work, plan)) / plan.pp
    updates = update_launches(share.updated, share.tensors, plan, cpu=rates.cpu, matrices=matrices)
    if not rates.cpu:
        if plan.compile == "graphs":
            return max(0.0, (2 + updates) * rates.machine.launch_seconds - device), 0.0
        own = plan.accumulate / plan.pp * work.depth * work.software.block_host_seconds
        return max(0.0, own + (launches + updates) * rates.machine.launch_seconds - device), 0.0
    machine = rates.machine
    faults = plan.host_memory == "release" and machine.page_seconds
    launched = (
        launches * (machine.operator_seconds or machine.launch_seconds) + updates * machine.launch_seconds
    )
    return launched, faulted_pages(work, plan) * machine.page_seconds if faults else 0.0


def mapped_alone(op: Op) -> float:
    """Bytes of an operator's result, if glibc maps it separately; 0 if it is too small for that."""
    return op.written if op.written >= MAPPED_ALONE_BYTES and not op.in_place else 0.0


def faulted_pages(work: Workload, plan: Plan) -> float:
    """Pages that one step on a CPU maps again, if freed memory is returned to the kernel."""
    large = sum(count * mapped_alone(op) for count, op in work.operators())
    # Gradients are cleared to None, unless they are in one flat buffer.
    gradients = work.learned * work.parameters * BYTES[numerics_of(plan).gradients]
    freed = 0.0 if plan.optimizer == "contiguous" else gradients
    others = max(0.0, (pass_bytes(work, plan).kept - large) * plan.accumulate + freed)
    # Memory below the threshold for returning the end of the heap stays there from step to step.
    returned = min(RETURNED_SHARE * others, max(0.0, others - TRIMMED_BYTES))
    return (large * plan.accumulate + returned) / PAGE_BYTES
