"""Bytes on the fullest device of a layout, by what takes them.

Per block and micro-batch the activations are those that autograd keeps; for GPT in half precision they are the
formulas of Korthikanti et al. 2022 (Table 2), exactly. A pipeline's first stage keeps as many micro-batches as there
are stages; the last one keeps the output besides.

Letters: T tokens of a micro-batch on this device, D width, A features of query heads, K of key heads, M hidden width,
t tensor parallel degree.
"""

from __future__ import annotations

from penstock.config.plan import Plan
from penstock.planner.constants import DEFAULT, Constants
from penstock.planner.iteration import held_experts, held_parameters
from penstock.planner.layout import stage_blocks
from penstock.planner.rates import FUSED
from penstock.planner.shapes import Block, Shape
from penstock.planner.states import (
    gradient_size,
    master_size,
    optimizer_size,
    stored_size,
    weight_size,
)

LOSS_MEMORY = {"none": 14, "blocks": 14, "whole": 6}
"""Bytes per number of the output at the loss's worst moment, with outputs of two bytes. Eager cross-entropy has, at the
end of its backward pass, log-probabilities and two gradients in fp32 and the last gradient in half; compiled it has the
output in half and its gradient."""
PARALLEL_LOSS_MEMORY = 18
"""The same over tensor parallel devices, in eager code, which keeps the exponentials besides."""
BUFFER_BYTES = 64 * 2**20
"""What collectives keep for themselves, per group."""


