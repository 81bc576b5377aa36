"""Operators of our kernels beside torch's own: one is enrolled by a row of `OPERATORS`, and
tests/kernels/test_operators.py tries them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.config.activations import ACTIVATIONS
from penstock.kernels.attention import attention, plain_attention
from penstock.kernels.bias_activation import _SigmoidForm, apply_activation, bias_activation
from penstock.kernels.cross_entropy import IGNORED, cross_entropy
from penstock.kernels.linear_cross_entropy import linear_cross_entropy
from penstock.kernels.residual_norm import add_norm

Function = Callable[..., Any]
Shapes = tuple[tuple[int, ...], ...]
HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64
PLAIN = [name for name, row in ACTIVATIONS.items() if row.gate is None]


class Operator(NamedTuple):
    """An operator with what it is held to."""

    ours: Function
    plain: Function
    """The same by torch's operators, in the type of its inputs; in fp64 it is exact."""
    inputs: Callable[..., list[Tensor]]
    """Tensors in fp32 for the sizes of a shape."""
    shapes: Shapes
    types: tuple[torch.dtype, ...] = (SINGLE, HALF)
    forms: tuple[str, ...] = ("native", "python")
    """In C++, and as where no kernel can be compiled."""


# -- A residual and a norm


def _norm_inputs(*shape: int, vectors: int) -> list[Tensor]:
    features = shape[-1:]
    scales = [1 + 0.1 * torch.randn(features), torch.randn(features)][:vectors]
    return [3 * torch.randn(shape) + 1, torch.randn(shape), *scales]


def _our_norm(x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor | None = None, *, rms: bool) -> Any:
    return add_norm(x, branch, weight, bias, 1e-5, rms=rms)


def _plain_norm(x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor | None = None, *, rms: bool) -> Any:
    s = x + branch
    normed = (
        F.rms_norm(s, s.shape[-1:], weight, 1e-5)
        if rms
        else F.layer_norm(s, s.shape[-1:], weight, bias, 1e-5)
    )
    return s, normed


def _norm(vectors: int, rms: bool = False) -> Operator:
    ours, plain = partial(_our_norm, rms=rms), partial(_plain_norm, rms=rms)
    shapes = (2, 37, 96), (5, 33), (3, 7), (7, 513), (0, 8)
    return Operator(ours, plain, partial(_norm_inputs, vectors=vectors), shapes)


# -- A bias and an activation, of one product, of one that holds a gate and what it multiplies, or of two


def _activation_inputs(*shape: int, biased: bool) -> list[Tensor]:
    return [3 * torch.randn(shape), *[torch.randn(shape[-1:])] * biased]


def _our_activation(product: Tensor, bias: Tensor | None = None, *, kind: Any, form: str) -> Tensor:
    if form == "apart":
        gate, x = product.chunk(2, dim=-1)
        return bias_activation(gate, None, kind, second=x)
    return bias_activation(product, bias, kind, gated=form == "gated")


def _plain_activation(product: Tensor, bias: Tensor | None = None, *, kind: str, form: str) -> Tensor:
    x = product if bias is None else product + bias
    if form == "plain":
        return apply_activation(x, kind)
    gate, x = x.chunk(2, dim=-1)
    return apply_activation(gate, kind) * x


def _activation(kind: str, form: str, biased: bool) -> Operator:
    ours, plain = (partial(each, kind=kind, form=form) for each in (_our_activation, _plain_activation))
    inputs = partial(_activation_inputs, biased=biased)
    return Operator(ours, plain, inputs, ((3, 11, 64), (5, 26), (9, 34), (0, 8)))


def _spread(*shape: int) -> list[Tensor]:
    """The vector has what is far out."""
    return [4 * torch.randn(shape) if len(shape) > 1 else torch.tensor([-1e4, -30.0, 0.0, 30.0, 1e4])]


# -- The loss of a linear layer's logits (rows, words), every fifth of which has no target: whole, or in chunks


def _linear_inputs(rows: int, words: int) -> list[Tensor]:
    return [torch.randn(rows, 16), torch.randn(words, 16), torch.randn(words)]


def _loss(x: Tensor, weight: Tensor, bias: Tensor, *, form: str, smoothing: float, budget: int = 0) -> Tensor:
    targets = (torch.arange(len(x)) * 37 % len(weight)).where(torch.arange(len(x)) % 5 > 0, IGNORED)
    if form == "chunks":
        return 0.25 * linear_cross_entropy(x, weight, bias, targets, smoothing=smoothing, budget=budget)
    logits = F.linear(x, weight, bias)
    if form == "whole":
        return 0.25 * cross_entropy(logits, targets, smoothing)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return 0.25 * F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)


