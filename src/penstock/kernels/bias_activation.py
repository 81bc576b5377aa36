"""Bias and activation in one pass: a(product + bias), and backward the slope with the gradient of the bias.

Shapes: rows of any leading dimensions, N features. Of a gated activation the product is (…, 2N), gate first:

    out = a(product[:N] + bias[:N]) · (product[N:] + bias[N:])           (Shazeer, 2020)

Forward reads the product and writes `out`. Backward reads the product and the gradient of `out`, writes that of the
product, and sums that of the bias, in fp32, on the way: single operators read it once more, and of gated activations
join two halves. GELU (Hendrycks & Gimpel, 2016) takes one exponential for the value and its slope; its tanh form is
x · sigmoid(2u), as in `gelu.py`, and its quick form x · sigmoid(1.702 x).

On a CPU the kernel is C++ (`native/fused.cpp`); `reference` is the form in torch's own operators, and what other
devices and types compute.
"""

from __future__ import annotations

from ctypes import c_void_p
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.dtypes import widened
from penstock.errors import ConfigError
from penstock.kernels.gelu import gelu_tanh
from penstock.kernels.native import TYPES, address, direct, direct_function, library, sizes, threads_for

Activation = Literal["gelu", "gelu_tanh", "silu", "relu", "gelu_quick"]
_CODES: dict[str, int] = {name: code for code, name in enumerate(get_args(Activation))}
QUICK = 1.702
"""Factor of x in the sigmoid of the quick form (Hendrycks & Gimpel, 2016, section 2)."""


def reference(product: Tensor, bias: Tensor | None, activation: str, gated: bool) -> Tensor:
    """The same by torch's operators, in fp32 or wider, in the type of the product."""
    wide = widened(product)
    wide = wide if bias is None else wide + bias
    if not gated:
        return apply_activation(wide, activation).to(product.dtype)
    gate, x = wide.chunk(2, dim=-1)
    return (apply_activation(gate, activation) * x).to(product.dtype)


def apply_activation(x: Tensor, activation: str) -> Tensor:
    """An `Activation` at every element, by torch's operators."""
    if activation == "gelu":
        return F.gelu(x)
    if activation == "gelu_tanh":
        return gelu_tanh(x)
    if activation == "gelu_quick":
        return x * torch.sigmoid(QUICK * x)
    return F.silu(x) if activation == "silu" else F.relu(x)


