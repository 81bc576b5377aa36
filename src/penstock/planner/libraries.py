"""The choice between a CPU's two libraries for matrix products in fp32, from the products measured on the machine."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

from penstock.config.machine import Machine, ProductForm
from penstock.planner.constants import DEFAULT
from penstock.planner.price import form_of
from penstock.planner.rates import ONEDNN, SPECIAL, products_in

WORTH = 1.05
"""oneDNN multiplies a shape that it was measured to multiply so many times as fast as MKL."""


@lru_cache(maxsize=8)
def onednn_choice(machine: Machine) -> Callable[[int, int, int, ProductForm], bool]:
    """A function that tells whether a product (m, k) @ (k, n) of a linear layer's pass is faster by oneDNN than by MKL,
    in fp32 on a machine where both were measured."""
    mkl, onednn = (products_in(machine, name, DEFAULT, 0, math.inf) for name in ("fp32", ONEDNN))

    @lru_cache(maxsize=1 << 12)
    def faster(m: int, n: int, k: int, form: ProductForm) -> bool:
        special = form_of(mkl, form, m, n, k)
        return onednn.rate(m, n, k, special) > WORTH * mkl.rate(m, n, k, special)

    return faster


def library_obstacle(machine: Machine) -> str | None:
    """Why a choice would change nothing, in a sentence; None if oneDNN is faster for a measured product."""
    if machine.device != "cpu" or ONEDNN not in machine.peak_flops:
        return f"{machine.name} has no measured rates of oneDNN beside those of MKL"
    faster = onednn_choice(machine)
    measured = [s for s in machine.gemm if s.dtype == "fp32" and s.plain]
    if any(faster(s.m, s.n, s.k, SPECIAL.get(s.form, s.form)) for s in measured):
        return None
    return "MKL is as fast as oneDNN in all measured products of linear layers"
