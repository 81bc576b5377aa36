"""The choice between a CPU's two libraries for matrix products in fp32, from the products measured on the machine."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from penstock.config.machine import Machine, ProductForm
from penstock.config.model import ModelConfig
from penstock.config.plan import Plan
from penstock.planner.constants import DEFAULT
from penstock.planner.prediction import predict
from penstock.planner.price import form_of
from penstock.planner.rates import ONEDNN, SPECIAL, products_in

GAIN = 1.02
"""A choice is worth trying if a step is predicted to be faster by more than this factor."""


@lru_cache(maxsize=8)
def onednn_choice(machine: Machine) -> Callable[[int, int, int, ProductForm], bool]:
    """A function that returns whether oneDNN is faster than MKL for a product (m, k) @ (k, n) of a linear layer's pass,
    in fp32, on a machine where both were measured."""
    mkl, onednn = (products_in(machine, name, DEFAULT, 0, math.inf) for name in ("fp32", ONEDNN))
    either = mkl._replace(other=onednn)

    @lru_cache(maxsize=1 << 12)
    def faster(m: int, n: int, k: int, form: ProductForm) -> bool:
        special = form_of(mkl, form, m, n, k)
        return either.rate(m, n, k, special) > mkl.rate(m, n, k, special)

    return faster


def library_obstacle(machine: Machine, model: ModelConfig | None, plan: Plan) -> str | None:
    """Why choosing a library would gain nothing, in a sentence; None if a step of `model` is predicted to gain, or if
    oneDNN is faster for some measured product and there is no model to predict."""
    if machine.device != "cpu" or ONEDNN not in machine.peak_flops:
        return f"{machine.name} has no measured rates of oneDNN beside those of MKL"
    if model is not None:
        plans = (replace(plan, matmul="highest"), replace(plan, matmul="probed"))
        fixed, chosen = (predict(model, machine, each).iteration_seconds for each in plans)
        if fixed > GAIN * chosen:
            return None
        return "MKL is predicted to be as fast as oneDNN for this model's products"
    faster = onednn_choice(machine)
    measured = [s for s in machine.gemm if s.dtype == "fp32" and s.plain]
    if any(faster(s.m, s.n, s.k, SPECIAL.get(s.form, s.form)) for s in measured):
        return None
    return "MKL is as fast as oneDNN in all measured products of linear layers"