def memory(
    shape: Shape,
    plan: Plan,
    constants: Constants = DEFAULT,
    *,
    held: float | None = None,
) -> dict[str, float]:
    """Bytes of the fullest device by part; their sum is the peak. `held` is its number of parameters, if known."""
    held = held_parameters(shape, plan) if held is None else held
    shards = plan.dp * plan.cp
    group = min(plan.shard, shards) if plan.sharding == "hsdp" else shards
    # What sharding leaves on each device: experts are shared out over fewer replicas, for ep has split them already.
    experts = held_experts(shape, plan)
    sharded = (held - experts) / group + experts / max(1, group // plan.ep)
    master = master_size(plan)
    kept = held if plan.sharding == "ddp" else sharded
    parts = {
        "weights": stored_size(plan) * (sharded if plan.sharding in ("fsdp", "hsdp") else held),
        "gradients": gradient_size(plan) * (sharded if plan.sharding in ("zero2", "fsdp", "hsdp") else held),
        "optimizer": kept * (optimizer_size(plan) - master),
        "master_weights": kept * master,
    }
    if plan.offload == "optimizer":
        parts["optimizer"] = parts["master_weights"] = 0.0
    parts |= _worst_stage(shape, plan)
    parts["gathered_weights"] = _gathered(shape, plan)
    groups = (plan.tp > 1) + (plan.pp > 1) + (shards > 1) + (plan.ep > 1)
    parts["communication"] = groups * BUFFER_BYTES
    lost = parts["activations"] + parts["output"] + parts["working"]
    parts["fragmentation"] = constants.fragmentation * lost
    return parts


def block_activations(block: Block, plan: Plan) -> dict[str, float]:
    """Bytes that one block keeps of one micro-batch on one device, by kind, without any recomputation of it whole."""
    t = plan.tp
    tokens = plan.micro_batch * block.tokens / plan.cp
    rows = tokens / (t if plan.sp else 1)
    half = plan.precision in ("O2", "O3")
    c = 4 if plan.precision == "O0" else 2
    e = c if half else 4
    d = block.width
    a, kv = block.heads * block.features / t, block.kv_heads * block.features / t
    operators = plan.recompute == "operators"
    parts = {"norms": block.norms * rows * d * e, "inputs": block.norms * rows * d * c}
    if block.rms and plan.compile == "none":
        parts["norms"] += block.norms * rows * d * (4 + c)
    parts["attention"] = tokens * (a + 2 * kv) * c * (2 if block.cross else 1) + tokens * a * c
    scores = tokens * (block.tokens + block.cross) * block.heads / t
    if plan.attention in FUSED:
        parts["scores"] = tokens * block.heads / t * 4.0
    elif plan.recompute == "selective":
        parts["scores"] = 0.0
    else:
        parts["scores"] = scores * (c + ((c + 1) if block.dropout else 0))
    visits = (block.routed * block.capacity + block.shared) if block.experts else 1.0
    hidden = tokens * block.hidden / t * visits
    parts["mlp"] = hidden * c * ((3 if plan.compile != "none" else 4) if block.gated else 2)
    if block.experts:
        parts["mlp"] += tokens * d * block.routed * block.capacity * c
    parts["masks"] = block.norms * rows * d if block.dropout else 0.0
    if operators:
        # The block's input, every other product, and attention's output; eager code keeps the last product besides.
        kept = d + (d if plan.compile == "none" else 0)
        parts = {
            "inputs": rows * kept * c,
            "attention": tokens * (2 * a + kv) * c,
            "scores": parts["scores"],
            "mlp": hidden * c,
        }
    return parts


def activation_kinds(shape: Shape, plan: Plan, activations: float) -> dict[str, float]:
    """`activations`, the part of `memory`, by kind: what each kind of one micro-batch takes of it."""
    kinds: dict[str, float] = {}
    for block in shape.blocks:
        whole = block_activations(block, plan)
        kept, _ = block_bytes(block, plan)
        if plan.recompute in ("full", "early"):
            inputs = plan.micro_batch * block.tokens / plan.cp / (plan.tp if plan.sp else 1) * block.width
            checkpoint = inputs * (4 if plan.precision == "O0" else 2) / plan.recompute_every
            kinds["checkpoints"] = kinds.get("checkpoints", 0.0) + block.count * checkpoint
            share = max(0.0, kept - checkpoint) / sum(whole.values())
        else:
            share = 1.0
        for name, size in whole.items():
            kinds[name] = kinds.get(name, 0.0) + block.count * size * share
    total = sum(kinds.values())
    return {name: activations * size / total for name, size in kinds.items() if size > 0} if total else {}


def weight_inputs(block: Block, plan: Plan) -> float:
    """Bytes of one block's inputs of products with weights, and of their outputs' gradients: what is left of a
    micro-batch between the two halves of a split backward pass."""
    tokens = plan.micro_batch * block.tokens / plan.cp
    rows = tokens / (plan.tp if plan.sp else 1)
    c = 4 if plan.precision == "O0" else 2
    visits = (block.routed * block.capacity + block.shared) if block.experts else 1.0
    a, kv = block.heads * block.features / plan.tp, block.kv_heads * block.features / plan.tp
    hidden = tokens * block.hidden / plan.tp * visits
    inputs = 2 * rows * block.width + tokens * a + hidden
    gradients = 2 * rows * block.width + tokens * (a + 2 * kv) + hidden * (2 if block.gated else 1)
    return (inputs + gradients) * c


def block_bytes(block: Block, plan: Plan) -> tuple[float, float]:
    """Bytes that one block keeps from forward to backward, and those that it makes again when its turn comes."""
    whole = sum(block_activations(block, plan).values())
    if plan.recompute not in ("full", "early", "operators"):
        return whole, 0.0
    rows = plan.micro_batch * block.tokens / plan.cp / (plan.tp if plan.sp else 1)
    c = 4 if plan.precision == "O0" else 2
    if plan.recompute == "operators":
        return whole, 0.0
    only = rows * block.width * c
    every = plan.recompute_every
    return only / every + whole * (1 - 1 / every), whole


def _worst_stage(shape: Shape, plan: Plan) -> dict[str, float]:
    """Activations, output and what is computed again, on the stage where they are most together."""
    kept = again = 0.0
    for block in shape.blocks:
        one, most = block_bytes(block, plan)
        kept += block.count * one
        again = max(again, most)
    if plan.offload == "activations":
        kept = 2 * kept / shape.depth
    tokens = plan.micro_batch * shape.samples_are_tokens / plan.cp
    rows = plan.micro_batch * shape.output_tokens / plan.cp
    half = plan.precision != "O0"
    each = LOSS_MEMORY[plan.compile]
    if plan.tp > 1 and plan.compile != "whole":
        each = PARALLEL_LOSS_MEMORY
    output = rows * shape.output / plan.tp * each + rows * shape.width * (2 if half else 4) * 2
    entrance = tokens * shape.width * (2 if half else 4)
    # A block's backward pass has what was made again and as many gradients; the loss is over by then.
    work = 2 * again
    if plan.pp == 1:
        return {"activations": kept + entrance} | _larger(output, work)
    first, _, last = stage_blocks(shape.depth, plan.pp)
    flying = in_flight(plan)
    front = (kept / shape.depth * first * flying + entrance * flying, 0.0)
    resting = kept
    if plan.schedule == "zero_bubble":
        # The last stage puts off the gradients of weights of p - 1 micro-batches, and keeps the products' inputs.
        late = min(plan.pp, plan.accumulate) - 1
        resting += late * sum(block.count * weight_inputs(block, plan) for block in shape.blocks)
    back = (resting / shape.depth * last, output)
    activations, output = max(front, back, key=lambda stage: stage[0] + max(stage[1], work))
    return {"activations": activations} | _larger(output, work)


def _larger(output: float, work: float) -> dict[str, float]:
    """The output and a block's backward pass never need memory together."""
    return {"output": output, "working": 0.0} if output >= work else {"output": 0.0, "working": work}


def in_flight(plan: Plan) -> float:
    """Micro-batches whose activations the first stage keeps at the most (Narayanan et al. 2021; Korthikanti et al.
    2022, section 4.2.3 for interleaving)."""
    m = float(plan.accumulate)
    if plan.schedule == "gpipe":
        return m
    if plan.virtual > 1:
        return min(m, plan.pp * (1 + (plan.pp - 1) / (plan.pp * plan.virtual)))
    return min(m, float(plan.pp))


def _gathered(shape: Shape, plan: Plan) -> float:
    """Whole weights of the blocks at hand and the next, and their gradients, where weights are sharded."""
    if plan.sharding not in ("fsdp", "hsdp") or plan.dp * plan.cp == 1:
        # Autocast keeps a copy in half of each weight that it has in fp32.
        whole = plan.precision == "O1" and weight_size(plan) == 4
        return 2 * held_parameters(shape, plan) if whole else 0.0
    block = max(block.parameters for block in shape.blocks) / plan.tp
    ends = shape.output * shape.width / plan.tp
    return 2 * block * weight_size(plan) + ends * (1 if shape.tied else 2) * weight_size(plan)
