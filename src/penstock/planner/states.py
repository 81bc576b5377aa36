"""Weights, gradients and optimizer states: bytes per parameter, and what an update moves."""

from __future__ import annotations

import math

from penstock.config.plan import Master, Plan

UPDATE_LAUNCHES = 4
"""Small operators of a CPU's fused update for each tensor: its norm, its count of steps, its kernel, and Python."""
OPTIMIZER_OPERATORS = 10
"""Operators of one AdamW update written as single operations: decay, two moments, root, division, …"""
MULTI_TENSOR_ELEMENTS = 320 * 65536
"""Numbers that one launch of a multi-tensor operator covers: 320 thread blocks of 65,536 each."""
NEWTON_SCHULZ_STEPS = 5
MASTER_BYTES: dict[Master, float] = {"copy": 4.0, "remainder": 2.0}
"""How O2 keeps its fp32 weights: whole beside the half ones, or as the sixteen bits that bf16 weights lack."""
MOMENTS = {"adamw": 2.0, "adam8bit": 2.0, "sgd": 1.0, "muon": 1.0}
"""Numbers that an optimizer keeps per weight."""
EIGHT_BIT = 1.03
"""Bytes of a number kept in eight bits, with its blocks' scales (Dettmers et al., ICLR 2022)."""


def weight_size(plan: Plan) -> int:
    """Bytes per weight that forward and backward compute with; what is shared out is gathered in half precision."""
    if plan.precision == "O1":
        return 4 if plan.sharding == "ddp" else 2
    return 2 if plan.precision in ("O2", "O3") else 4


def stored_size(plan: Plan) -> int:
    """Bytes per weight as it is stored between steps, without master weights.

    Shards of weights are fp32 with O1 and O2, and then nothing else is stored. Where only optimizer states are shared
    out, whole weights in half precision lie beside shards in fp32, with O1 as with O2.
    """
    return 2 if plan.precision == "O3" or halves_beside_masters(plan) else 4


def halves_beside_masters(plan: Plan) -> bool:
    """Whether whole weights are stored in half precision, and fp32 ones for the optimizer to update beside them."""
    if plan.precision == "O1":
        return plan.sharding in ("zero1", "zero2")
    return plan.precision == "O2" and not shards_are_masters(plan)


def shards_are_masters(plan: Plan) -> bool:
    """Whether the fp32 weights that an optimizer updates are what each device holds of the weights."""
    return plan.precision in ("O1", "O2") and plan.sharding in ("fsdp", "hsdp")


def gradient_size(plan: Plan) -> int:
    """Bytes per gradient that is accumulated and reduced: of whole weights that lie there in half precision, in half;
    of weights in fp32, or whose update is shared out, in fp32.
    """
    if plan.gradients == "weights":
        shared = plan.precision == "O2" and plan.sharding != "ddp"
        return 4 if plan.precision == "O1" or shared else stored_size(plan)
    return 4 if plan.gradients == "fp32" else 2


def master_size(plan: Plan) -> float:
    """Bytes per weight of master weights, beside the weights that forward and backward compute with."""
    return MASTER_BYTES[plan.master] if halves_beside_masters(plan) else 0.0


def optimizer_size(plan: Plan) -> float:
    """Bytes per weight that the optimizer keeps, master weights among them."""
    number = stored_size(plan) if plan.precision == "O3" else 4.0
    if plan.algorithm == "adam8bit":
        number = EIGHT_BIT
    return MOMENTS[plan.algorithm] * number + master_size(plan)


def update_bytes(plan: Plan) -> float:
    """Bytes per weight that one update reads and writes, gradient clipping among them.

    A fused AdamW reads weight, gradient and both moments and writes all but the gradient; written as single operators
    it makes twenty accesses. Master weights add a gradient in fp32, its unscaling where the type is fp16, and the copy
    back. In the remainder's form one pass reads and writes the half weight, its remainder and both moments, reads the
    gradient as it is, and takes clipping's factor along; the norm has read the gradient once before.
    """
    if plan.precision == "O2" and plan.master == "remainder" and not shards_are_masters(plan):
        return 2.0 * (2.0 + 2.0) + 2.0 * 4.0 * MOMENTS[plan.algorithm] + 2.0 * gradient_size(plan)
    number = 2.0 if plan.precision == "O3" else 4.0
    kept = MOMENTS[plan.algorithm]
    state = EIGHT_BIT if plan.algorithm == "adam8bit" else number
    fused = plan.optimizer in ("fused", "contiguous")
    adam = (3 * number + 2 * kept * state) if fused else 20 * number * (1 + kept) / 3
    clip = 3 * number
    if plan.precision != "O2" or shards_are_masters(plan):
        return adam + clip
    size = gradient_size(plan)
    cast = size + 4.0 if size == 2 else 0.0
    unscale = 8.0 if plan.dtype == "fp16" else 0.0
    return adam + clip + cast + unscale + 6.0 + size


def update_launches(parameters: float, tensors: float, plan: Plan, device: str = "cuda") -> int:
    """Operators that one update of so many parameters in so many tensors launches."""
    chunks = max(1, math.ceil(parameters / MULTI_TENSOR_ELEMENTS))
    if plan.optimizer in ("loop", "foreach"):
        each = tensors if plan.optimizer == "loop" or device == "cpu" else chunks
        return math.ceil(each) * (OPTIMIZER_OPERATORS + 2)
    if plan.optimizer == "fused":
        return math.ceil(tensors * UPDATE_LAUNCHES) if device == "cpu" else 2 * chunks
    return 3


def newton_schulz_flops(rows: int, columns: int) -> float:
    """FLOPs of Muon's orthogonalisation of one (rows, columns) matrix: five steps of three products each, of the
    shorter side n and the longer one m: 4 n² m + 2 n³ (Jordan et al. 2024, "Muon")."""
    n, m = min(rows, columns), max(rows, columns)
    return NEWTON_SCHULZ_STEPS * (4.0 * n * n * m + 2.0 * n * n * n)
