"""How many parameters a device holds, updates and gathers under a layout."""

from __future__ import annotations

from penstock.config.plan import Plan
from penstock.planner.layout import stage_blocks
from penstock.planner.shapes import Block, Shape


def held_parameters(shape: Shape, plan: Plan) -> float:
    """Parameters of the fullest stage on one device, before data parallel sharding."""
    blocks = 0.0
    for block in shape.blocks:
        own = block.attention_parameters / plan.tp + block.norm_parameters
        if block.experts:
            own += block.router_parameters
            own += block.expert_parameters * (block.experts / plan.ep + block.shared) / plan.tp
        else:
            own += block.expert_parameters / plan.tp
        blocks += block.count * own
    if plan.pp == 1:
        return blocks + (shape.entrance_parameters + shape.exit_parameters) / plan.tp
    first, middle, last = stage_blocks(shape.depth, plan.pp)
    one = blocks / shape.depth
    entrance, exit_ = shape.entrance_parameters / plan.tp, shape.exit_parameters / plan.tp
    if shape.tied:
        exit_ += shape.output * shape.width / plan.tp
    return max(first * one + entrance, middle * one, last * one + exit_)


def held_experts(shape: Shape, plan: Plan) -> float:
    """Those of `held_parameters` that are experts, and so the same on 1/ep of the replicas only."""
    total = 0
    for block in shape.blocks:
        if block.experts:
            total += block.count * block.expert_parameters * block.experts
    if not total:
        return 0.0
    return total / plan.ep / plan.tp / shape.depth * max(stage_blocks(shape.depth, plan.pp))


def sharded_parameters(shape: Shape, plan: Plan, held: float) -> float:
    """Those of `held_parameters` that sharding leaves on each device: experts are shared out over fewer replicas, for
    ep has split them already."""
    group, replicas = expert_replicas(plan)
    experts = held_experts(shape, plan)
    return (held - experts) / group + experts / replicas


def kept_parameters(shape: Shape, plan: Plan, held: float) -> float:
    """Parameters that each device updates."""
    return held if plan.sharding == "ddp" else sharded_parameters(shape, plan, held)


def gathered_parameters(block: Block, plan: Plan) -> tuple[float, float]:
    """Of one block, what each device gathers of weights that are shared out over all replicas, and of experts, which
    are over those that hold the same ones; none where nobody else does."""
    experts = block.expert_parameters * block.experts
    _, replicas = expert_replicas(plan)
    return (block.parameters - experts) / plan.tp, experts / plan.ep / plan.tp if replicas > 1 else 0.0


def expert_replicas(plan: Plan) -> tuple[int, int]:
    """Replicas that weights are shared out over, and those of them that hold the same experts."""
    shards = plan.dp * plan.cp
    group = min(plan.shard, shards) if plan.sharding == "hsdp" else shards
    return group, max(1, group // plan.ep)
