"""How much memory one optimizer step takes at its worst moment, by what takes it. Free of torch.

Two moments compete. At the end of forward all activations are there and, where gradients are cleared to None, no
gradient is yet. At the end of backward all gradients are there and no activation is, and the optimizer may
want temporaries. What lies between them trades one for the other, layer by layer.
"""

from __future__ import annotations

from penstock.config.plan import Plan
from penstock.planner.time import Workload


def step_memory(work: Workload, plan: Plan) -> dict[str, int]:
    """Bytes at the peak by part: `weights`, `optimizer`, `gradients`, `activations` and `temporary`.

    `activations` hold the half-precision copies of weights that autocast keeps too; `temporary` is what an unfused
    AdamW computes in between. The allocator's own overhead is not counted, nor what libraries take for themselves.
    """
    size = 2 if plan.precision == "O3" else 4
    weights = work.parameters * size
    state = 2 * work.parameters * size
    # Gradients outlive the step where they have a flat buffer, and the micro-batch where they accumulate.
    standing = weights if plan.optimizer == "contiguous" or plan.accumulate > 1 else 0
    forward_end = {"gradients": standing, "activations": work.activation_bytes, "temporary": 0}
    backward_end = {
        "gradients": weights,
        "activations": 0,
        "temporary": _scratch(work, plan, size),
    }
    worst = max(forward_end, backward_end, key=lambda moment: sum(moment.values()))
    return {"weights": weights, "optimizer": state, **worst}


def _scratch(work: Workload, plan: Plan, size: int) -> int:
    """What an AdamW update allocates in between: the root of the second moment, per tensor or of all at once."""
    if plan.optimizer == "foreach":
        return work.parameters * size
    if plan.optimizer == "loop":
        return (
            2 * size * work.parameters // max(work.tensors // 8, 1)
        )  # the largest tensor is far above the mean
    return 0
