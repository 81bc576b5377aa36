"""Muon's products and transfers as operators: of the devices that share a matrix, one (its owner) orthogonalises the
whole matrix; it gathers the update and scatters the result in bf16 (`penstock.optim.muon`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from penstock.config.optimizers import OPTIMIZERS
from penstock.config.plan import Plan
from penstock.planner import price
from penstock.planner.collectives import gather_seconds, group_of
from penstock.planner.operators import COLLECTIVE, Op, Workload
from penstock.planner.rates import Rates, rates_of
from penstock.planner.states import DeviceShare, learned_matrices

ITERATIONS = 5
_HALF = 2.0


class OwnerSeconds(NamedTuple):
    """Seconds per step of one device."""

    products: float
    """Newton–Schulz iterations of the device's own matrices."""
    sent: float
    """Gathering updates to their owners, and scattering them."""


def newton_schulz(op: Op, size: float = _HALF) -> tuple[Op, ...]:
    """The products of one iteration on the matrices of a linear layer: `op.batch` matrices of (n, k), in elements of
    `size` bytes."""
    short, long = min(op.n, op.k), int(max(op.n, op.k))
    square, whole = op.batch * short * short * size, op.batch * short * long * size

    def product(name: str, n: int, k: int, read: float, written: float) -> Op:
        return Op(f"{op.name}.{name}", "gemm", batch=op.batch, m=short, n=n, k=k, read=read, written=written)

    return (
        product("gram", int(short), long, whole, square),
        product("gram.square", int(short), int(short), 2 * square, square),
        product("turn", long, int(short), 2 * whole + square, whole),
    )


def update_operators(
    work: Workload, plan: Plan, share: DeviceShare, size: float = _HALF
) -> Iterator[tuple[float, Op]]:
    """The operators by which one device orthogonalises updates, each with its number of runs; collectives run once per
    matrix, with its bytes. Empty for other optimizers."""
    if OPTIMIZERS[plan.algorithm].matrices != "orthogonal":
        return
    adapted = any(op.adapter for _, op in learned_matrices(work))
    every = learned_matrices(work if adapted else work.whole or work)
    dense = plan.tp * share.replicas
    shared = [
        (count, op) for count, op in every if dense > 1 and not (plan.ep > 1 and op.module == "experts")
    ]
    matrices = sum(count for count, _ in shared)
    # Matrices are assigned in turn: the device with the most takes part in the last, incomplete round too.
    turns = math.ceil(matrices / plan.pp / dense) / matrices if matrices else 0.0
    for count, op in every:
        own = count * turns if (count, op) in shared else count / plan.pp
        if plan.ep > 1 and op.module == "experts":  # each device has whole ones
            own, op = count / plan.pp, op._replace(batch=op.batch / (plan.ep * share.expert_replicas))
        for product in newton_schulz(op, size):
            yield ITERATIONS * own, product
    for count, op in shared:
        sent = op.batch * op.n * op.k * _HALF
        yield count / plan.pp, Op(f"{op.name}.to_owner", "gather", read=sent)
        yield count / plan.pp, Op(f"{op.name}.from_owner", "scatter", read=sent)


def owner_seconds(work: Workload, rates: Rates, plan: Plan, share: DeviceShare) -> OwnerSeconds | None:
    """Seconds of the operators of `update_operators`; None for other optimizers. Iterations are in bf16 under every
    Plan, except on a CPU without bf16 units, where fp32 is faster."""
    if OPTIMIZERS[plan.algorithm].matrices != "orthogonal":
        return None
    return _owner_seconds(work, rates, plan, share)


@lru_cache(maxsize=4096)
def _owner_seconds(work: Workload, rates: Rates, plan: Plan, share: DeviceShare) -> OwnerSeconds:
    peak = rates.machine.peak_flops
    slow = peak.get("bf16", 0.0) < peak.get("fp32", 0.0)
    own = replace(plan, precision="O0" if slow else "O1", dtype="bf16", products="plain")
    iterating = rates_of(rates.machine, own)
    group = group_of(rates, plan.tp * share.replicas, 1)
    products = sent = 0.0
    for times, op in update_operators(work, plan, share, 4.0 if slow else _HALF):
        if op.kind in COLLECTIVE:
            sent += times * gather_seconds(group, op.read, scatters=op.kind == "scatter")
        else:
            products += times * price.seconds(op, iterating)
    return OwnerSeconds(products, sent)
