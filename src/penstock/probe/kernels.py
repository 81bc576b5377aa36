"""Measures fused operators against torch's own, eager and compiled; `plan.fuse=auto` decides by these figures."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.config.fused import FusedName
from penstock.kernels.bias_activation import apply_activation, bias_activation
from penstock.kernels.residual_norm import add_norm
from penstock.process import set_host_memory

WARM_UP = 2
TYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Case:
    """One operator at one size and type: a plain form, a fused one, and inputs that both differentiate."""

    operator: FusedName
    variant: str
    """The kind of norm or activation."""
    rows: int
    features: int
    plain: Callable[..., Any]
    fused: Callable[..., Any]
    inputs: Callable[[torch.dtype], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Median milliseconds of forward and backward together, by form."""

    operator: FusedName
    variant: str
    rows: int
    features: int
    dtype: str
    milliseconds: Mapping[str, float]
    """`eager` and `compiled` of the plain form, `fused`, and `fused_compiled`, as it is called inside compiled code."""
    gains: Mapping[str, float]
    """Median over rounds of eager / fused, and of compiled / fused_compiled."""


class _BiasInProduct(torch.autograd.Function):
    """The bias as a product adds it: at no cost of its own forward, and with a sum over rows backward."""

    @staticmethod
    def forward(ctx: Any, product: Tensor, bias: Tensor) -> Tensor:
        return product.view_as(product)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.sum(0)


def _norm_case(variant: str, norm: Callable[..., Any], rows: int, features: int) -> Case:
    def plain(x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        s = x + branch
        if bias is None:
            return s, F.rms_norm(s, (features,), weight, 1e-5)
        return s, F.layer_norm(s, (features,), weight, bias, 1e-5)

    def fused(x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return add_norm(x, branch, weight, bias, 1e-5, rms=bias is None)

    def inputs(dtype: torch.dtype) -> tuple[Tensor, ...]:
        tokens = [torch.randn(rows, features).to(dtype) for _ in range(2)]
        return (*tokens, *(one.detach().to(dtype) for one in norm(features).parameters()))

    return Case("residual_norm", variant, rows, features, plain, fused, inputs)


def _activation_case(variant: str, activation: Any, rows: int, features: int, *, gated: bool = False) -> Case:
    wide = features * (1 + gated)

    def plain(product: Tensor, bias: Tensor) -> Tensor:
        x: Tensor = _BiasInProduct.apply(product, bias)  # type: ignore[no-untyped-call]
        if not gated:
            return apply_activation(x, activation)
        gate, x = x.chunk(2, dim=-1)
        return apply_activation(gate, activation) * x

    def fused(product: Tensor, bias: Tensor) -> Tensor:
        return bias_activation(product, bias, activation, gated=gated)

    def inputs(dtype: torch.dtype) -> tuple[Tensor, ...]:
        return (2 * torch.randn(rows, wide)).to(dtype), torch.randn(wide).to(dtype)

    return Case("bias_activation", variant, rows, features, plain, fused, inputs)


def cases(rows: tuple[int, ...] = (512, 4096)) -> list[Case]:
    """The operators at the sizes of base models."""
    every: list[Case] = []
    for count in rows:
        every += [
            _norm_case("layer_norm", nn.LayerNorm, count, 768),
            _norm_case("rms_norm", nn.RMSNorm, count, 768),
            _activation_case("gelu", "gelu", count, 3072),
            _activation_case("gelu_tanh", "gelu_tanh", count, 3072),
            _activation_case("gelu_quick", "gelu_quick", count, 3072),
            _activation_case("silu", "silu", count, 3072),
            _activation_case("swiglu", "silu", count, 2048, gated=True),
        ]
    return every


def measure(case: Case, dtype: torch.dtype, rounds: int) -> KernelTime:
    """Times of one case, in interleaved rounds: each form once a round, in an order that is reversed every other round.

    They are processor times, so that other work on the machine counts little: set one thread before.
    """
    torch.compiler.reset()
    forms: dict[str, Callable[..., Any]] = {
        "eager": case.plain,
        "compiled": torch.compile(case.plain, dynamic=False),
        "fused": case.fused,
        "fused_compiled": torch.compile(case.fused, dynamic=False),
    }
    inputs = [tensor.requires_grad_() for tensor in case.inputs(dtype)]
    gradients: list[Tensor] | None = None
    taken: dict[str, list[float]] = {name: [] for name in forms}
    for number in range(-WARM_UP, rounds):
        for name in list(forms)[:: -1 if number % 2 else 1]:
            start = time.process_time()
            out = forms[name](*inputs)
            outs = out if isinstance(out, tuple) else (out,)
            if gradients is None:
                gradients = [torch.randn_like(tensor) for tensor in outs]
            torch.autograd.grad(outs, inputs, gradients)
            if number >= 0:
                taken[name].append(time.process_time() - start)
    pairs = {"eager": ("eager", "fused"), "compiled": ("compiled", "fused_compiled")}
    return KernelTime(
        operator=case.operator, variant=case.variant, rows=case.rows, features=case.features,
        dtype=str(dtype).removeprefix("torch."),
        milliseconds={name: 1e3 * statistics.median(each) for name, each in taken.items()},
        gains={
            name: statistics.median(a / b for a, b in zip(taken[plain], taken[fused]))
            for name, (plain, fused) in pairs.items()
        },
    )  # fmt: skip


def measure_all(
    rounds: int, rows: tuple[int, ...] = (512, 4096), report: Callable[[KernelTime], None] = lambda time: None
) -> list[KernelTime]:
    """Measure all operators, sizes and types on one thread, with memory that stays mapped as in a training step;
    `report` is called with each result as soon as it is measured."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    set_host_memory(keep=True)
    times = []
    try:
        for case in cases(rows):
            for dtype in TYPES:
                times.append(measure(case, dtype, rounds))
                report(times[-1])
    finally:
        set_host_memory(keep=False)
        torch.set_num_threads(before)
    return times


def gains_of(times: list[KernelTime]) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """The table that `penstock.config.gains` stores: the geometric mean over sizes for each variant and type."""
    table: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for key in dict.fromkeys((timed.operator, timed.variant, timed.dtype) for timed in times):
        name, variant, dtype = key
        every = [timed.gains for timed in times if (timed.operator, timed.variant, timed.dtype) == key]
        table.setdefault(name, {}).setdefault(variant, {})[dtype] = {
            form: round(math.exp(statistics.fmean(math.log(gains[form]) for gains in every)), 3)
            for form in every[0]
        }
    return table
