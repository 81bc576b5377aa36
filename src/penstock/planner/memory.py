"""Bytes on the fullest device of a layout, by use, from what is alive at each moment.

The peak is at one of three moments. When the backward pass begins, nearly all activations are in memory, and the
gradients that one block, or the output, computes with. When it reaches the first block, the weight gradients of all
other blocks are in memory, and everything this block computes with. At its end all weight gradients are in memory and
no activation is, and the optimizer may need temporaries. In between, blocks trade activations for gradients, so no
other moment is the peak.

A pipeline's first stage keeps one micro-batch per stage; the last stage also keeps the output.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import penstock.planner.states as of_states
from penstock.config.formats import BYTES
from penstock.config.numerics import numerics_of
from penstock.config.plan import Plan
from penstock.planner.constants import DEFAULT, Constants
from penstock.planner.operators import COLLECTIVE, MATRIX, Part, Workload
from penstock.planner.pipeline import most_blocks
from penstock.planner.recompute import NOTHING, Recompute, kept_by

CONNECTION_BYTES = 8 * (8 * 512 * 16 + 120 * 640 * 8) + 4 * 2**20
"""Bytes that nccl keeps for each neighbour that it receives from: eight steps of its two protocols for short messages,
of 8 lines of 16 bytes for each of 512 threads and of 120 elements of 8 bytes for each of 640 (its `init.cc`), and 4 MiB
for long ones (NCCL_BUFFSIZE)."""
NEIGHBOURS = 3
"""Neighbours in each channel: one in the ring, two in the tree."""


class PassBytes(NamedTuple):
    """Bytes of one micro-batch in all blocks, the entrance and the exit."""

    activations: dict[str, float]
    """Bytes kept while blocks run backward, by kind: all but the exit's."""
    blocks: float
    """Bytes that blocks keep from forward to backward."""
    entrance: float
    exit: float
    working: float
    """Peak of a block's backward pass beyond the kept bytes, recomputed activations included."""
    output: float
    """The same for the exit."""

    @property
    def kept(self) -> float:
        """Bytes kept when the forward pass ends."""
        return self.blocks + self.entrance + self.exit


def pass_bytes(work: Workload, plan: Plan) -> PassBytes:
    """Bytes that a micro-batch keeps, and that its backward pass needs beyond them."""
    return _pass_bytes(work, Recompute.of(plan, work), *_gradient_bytes(plan))


def _gradient_bytes(plan: Plan) -> tuple[float, float]:
    """Bytes per weight of a gradient during the pass that makes it, and while it is being made; 0 where counted
    elsewhere."""
    numerics = numerics_of(plan)
    gradient, product = BYTES[numerics.gradients], BYTES[numerics.compute]
    sharded = plan.sharding in ("fsdp", "hsdp") and plan.replicas > 1 and plan.pp == 1
    outlives = _outlive(plan) or plan.replicas > 1
    return 0.0 if outlives else gradient, 0.0 if sharded else min(gradient, product)


def _outlive(plan: Plan) -> bool:
    """Whether gradients outlive the step, as in a flat buffer, or the micro-batch, as where they accumulate: then a new
    gradient is held until it is added to the accumulated one."""
    return plan.optimizer == "contiguous" or plan.accumulate > 1 or plan.pp > 1


def group_bytes(constants: Constants = DEFAULT) -> float:
    """Bytes that nccl keeps on a device for one group that it is in."""
    return constants.collective_multiprocessors * NEIGHBOURS * CONNECTION_BYTES


@lru_cache(maxsize=8192)
def _pass_bytes(work: Workload, how: Recompute, gradient: float, fresh: float) -> PassBytes:
    if work.kept_bytes is not None:
        kept = work.kept_bytes
        return PassBytes({"activations": kept}, 0.0, kept, 0.0, work.working_bytes, 0.0)
    activations: dict[str, float] = {}
    working = output = learned = before = after = 0.0
    for part in reversed(work.parts):
        ways = [(way.share, kept_by(part, way)) for way in how.ways(part)]
        kept_plainly = sum(kept_by(part, NOTHING).values())
        if part.place == "exit":
            output, learned = live_bytes(part, gradient, fresh)
            after = kept_plainly
            continue
        if part.place == "entrance":
            before = kept_plainly
        else:
            remade = max(0.0, kept_plainly - min(sum(kinds.values()) for _, kinds in ways))
            working = max(working, live_bytes(part, gradient, fresh)[0] + remade + learned)
        for share, kinds in ways:
            for kind, size in kinds.items():
                activations[kind] = activations.get(kind, 0.0) + part.count * size * share
    return PassBytes(activations, sum(activations.values()) - before, before, after, working, output)


