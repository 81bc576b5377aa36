"""Bytes that one block keeps of one micro-batch for its backward pass, by kind.

For GPT in half precision they are the formulas of Korthikanti et al. 2022 (Table 2), exactly.

Letters: T tokens of a micro-batch on this device, D width, A features of query heads, K of key heads, M hidden width,
t tensor parallel degree.
"""

from __future__ import annotations

from penstock.config.plan import Plan
from penstock.planner.rates import FUSED
from penstock.planner.shapes import Block


def block_activations(block: Block, plan: Plan, recompute: str | None = None) -> dict[str, float]:
    """Bytes that one block keeps of one micro-batch on one device, by kind, without any recomputation of it whole.

    `recompute` stands in for the plan's.
    """
    recompute = plan.recompute if recompute is None else recompute
    t = plan.tp
    tokens = plan.micro_batch * block.tokens / plan.cp
    rows = tokens / (t if plan.sp else 1)
    half = plan.precision in ("O2", "O3")
    c = 4 if plan.precision == "O0" else 2
    e = c if half else 4
    d = block.width
    a, kv = block.heads * block.features / t, max(1.0, block.kv_heads / t) * block.features
    operators = recompute == "operators"
    parts = {"norms": block.norms * rows * d * e, "inputs": block.norms * rows * d * c}
    if block.rms and plan.compile == "none":
        parts["norms"] += block.norms * rows * d * (4 + c)
    parts["attention"] = tokens * (a + 2 * kv) * c * (2 if block.cross else 1) + tokens * a * c
    scores = tokens * (block.tokens + block.cross) * block.heads / t
    if plan.attention in FUSED:
        parts["scores"] = tokens * block.heads / t * 4.0
    elif recompute == "selective":
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


def weight_inputs(block: Block, plan: Plan) -> float:
    """Bytes of one block's inputs of products with weights, and of their outputs' gradients: what is left of a
    micro-batch between the two halves of a split backward pass."""
    tokens = plan.micro_batch * block.tokens / plan.cp
    rows = tokens / (plan.tp if plan.sp else 1)
    c = 4 if plan.precision == "O0" else 2
    visits = (block.routed * block.capacity + block.shared) if block.experts else 1.0
    a, kv = block.heads * block.features / plan.tp, max(1.0, block.kv_heads / plan.tp) * block.features
    hidden = tokens * block.hidden / plan.tp * visits
    inputs = 2 * rows * block.width + tokens * a + hidden
    gradients = 2 * rows * block.width + tokens * (a + 2 * kv) + hidden * (2 if block.gated else 1)
    return (inputs + gradients) * c


def block_bytes(block: Block, plan: Plan) -> tuple[float, float]:
    """Bytes that one block keeps from forward to backward, on the mean over blocks where only each so-manieth
    recomputes, and those that a block makes again when its turn comes."""
    whole = sum(block_activations(block, plan, "none").values())
    if plan.recompute == "none":
        return whole, 0.0
    if plan.recompute in ("full", "early"):
        rows = plan.micro_batch * block.tokens / plan.cp / (plan.tp if plan.sp else 1)
        kept, again = rows * block.width * (4 if plan.precision == "O0" else 2), whole
    else:
        kept, again = sum(block_activations(block, plan).values()), 0.0
    every = plan.recompute_every
    return kept / every + whole * (1 - 1 / every), again