def _losses(form: str, smoothing: float, budget: int = 0) -> Operator:
    ours, plain = (partial(_loss, form=each, smoothing=smoothing, budget=budget) for each in (form, "torch"))
    types = DOUBLE, SINGLE, HALF, torch.float16
    return Operator(ours, plain, _linear_inputs, ((23, 101), (1, 7), (0, 7)), types)


# -- Attention (samples, heads, tokens, features)


def _attention(backend: Any) -> Operator:
    def inputs(*shape: int) -> list[Tensor]:
        return [torch.randn(shape) for _ in range(3)]

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, backend)

    return Operator(ours, plain_attention, inputs, ((2, 3, 33, 8),), (DOUBLE, SINGLE, HALF), ("python",))


OPERATORS: dict[str, list[Operator]] = {
    "add_norm": [_norm(vectors=2), _norm(vectors=1), _norm(vectors=1, rms=True)],
    "bias_activation": [
        _activation(kind, form, biased)
        for kind in PLAIN
        for form, biased in (
            ("plain", False), ("plain", True), ("apart", False), ("gated", False), ("gated", True),
        )
    ],
    "gelu by sigmoids": [
        Operator(_SigmoidForm.apply, partial(F.gelu, approximate="tanh"), _spread, ((2, 3, 5, 17), (2, 0, 3), (5,)),
                 (SINGLE, HALF, torch.float16), ("python",))
    ],
    "cross_entropy": [_losses("whole", smoothing) for smoothing in (0.0, 0.1)],
    "linear_cross_entropy": [_losses("chunks", 0.1, budget) for budget in (1, 1 << 30, 8 * 101 * 4)],
    "attention": [_attention(backend) for backend in ("plain", "math", "flash", "auto", "sdpa")],
}  # fmt: skip


def strided(x: Tensor) -> Tensor:
    """The same values, in memory in another order; heads keep their features in one piece."""
    if x.ndim == 4:
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    return x.mT.contiguous().mT if x.ndim > 1 else x


def gradients(function: Function, inputs: Sequence[Tensor], upstream: Iterable[Tensor] = ()) -> list[Tensor]:
    """Outputs, then gradients of the inputs, for gradients of the outputs that are drawn where none are given."""
    leaves = [one.detach().requires_grad_() for one in inputs]
    outs = function(*leaves)
    outs = list(outs) if isinstance(outs, tuple) else [outs]
    generator = torch.Generator().manual_seed(1)
    given = [*upstream] or [strided(torch.randn(out.shape, generator=generator)) for out in outs]
    grads = [grad.to(out) for grad, out in zip(given, outs, strict=True)]
    return [*(out.detach() for out in outs), *torch.autograd.grad(outs, leaves, grads)]


def assert_close_to_exact(found: Any, eager: Any, exact: Any, *, least: float = 0.0) -> None:
    """Numbers are at most twice as far from the exact ones as eager's of the same type, in the norm of all; `least` is
    an error, as a share of the exact ones, that is no concern."""
    assert found.shape == exact.shape
    assert found.dtype == eager.dtype, (found.dtype, eager.dtype)
    if not exact.numel():
        return
    errors = [float((each.detach().double() - exact.detach()).norm()) for each in (found, eager)]
    assert errors[0] <= 2 * errors[1] + least * float(exact.detach().norm()), errors


def hold(
    row: Operator, dtype: torch.dtype, shapes: Shapes | None = None, way: Callable[[Function], Function] | None = None
) -> None:  # fmt: skip
    """Hold results and gradients, of inputs in any order of memory, to exact ones. `way` is how the operator is run."""
    for shape in shapes or row.shapes:
        inputs = [strided(one.to(dtype)) for one in row.inputs(*shape)]
        exact = gradients(row.plain, [one.double() for one in inputs])
        eager, found = gradients(row.plain, inputs), gradients(way(row.ours) if way else row.ours, inputs)
        for mine, theirs, right in zip(found, eager, exact, strict=True):
            # What rounding the result itself costs is granted; a loss is one number, and fp64 has no exact one.
            share = 8.0 if mine.dtype == DOUBLE else 0.25 if mine.ndim else 1.0
            assert_close_to_exact(mine, theirs, right, least=share * torch.finfo(mine.dtype).eps)