def forward_bytes(work: Workload) -> float:
    """The peak bytes of activations in a forward pass that keeps nothing for a backward pass: the results of three
    consecutive operators, because Python variables hold them, and in a block the streams that they are computed from:
    the block's input and its norm; in a perceptron also attention's output, and the sum."""

    def most(part: Part) -> float:
        largest, last = 0.0, (0.0, 0.0)
        for op in part.forward:
            if op.kind in COLLECTIVE or op.module == "loss" or op.in_place:
                continue
            streams = 0 if part.block is None else 4 if op.module in ("perceptron", "experts") else 2
            largest = max(largest, sum(last) + op.written + part.entering * streams)
            last = last[1], op.written
        return largest

    return max(map(most, work.parts))


@lru_cache(maxsize=8192)
def live_bytes(part: Part, gradient: float, fresh: float) -> tuple[float, float]:
    """The peak bytes that a part's backward pass has alive beyond everything kept when it begins, and the bytes left at
    its end: the gradients of its weights, at `gradient` bytes per weight (0 if already allocated). A gradient that is
    being made takes `fresh` bytes per weight (0 if counted elsewhere)."""
    stream = part.entering if part.block else 0.0  # the residual stream's gradient waits beside each branch
    alive, most, current, beside = stream, stream, 0.0, 0.0
    for op in part.backward:
        if op.kind in COLLECTIVE or op.module == "shared_table":  # the latter has a moment of its own
            continue
        if op.scratch:
            beside = op.written
        elif op.weights:
            most = max(most, alive + op.weights * fresh)
            alive += op.weights * gradient
        else:
            most, beside = max(most, alive + op.written + beside), 0.0
            alive, current = alive + op.written - current, op.written
        alive -= op.kept
    learned = sum(op.weights for op in part.backward) * gradient
    return most, learned


def memory(
    work: Workload, plan: Plan, constants: Constants = DEFAULT, *, cpu: bool = False
) -> dict[str, float]:
    """Bytes of the fullest device by part; their sum is the peak.

    On a single CPU, the memory of allocator and libraries is not counted, because there only tensors are measured.
    """
    share, numerics = of_states.device_share(work, plan), numerics_of(plan)
    weights = share.sharded if share.gathers else share.parameters
    parts = {
        "weights": work.weight_bytes(BYTES[numerics.weights]) * weights,
        "optimizer": of_states.state_elements(work, plan, share) * BYTES[numerics.moments],
        "master_weights": share.updated * numerics.master_bytes,
    }
    if plan.offload == "optimizer":
        # Shards live in host memory, weights too; what is not sharded stays.
        parts["optimizer"] = parts["master_weights"] = 0.0
        if share.gathers:
            parts["weights"] = 0.0
    parts |= _moments(work, plan, share, cpu=cpu)
    groups = (plan.tp > 1) + (plan.pp > 1) + (plan.replicas > 1) + (plan.ep > 1)
    working = parts["activations"] + parts["output"] + parts["working"]
    parts["communication"] = 0.0 if cpu else groups * group_bytes(constants)
    parts["fragmentation"] = 0.0 if cpu else constants.fragmentation * working
    return parts


def _moments(work: Workload, plan: Plan, share: of_states.DeviceShare, *, cpu: bool) -> dict[str, float]:
    """Bytes in addition to weights and states at the worst of three moments: when the backward pass begins, when it is
    in the first block, and when it has ended."""
    numerics, alone = numerics_of(plan), plan.replicas == 1
    # Bytes per parameter on average, because frozen ones have no gradients.
    reduced, unreduced = share.learned * BYTES[numerics.reduction], share.learned * BYTES[numerics.gradients]
    activations, buckets, at_hand = worst_stage(work, plan), 0.0, 0.0
    # Gradients that were freed after the last step are allocated as activations are freed.
    standing = _outlive(plan)
    if share.gathers or (not alone and plan.sharding == "zero2"):
        gradients = share.sharded * reduced
        # A GPU's allocator keeps the blocks of the last step's shards, which are too small for activations.
        standing = standing or not (share.gathers and cpu)
        if share.gathers and plan.pp > 1:
            # A stage accumulates unsharded gradients, and reduces them once.
            gradients += share.parameters * reduced
    elif alone or plan.sharding == "ddp":
        gradients = share.parameters * (reduced if standing else unreduced)
        if not (alone or standing):
            # Replicas reduce gradients in buckets, which are held in addition to the gradients.
            buckets = share.parameters * reduced
    else:
        gradients, standing = share.parameters * reduced, True
    if plan.offload == "optimizer" and share.gathers:
        gradients = 0.0
    gathered = of_states.whole_bytes(work, plan, share)[2] if share.gathers else 0.0
    if share.gathers and plan.pp == 1:
        # The unsharded gradients of one block, and those of the previous block, which are being reduced.
        at_hand = (share.block_dense + share.block_experts) / work.pieces * (unreduced + reduced)
    begun = activations | {
        "gradients": gradients if standing else 0.0, "whole_gradients": at_hand, "gathered_weights": gathered,
        "temporary": 0.0, "buckets": buckets,
    }  # fmt: skip
    # At the very end the gradients of a table that is used twice are added: two gradients, and also their sum where the
    # whole step is compiled, except with a chunked loss, which stays an operator of its own. On a CPU a compiled step
    # adds the rows of the embedding to the gradient of the logits in place.
    whole_step = plan.compiles_whole
    in_place = 2 if whole_step and cpu else int(not whole_step or plan.loss == "chunked")
    added = work.shared_table * BYTES[numerics.gradients] * ((3 if standing else 2) - in_place)
    temporary = max(added, _temporary(work, plan, share))
    after = {"gradients": gradients, "temporary": temporary, "buckets": buckets}
    ended = dict.fromkeys(begun, 0.0) | after
    moments = [begun, ended]
    if not standing and plan.pp == 1 and work.blocks:
        entrance, first = work.parts[0], work.blocks[0]
        made = 1.0 - (entrance.learned - work.tied + first.learned) / work.parameters
        kept = sum(sum(kept_by(part, NOTHING).values()) for part in (entrance, first))
        working = live_bytes(first, *_gradient_bytes(plan))[0]
        # While the first block runs backward, recomputed activations included.
        alive = {"activations": kept, "output": 0.0, "working": working}
        moments.append(begun | alive | {"gradients": made * gradients, "buckets": made * buckets})
    return max(moments, key=lambda moment: sum(moment.values()))


