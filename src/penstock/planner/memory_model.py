"""Bytes on the fullest device of a layout, by what takes them.

Per block and micro-batch the activations are those of `block_memory`. A pipeline's first stage keeps as many
micro-batches as there are stages; the last one keeps the output besides.
"""

from __future__ import annotations

from penstock.config.plan import Plan
from penstock.planner.block_memory import block_activations, block_bytes, weight_inputs
from penstock.planner.constants import DEFAULT, Constants
from penstock.planner.holding import gathered_parameters, held_parameters, sharded_parameters
from penstock.planner.layout import stage_blocks
from penstock.planner.shapes import Shape
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
    sharded = sharded_parameters(shape, plan, held)
    master = master_size(plan)
    kept = held if plan.sharding == "ddp" else sharded
    parts = {
        "weights": stored_size(plan) * (sharded if plan.sharding in ("fsdp", "hsdp") else held),
        "gradients": gradient_size(plan) * (sharded if plan.sharding in ("zero2", "fsdp", "hsdp") else held),
        "optimizer": kept * (optimizer_size(plan) - master),
        "master_weights": kept * master,
    }
    if plan.offload == "optimizer":
        # Shards live in host memory, weights and gradients too; what is not shared out stays.
        parts["optimizer"] = parts["master_weights"] = 0.0
        if plan.sharding in ("fsdp", "hsdp"):
            parts["weights"] = parts["gradients"] = 0.0
    parts |= _worst_stage(shape, plan)
    parts["gathered_weights"] = _gathered(shape, plan)
    groups = (plan.tp > 1) + (plan.pp > 1) + (shards > 1) + (plan.ep > 1)
    parts["communication"] = groups * BUFFER_BYTES
    lost = parts["activations"] + parts["output"] + parts["working"]
    parts["fragmentation"] = constants.fragmentation * lost
    return parts


def activation_kinds(shape: Shape, plan: Plan, activations: float) -> dict[str, float]:
    """`activations`, the part of `memory`, by kind: what each kind of one micro-batch takes of it."""
    kinds: dict[str, float] = {}
    for block in shape.blocks:
        whole = block_activations(block, plan)
        if plan.recompute in ("full", "early"):
            kept, _ = block_bytes(block, plan)
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
    late_output = 0.0
    if plan.schedule == "gpipe":
        # All micro-batches' outputs wait for their backward passes: log-probabilities, in half where compiled.
        late_output = (
            (plan.accumulate - 1) * rows * shape.output / plan.tp * (2 if plan.compile == "whole" else 4)
        )
    back = (resting / shape.depth * last * rested(plan) + late_output, output)
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


def rested(plan: Plan) -> float:
    """The same of the last stage: one, but all under GPipe, and of each chunk but the last p when interleaved."""
    if plan.schedule == "gpipe":
        return float(plan.accumulate)
    if plan.virtual > 1:
        return min(float(plan.accumulate), ((plan.virtual - 1) * plan.pp + 1) / plan.virtual)
    return 1.0


def _gathered(shape: Shape, plan: Plan) -> float:
    """Whole weights of the blocks at hand and the next, and their gradients, where weights are sharded."""
    if plan.sharding not in ("fsdp", "hsdp") or plan.dp * plan.cp == 1:
        # Autocast keeps a copy in half of each weight that it has in fp32.
        whole = plan.precision == "O1" and weight_size(plan) == 4
        return 2 * held_parameters(shape, plan) if whole else 0.0
    block = max(sum(gathered_parameters(b, plan)) for b in shape.blocks)
    ends = shape.output * shape.width / plan.tp
    return 2 * block * weight_size(plan) + ends * (1 if shape.tied else 2) * weight_size(plan)
