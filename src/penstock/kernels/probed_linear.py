"""Linear layers in fp32 on a CPU that multiply each shape by the library that was measured to be faster for it.

torch multiplies fp32 by MKL, which on some of AMD's processors takes twice as long as oneDNN. Both compute in fp32, so
that only rounding differs. The measured products are those of `penstock probe`; `choose_by` sets what follows from
them, once for the process, because it is a fact of the machine.

Shapes: x (…, in), weight (out, in), bias (out).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.config.machine import ProductForm
from penstock.kernels.native import direct

Choice = Callable[[int, int, int, ProductForm], bool]
"""Whether oneDNN is faster for a product (m, k) @ (k, n) of a linear layer's pass."""
_choice: Choice = lambda m, n, k, form: False  # noqa: E731


def choose_by(choice: Choice) -> None:
    """Set the function by which `probed_linear` chooses libraries in this process."""
    global _choice
    _choice = choice


class ProbedLinear:
    """A mixin for the class of a linear layer."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, x: Tensor) -> Tensor:
        return probed_linear(x, self.weight, self.bias)


def probed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`, with the faster library for each product where the operands are fp32 on a CPU."""
    chooses = x.dtype == weight.dtype == torch.float32 and x.device.type == "cpu"
    if not chooses or torch.is_autocast_enabled("cpu"):
        return F.linear(x, weight, bias)
    return _Probed.apply(x, weight, bias)  # type: ignore[no-any-return, no-untyped-call]


def by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` by oneDNN, in fp32 on any CPU; it has no gradient."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


def _multiply(a: Tensor, b: Tensor, bias: Tensor | None, form: ProductForm) -> Tensor:
    """a (m, k) times the transpose of b (n, k), plus bias (n)."""
    faster = a.numel() and b.numel() and _choice(len(a), len(b), a.shape[1], form)
    return by_onednn(a, b, bias) if faster else F.linear(a, b, bias)


@torch.library.custom_op("penstock::probed_product", mutates_args=())
def _operator(a: Tensor, b: Tensor, bias: Tensor | None, form: str) -> Tensor:
    return _multiply(a, b, bias, form)  # type: ignore[arg-type]


@_operator.register_fake
def _(a: Tensor, b: Tensor, bias: Tensor | None, form: str) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0])


def _product(a: Tensor, b: Tensor, bias: Tensor | None, form: ProductForm) -> Tensor:
    if not direct(a):
        return torch.ops.penstock.probed_product(a, b, bias, form)  # type: ignore[no-any-return]
    # Gradients are on only in a backward pass that is differentiated in turn.
    return F.linear(a, b, bias) if torch.is_grad_enabled() else _multiply(a, b, bias, form)


def _rows(x: Tensor) -> Tensor:
    """(…, F) to (rows, F)."""
    return x.flatten(0, -2) if x.ndim > 1 else x[None]


class _Probed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(_rows(x), weight, bias, "forward").view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        rows = _rows(gradient)
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = _product(rows, weight.t(), None, "input").view_as(x)
        if ctx.needs_input_grad[1]:
            of_weight = _product(rows.t(), _rows(x).t(), None, "weight")
        return of_x, of_weight, rows.sum(0) if ctx.needs_input_grad[2] else None