def _forward(product: Tensor, bias: Tensor | None, activation: str, gated: bool) -> Tensor:
    kernels = library() if _fits(product, bias) else None
    if kernels is None:
        return reference(product, bias, activation, gated)
    product, n = product.contiguous(), product.shape[-1] // (1 + gated)
    bias = None if bias is None else bias.contiguous()
    out = product.new_empty((*product.shape[:-1], n))
    if out.numel():
        kernels.penstock_activation(
            address(product), address(bias), address(out), *sizes(out.numel() // n, n), _CODES[activation], int(gated),
            TYPES[product.dtype], 0 if bias is None else TYPES[bias.dtype], threads_for(out.numel()),
        )  # fmt: skip
    return out


_bias_activation = torch.library.custom_op("penstock::bias_activation", _forward, mutates_args=())


@_bias_activation.register_fake
def _shape(product: Tensor, bias: Tensor | None, activation: str, gated: bool) -> Tensor:
    return product.new_empty((*product.shape[:-1], product.shape[-1] // (1 + gated)))


def _make_gradient(
    product: Tensor, bias: Tensor | None, gradient: Tensor, activation: str, gated: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of the product and of the bias, the latter of no elements where there is none."""
    kernels = library() if _fits(product, bias) and gradient.dtype in TYPES else None
    if kernels is None:
        return _plain_gradient(product, bias, gradient, activation, gated)
    product, gradient = product.contiguous(), gradient.to(product.dtype).contiguous()
    into, n = torch.empty_like(product), product.shape[-1] // (1 + gated)
    by_bias = (
        product.new_empty(0)
        if bias is None
        else torch.zeros_like(bias, memory_format=torch.contiguous_format)
    )
    if into.numel():
        kernels.penstock_activation_gradient(
            address(product), address(None if bias is None else bias.contiguous()), address(gradient), address(into),
            c_void_p(None) if bias is None else address(by_bias), *sizes(gradient.numel() // n, n), _CODES[activation],
            int(gated), TYPES[product.dtype], 0 if bias is None else TYPES[bias.dtype], threads_for(into.numel()),
        )  # fmt: skip
    return into, by_bias


_gradient = torch.library.custom_op("penstock::bias_activation_gradient", _make_gradient, mutates_args=())


@_gradient.register_fake
def _gradient_shapes(
    product: Tensor, bias: Tensor | None, gradient: Tensor, activation: str, gated: bool
) -> tuple[Tensor, Tensor]:
    into = torch.empty_like(product, memory_format=torch.contiguous_format)
    return into, product.new_empty(0) if bias is None else torch.empty_like(
        bias, memory_format=torch.contiguous_format
    )


def _plain_gradient(
    product: Tensor, bias: Tensor | None, gradient: Tensor, activation: str, gated: bool
) -> tuple[Tensor, Tensor]:
    wide = widened(product)
    wide, given = wide if bias is None else wide + bias, gradient.to(wide.dtype)
    if gated:
        gate, x = wide.chunk(2, dim=-1)
        into = torch.cat([_sloped(given * x, gate, activation), given * apply_activation(gate, activation)], dim=-1)
    else:
        into = _sloped(given, wide, activation)
    by_bias = product.new_empty(0) if bias is None else into.reshape(-1, into.shape[-1]).sum(0).to(bias.dtype)
    return into.to(product.dtype, copy=True), by_bias


def _sloped(gradient: Tensor, x: Tensor, activation: str) -> Tensor:
    """The gradient times the slope of the activation at x."""
    if activation == "relu":
        return torch.ops.aten.threshold_backward(gradient, x, 0.0)  # type: ignore[no-any-return]
    if activation == "silu":
        return torch.ops.aten.silu_backward(gradient, x)  # type: ignore[no-any-return]
    if activation == "gelu_quick":
        share = torch.sigmoid(QUICK * x)
        return gradient * (share + QUICK * x * share * (1.0 - share))
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    return torch.ops.aten.gelu_backward(gradient, x, approximate=approximate)  # type: ignore[no-any-return]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    product, bias, ctx.activation, ctx.gated = inputs
    ctx.save_for_backward(product, bias)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
    product, bias = ctx.saved_tensors
    make = _make_gradient if direct(gradient) else torch.ops.penstock.bias_activation_gradient
    into, by_bias = make(product, bias, gradient, ctx.activation, ctx.gated)
    return into, None if bias is None else by_bias, None, None


_bias_activation.register_autograd(_backward, setup_context=_save)
_DirectActivation = direct_function("_DirectActivation", _forward, _save, _backward)


def bias_activation(
    product: Tensor, bias: Tensor | None, activation: Activation, *, gated: bool = False
) -> Tensor:
    """activation(product + bias), (…, N), in the type of the product: (…, N), or (…, 2N) where it is `gated`; bias:
    as many features as the product, or None. Differentiable in both. Raises ConfigError for other shapes."""
    if (bias is not None and bias.shape != product.shape[-1:]) or product.shape[-1] % (1 + gated):
        raise ConfigError(
            f"bias_activation takes a bias of as many features as the product, an even number of a gated one, but was "
            f"given {tuple(product.shape)} and {None if bias is None else tuple(bias.shape)}."
        )
    if direct(product):
        return _DirectActivation.apply(product, bias, activation, gated)  # type: ignore[no-any-return]
    return torch.ops.penstock.bias_activation(product, bias, activation, gated)  # type: ignore[no-any-return]


def _fits(product: Tensor, bias: Tensor | None) -> bool:
    """Whether the C++ kernel takes them: on a CPU, of fp32 and bf16."""
    vector = torch.float32 if bias is None else bias.dtype
    return product.device.type == "cpu" and {product.dtype, vector} <= TYPES.keys()