def _temporary(work: Workload, plan: Plan, share: of_states.DeviceShare) -> float:
    """Bytes that an update allocates temporarily: the gradients in fp32 for master weights, and for an unfused AdamW
    the root of the second moment, for one tensor or for all at once."""
    numerics, number = numerics_of(plan), of_states.updated_bytes(plan)
    cast = 4.0 * share.updated if numerics.masters == "copy" and BYTES[numerics.reduction] == 2 else 0.0
    cast += of_states.orthogonalising_bytes(work, plan)
    if plan.optimizer == "foreach":
        return cast + share.updated * number
    if plan.optimizer == "loop":
        return cast + number * looped_elements(work) * share.updated / (share.learned * share.parameters)
    return cast


@lru_cache(maxsize=1024)
def looped_elements(work: Workload) -> int:
    """The most elements that torch's AdamW holds where it updates one tensor after the other: the root of the second
    moment, that root after bias correction, and the latter of the previous tensor, which it still holds. Matrices and
    token tables are a group of their own, in the order of the model."""
    sizes = [0]
    for part in work.parts:
        # A head that is tied to a table has no own weights.
        own = {"", *(op.linear for op in part.forward if op.weights >= op.batch * op.n * op.k)}
        made = (op for op in reversed(part.backward) if op.kind in MATRIX or op.module == "table")
        sizes += [op.weights for op in made if op.weights and op.linear in own] * min(part.count, 2)
    return max((2 * size + before for before, size in pairwise(sizes)), default=0)


def worst_stage(work: Workload, plan: Plan) -> dict[str, float]:
    """Activations, output and working memory of a backward pass, on the stage where their sum is largest."""
    micro_batch, depth = pass_bytes(work, plan), max(1, work.depth)
    blocks = 2 * micro_batch.blocks / depth if plan.offload == "activations" else micro_batch.blocks
    activations, output = blocks + micro_batch.entrance, micro_batch.output + micro_batch.exit
    working = micro_batch.working
    if plan.pp > 1:
        block = blocks / depth
        kept, last = most_blocks(work, plan, micro_batch.entrance / block if block else 0.0)
        front = (kept * block, 0.0)
        if plan.schedule == "zero_bubble":
            # The last stage defers the gradients of weights of p - 1 micro-batches, and keeps the products' inputs.
            put_off = min(plan.pp, plan.accumulate) - 1
            blocks += put_off * sum(part.count * weight_inputs(part) for part in work.blocks)
        # Under gpipe all micro-batches' outputs wait for their backward passes.
        waiting = (plan.accumulate - 1) * micro_batch.exit if plan.schedule == "gpipe" else 0.0
        back = (blocks / depth * last + waiting, output)
        activations, output = max(front, back, key=lambda stage: stage[0] + max(stage[1], working))
    # The output and a block's backward pass never need memory at the same time.
    if output >= working:
        return {"activations": activations, "output": output, "working": 0.0}
    return {"activations": activations, "output": 0.0, "working": working}


@lru_cache(maxsize=8192)
def weight_inputs(part: Part) -> float:
    """Bytes of one block that a micro-batch keeps between the two halves of a split backward pass: inputs of products
    with weights, and the gradients of their outputs."""
    products = [op for op in part.forward if op.kind == "gemm" and op.weights]
    return sum(op.kept + op.written for op in products)
