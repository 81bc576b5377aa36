"""Seconds of one operation on a CPU, from what `penstock probe` measured of this one.

A core packs the factors of a product into panels and then multiplies them, and it reads what an activation needs and
then computes exponentials: little of the moving hides behind the computing, unlike on a GPU, so that the two are added
and not compared. Measured rates are those of operands that lie in a cache; the moving is from memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

from penstock.config.machine import KernelSample, Machine
from penstock.planner.operations import Op

IN_PLACE = 0.75
"""Traffic of a CPU's update in place over that of the additions that its bandwidth was measured with: these write to a
third array, whose lines are first read, four accesses for the three that are counted."""
NEAREST = 2
"""Measured shapes between which a kernel's rate is interpolated."""
TRACED_BACKWARD = 1.25
"""Products that a traced backward pass of fused attention does over those that torch counts: the scores again."""


def host_seconds(
    op: Op, machine: Machine, gemm_rate: Callable[[Op], float], moved: float, *, fused: bool, measured: bool
) -> float:
    """Seconds of `op` done once, whose traffic takes `moved`. `gemm_rate` gives the rate of a product of its shape.

    `measured` says whether the rates of kernels hold for the type that is computed in, `fused` whether a batched
    product is part of a fused attention kernel.
    """
    if op.kind == "gemm" or op.kind == "conv":
        return op.flops / gemm_rate(op) + moved
    if op.kind != "bmm":
        name = kernel_name(op)
        element = _kernel_rate(machine, name, 0, 0) if name else None
        return moved + op.written_elements / element if element else moved
    flops = float(op.flops + op.recomputed_flops)
    name = "bmm"
    if fused:
        name = "attention" if op.phase == "forward" else "attention_backward"
        if "scaled_dot" in op.name and op.phase == "backward":
            flops *= TRACED_BACKWARD
    rate = _kernel_rate(machine, name, *attention_shape(op)) if measured else None
    if not fused:
        return flops / (rate or gemm_rate(op)) + moved
    # What a fused kernel moves lay in the cache when it was measured, and mostly does so in a step.
    return flops / rate if rate else max(flops / gemm_rate(op), moved)


def attention_shape(op: Op) -> tuple[int, int]:
    """Tokens and features of a head of one of attention's products; a traced kernel has all its products in one."""
    if "scaled_dot" in op.name:
        return op.m, op.k // (4 if op.phase == "backward" else 2)
    return op.m, op.k if op.n == op.m else op.n


def kernel_name(op: Op) -> str:
    """What a probe calls an operation that computes more than it moves; "" for all others."""
    backward = "_backward" if op.phase == "backward" else ""
    if op.kind in ("norm", "softmax"):
        return op.kind + backward
    if op.name == "mlp.activation" or "gelu" in op.name:
        return "gelu" + backward
    return ""


@lru_cache(maxsize=4096)
def _kernel_rate(machine: Machine, name: str, tokens: int, features: int) -> float | None:
    # A machine knows its hash; that of its samples takes as long as looking at them.
    return kernel_rate(machine.kernels, name, tokens, features)


@lru_cache(maxsize=4096)
def kernel_rate(samples: tuple[KernelSample, ...], name: str, tokens: int, features: int) -> float | None:
    """The measured rate of a kernel, between the nearest shapes by distance of logarithms; none if not measured."""
    near: list[tuple[float, float]] = []
    for sample in samples:
        if sample.name == name:
            if not sample.tokens:
                return sample.per_second
            apart = math.log(sample.tokens / tokens) ** 2 + math.log(sample.features / features) ** 2
            near.append((apart, sample.per_second))
    if not near:
        return None
    weights = [(1.0 / (apart + 1e-6), rate) for apart, rate in sorted(near)[:NEAREST]]
    return sum(weight * rate for weight, rate in weights) / sum(weight for weight, _ in weights)
