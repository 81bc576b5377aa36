"""How much memory one optimizer step takes at its worst moment, by what takes it. Free of torch.

Two moments compete. When the backward pass has begun, nearly all activations are there, the gradients that one block
computes with, and, where gradients are cleared to None, next to no gradient of a weight yet. At the end of backward all
gradients are there and no activation is, and the optimizer may want temporaries. What lies between them trades one for
the other, layer by layer.
"""

from __future__ import annotations

from penstock.config.plan import Plan
from penstock.planner.states import EIGHT_BIT, MOMENTS, master_size
from penstock.planner.time import Workload


def step_memory(work: Workload, plan: Plan) -> dict[str, int]:
    """Bytes at the peak by part: `weights`, `master_weights` (under O2), `optimizer`, `gradients`, `activations`,
    `working` (one block's backward pass) and `temporary` (what an unfused AdamW computes in between).

    `activations` hold the half-precision copies of weights that autocast keeps too. The allocator's own overhead is not
    counted, nor what libraries take for themselves.
    """
    size = 2 if plan.precision in ("O2", "O3") else 4
    number = 2 if plan.precision == "O3" else 4
    weights = work.parameters * size
    moment = EIGHT_BIT if plan.algorithm == "adam8bit" else number
    parts = {"weights": weights, "optimizer": int(MOMENTS[plan.algorithm] * moment * work.parameters)}
    gradients = weights
    if plan.precision == "O2":
        parts["master_weights"] = int(work.parameters * master_size(plan))
        # Collected in fp32 for the master weights.
        gradients += work.parameters * number
    # Gradients outlive the step where they have a flat buffer, and the micro-batch where they accumulate.
    standing = weights if plan.optimizer == "contiguous" or plan.accumulate > 1 else 0
    begun = {
        "gradients": standing,
        "activations": work.activation_bytes,
        "working": work.working_bytes,
        "temporary": 0,
    }
    ended = {
        "gradients": gradients, "activations": 0, "working": 0, "temporary": _scratch(work, plan, number),
    }  # fmt: skip
    return parts | max(begun, ended, key=lambda moment: sum(moment.values()))


def _scratch(work: Workload, plan: Plan, size: int) -> int:
    """What an AdamW update allocates in between: the root of the second moment, per tensor or of all at once."""
    if plan.optimizer == "foreach":
        return work.parameters * size
    if plan.optimizer == "loop":
        return (
            2 * size * work.parameters // max(work.tensors // 8, 1)
        )  # the largest tensor is far above the mean
    return 0
