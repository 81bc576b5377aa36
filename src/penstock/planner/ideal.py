"""The least time of a step's work on a machine: what a perfect program would need.

Matrix products run at the best rate that was measured near their shape, in whichever form is fastest there; all other
operators move their bytes once, at the bandwidth of a copy. Nothing is packed, launched, allocated or computed twice.
Compared with it, a measured part of a step shows how much is left to gain (Williams, Waterman and Patterson, CACM 2009,
section 3).
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from penstock.config.machine import Machine, ProductForm
from penstock.config.model import ModelConfig
from penstock.config.plan import Plan
from penstock.planner.describe import describe
from penstock.planner.learning import WHOLE, Learning, learning_part
from penstock.planner.operators import COLLECTIVE, MATRIX, Op
from penstock.planner.price import products_of
from penstock.planner.rates import Rates, rates_of
from penstock.planner.states import device_share, orthogonal_share, update_bytes

FORMS: tuple[ProductForm, ...] = ("forward", "input", "weight")
BETWEEN = "between products"
"""The row of operators that a compiler joins in one kernel: norms, activations, dropout, sums and casts."""
ALONE = {"norm": "norms", "activation": "activations", "dropout": "dropout", "torch_dropout": "dropout"}
"""Rows of the same operators where each is a separate kernel."""
OTHER = "sums, casts and copies"


class Least(NamedTuple):
    """Least work in a row of the table, for one step on one device."""

    flops: float = 0.0
    bytes: float = 0.0
    """Bytes that operators other than products read and write."""
    seconds: float = 0.0


def least_of_step(
    model: ModelConfig, machine: Machine, plan: Plan, *, real: float = 1.0, words: float = 1.0,
    learns: Learning = WHOLE,
) -> dict[str, Least]:  # fmt: skip
    """The least work of one optimizer step by rows: matrix products, attention, the operators between them, loss,
    embedding, optimizer.

    `real`, `words` and `learns` are as for `predict`.
    """
    work = learning_part(describe(model, plan, machine, real=real, words=words), learns)
    rates = rates_of(machine, plan)
    least: defaultdict[str, Least] = defaultdict(Least)
    for part in work.parts:
        compiled = plan.compiles_whole or (plan.compile == "blocks" and part.block is not None)
        for op in (*part.forward, *part.backward):
            if op.kind not in COLLECTIVE:
                row, times = row_of(op, compiled=compiled), part.count * plan.accumulate / plan.pp
                least[row] = Least(*[a + times * b for a, b in zip(least[row], _least(op, rates))])
    moved = device_share(work, plan).updated * update_bytes(plan, orthogonal_share(work, plan))
    least["optimizer"] = Least(0.0, moved, moved / rates.memory)
    return dict(least)


def row_of(op: Op, *, compiled: bool) -> str:
    """The row of the table to which an operator belongs."""
    direction = "forward" if op.forward else "backward"
    if op.kind == "attention" or (op.kind == "bmm" and op.module in ("attention", "cross")):
        return f"attention, {direction}"
    if op.kind in MATRIX:
        return f"products, {direction}"
    if op.module == "loss":
        return "loss"
    if op.module in ("table", "shared_table"):
        return "embedding"
    if compiled:
        return f"{BETWEEN}, {direction}"
    if op.scores:
        return f"attention, {direction}"
    return ALONE.get(op.kind, OTHER)


def _least(op: Op, rates: Rates) -> Least:
    moved = (op.read + op.written) / rates.memory
    if op.kind in MATRIX:
        by = products_of(op, rates)
        seconds = min(by.seconds(op.m, op.n, op.k, op.batch, form=form) for form in FORMS)
        return Least(op.flops, 0.0, max(seconds, moved))
    if op.kind == "attention":
        share_seen = min(0.5 if op.causal else 1.0, op.window / op.n if op.window else 1.0)
        return Least(op.flops * share_seen, 0.0, max(op.flops * share_seen / rates.product_rate, moved))
    return Least(0.0, op.read + op.written, moved)
