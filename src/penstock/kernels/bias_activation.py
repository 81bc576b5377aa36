"""Bias and activation in one pass: a(product + bias). The backward pass also computes the gradient of the bias.

Shapes: rows of any leading dimensions, N features. For a gated activation the product is (…, 2N), gate first:

    out = a(product[:N] + bias[:N]) · (product[N:] + bias[N:])           (Shazeer, 2020)

or the second factor is a separate matrix product, (…, N), without bias.

Forward reads the product and writes `out`. Backward reads the product and the gradient of `out`, writes the product's
gradient, and sums the bias's gradient in fp32 at the same time: separate operators would read it once more, and would
join the two halves of gated activations. GELU (Hendrycks & Gimpel, 2016) takes one exponential for the value and its
slope; its tanh form is x · sigmoid(2u) with 2u = 2 √(2/π) (x + 0.044715 x³), the same function as x (1 + tanh u) / 2: a
vectorised tanh takes several times as long as an exponential, so that compiled on a CPU the forward pass is 2.2 times
as fast and the backward pass 1.8 times (`benchmarks/activations.py`). The quick form is x · sigmoid(1.702 x).

On a CPU the kernel is C++ (`native/fused.cpp`); `reference`, in torch's own operators, serves other devices and types.
"""

from __future__ import annotations

import math
from ctypes import c_int64, c_void_p
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.config.activations import ACTIVATIONS, UNGATED, Mlp
from penstock.dtypes import widened
from penstock.errors import ConfigError
from penstock.kernels.native import TYPES, address, direct, direct_function, library, sizes, threads_for

ACTIVATION_CODES: dict[str, int] = {
    name: row.kernel for name, row in ACTIVATIONS.items() if row.kernel is not None
}
"""The C++ kernels' number of each activation that they support."""
_LINEAR = 2.0 * math.sqrt(2.0 / math.pi)
_CUBIC = 0.044715 * _LINEAR
QUICK = 1.702
"""Factor of x in the sigmoid of the quick form (Hendrycks & Gimpel, 2016, section 2)."""


def reference(
    product: Tensor, bias: Tensor | None, activation: str, gated: bool, second: Tensor | None
) -> Tensor:
    """The same with torch's operators: computed in fp32 or wider, returned in the dtype of the product."""
    wide, second = _widened(product, bias, gated, second)
    out = apply_activation(wide, activation)
    return (out if second is None else out * second).to(product.dtype)


def _widened(
    product: Tensor, bias: Tensor | None, gated: bool, second: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The input of the activation, and the factor of its output if there is one, in fp32 or wider."""
    wide = widened(product)
    wide = wide if bias is None else wide + bias
    if gated:
        wide, second = wide.chunk(2, dim=-1)
    return wide, None if second is None else second.to(wide.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    """`F.gelu(x, approximate="tanh")` of any shape, in the dtype of x; computed in fp32, or fp64."""
    if x.device.type != "cpu" or not torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
        return F.gelu(x, approximate="tanh")
    return _SigmoidForm.apply(x)  # type: ignore[no-untyped-call, no-any-return]


def _parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x in the dtype of the computation, sigmoid(2u), and sigmoid(2u) · sigmoid(−2u) without cancellation."""
    wide = widened(x)
    twice = wide * (_LINEAR + _CUBIC * wide * wide)
    small = torch.exp(-twice.abs())
    large = 1.0 / (1.0 + small)
    return wide, torch.where(twice < 0, small * large, large), small * large * large


class _SigmoidForm(torch.autograd.Function):
    """x · sigmoid(2u). Only x is saved for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        wide, gate, _ = _parts(x)
        return (wide * gate).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        wide, gate, bell = _parts(x)
        return (gradient * (gate + wide * bell * (_LINEAR + 3.0 * _CUBIC * wide * wide))).to(x.dtype)


def apply_activation(x: Tensor, activation: str) -> Tensor:
    """Apply an activation without a gate elementwise, with torch's operators."""
    if activation == "gelu":
        return F.gelu(x)
    if activation == "gelu_tanh":
        return gelu_tanh(x)
    if activation == "gelu_quick":
        return x * torch.sigmoid(QUICK * x)
    if activation == "silu":
        return F.silu(x)
    positive = F.relu(x)
    # No power: autocast would widen it.
    return positive * positive if activation == "relu2" else positive


def activate(x: Tensor, activation: Mlp) -> Tensor:
    """The elementwise activation; for gated ones (Shazeer, 2020), the activation of the first half times the second
    half."""
    if activation == "gelu_tanh" and (made := gelu_tanh_in_inference(x)) is not None:
        return made
    if activation not in UNGATED:
        return apply_activation(x, activation)
    gate, x = x.chunk(2, dim=-1)
    limit = ACTIVATIONS[activation].limit
    if limit is not None:
        gate, x = gate.clamp(max=limit), x.clamp(-limit, limit) + 1.0
    return apply_activation(gate, UNGATED[activation]) * x


def _forward(
    product: Tensor, bias: Tensor | None, activation: str, gated: bool, second: Tensor | None
) -> Tensor:
    kernels = library() if _fits(product, bias, activation) else None
    if kernels is None:
        return reference(product, bias, activation, gated, second)
    product, n = product.contiguous(), product.shape[-1] // (1 + gated)
    bias, second = (None if t is None else t.contiguous() for t in (bias, second))
    out = product.new_empty((*product.shape[:-1], n))
    if out.numel():
        kernels.penstock_activation(
            *_places(product, gated, second), c_int64(product.shape[-1]), address(bias), address(out),
            *sizes(out.numel() // n, n), ACTIVATION_CODES[activation], TYPES[product.dtype],
            0 if bias is None else TYPES[bias.dtype], threads_for(out.numel()),
        )  # fmt: skip
    return out


def _places(product: Tensor, gated: bool, second: Tensor | None) -> tuple[c_void_p, c_void_p]:
    """Addresses of the activation's input and of the factor of its output; null if there is no factor."""
    return address(product), address(product[..., product.shape[-1] // 2 :] if gated else second)


_bias_activation = torch.library.custom_op("penstock::bias_activation", _forward, mutates_args=())


@_bias_activation.register_fake
def _shape(product: Tensor, bias: Any, activation: str, gated: bool, second: Any) -> Tensor:
    return product.new_empty((*product.shape[:-1], product.shape[-1] // (1 + gated)))


def _make_gradient(
    product: Tensor, bias: Tensor | None, gradient: Tensor, activation: str, gated: bool, second: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the product, the bias and the second product; an absent input has an empty gradient."""
    kernels = library() if _fits(product, bias, activation) and gradient.dtype in TYPES else None
    if kernels is None:
        return _plain_gradient(product, bias, gradient, activation, gated, second)
    product, gradient = product.contiguous(), gradient.to(product.dtype).contiguous()
    bias, second = (None if t is None else t.contiguous() for t in (bias, second))
    into, by_bias, into_second = _gradient_shapes(product, bias, gradient, activation, gated, second)
    n = gradient.shape[-1]
    if into.numel():
        kernels.penstock_activation_gradient(
            *_places(product, gated, second), c_int64(product.shape[-1]), address(bias), address(gradient),
            *_places(into, gated, None if second is None else into_second), address(None if bias is None else by_bias),
            *sizes(gradient.numel() // n, n), ACTIVATION_CODES[activation], TYPES[product.dtype],
            0 if bias is None else TYPES[bias.dtype], threads_for(into.numel()),
        )  # fmt: skip
    else:
        by_bias.zero_()
    return into, by_bias, into_second


_gradient = torch.library.custom_op("penstock::bias_activation_gradient", _make_gradient, mutates_args=())


@_gradient.register_fake
def _gradient_shapes(
    product: Tensor, bias: Tensor | None, gradient: Tensor, activation: str, gated: bool, second: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    empties = (
        product.new_empty(0) if one is None else torch.empty_like(one, memory_format=torch.contiguous_format)
        for one in (product, bias, second)
    )
    return tuple(empties)  # type: ignore[return-value]


def _plain_gradient(
    product: Tensor, bias: Tensor | None, gradient: Tensor, activation: str, gated: bool, second: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    wide, factor = _widened(product, bias, gated, second)
    out_gradient, into_second = gradient.to(wide.dtype), product.new_empty(0)
    into = _sloped(out_gradient if factor is None else out_gradient * factor, wide, activation)
    if factor is not None:
        into_second = out_gradient * apply_activation(wide, activation)
    if gated:
        into, into_second = torch.cat([into, into_second], dim=-1), product.new_empty(0)
    by_bias = product.new_empty(0) if bias is None else into.reshape(-1, into.shape[-1]).sum(0).to(bias.dtype)
    return into.to(product.dtype, copy=True), by_bias, into_second.to(product.dtype, copy=True)


def _sloped(gradient: Tensor, x: Tensor, activation: str) -> Tensor:
    """The gradient times the slope of the activation at x."""
    if activation == "relu2":
        return 2.0 * gradient * F.relu(x)
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
    product, bias, ctx.activation, ctx.gated, second = inputs
    ctx.save_for_backward(product, bias, second)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    product, bias, second = ctx.saved_tensors
    make = _make_gradient if direct(gradient) else torch.ops.penstock.bias_activation_gradient
    into, by_bias, into_second = make(product, bias, gradient, ctx.activation, ctx.gated, second)
    return into, None if bias is None else by_bias, None, None, None if second is None else into_second


_bias_activation.register_autograd(_backward, setup_context=_save)
_DirectActivation = direct_function("_DirectActivation", _forward, _save, _backward)


def bias_activation(
    product: Tensor, bias: Tensor | None, activation: Mlp, *, gated: bool = False, second: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """activation(product + bias), (…, N), in the dtype of the product. product: (…, N), or (…, 2N) if `gated`; bias:
    one value per feature of the product, or None; `second`: a separate factor of the activation's output, with shape
    and dtype of the product, only without gate and bias. Differentiable in all three. Raises ConfigError for other
    shapes."""
    features = product.shape[-1:]
    fits = (bias is None or (bias.shape == features and second is None)) and features[0] % (1 + gated) == 0
    fits = fits and (second is None or not gated)
    fits = fits and (second is None or (second.shape == product.shape and second.dtype == product.dtype))
    if not fits:
        raise ConfigError(
            "bias_activation needs one bias per feature of the product, an even number of features if gated, and a "
            "second product like the first only without bias and gate, but got "
            f"{[None if each is None else (*each.shape, each.dtype) for each in (product, bias, second)]}."
        )
    inputs = product, bias, activation, gated, second
    if direct(product):
        return _DirectActivation.apply(*inputs)  # type: ignore[no-any-return]
    return torch.ops.penstock.bias_activation(*inputs)  # type: ignore[no-any-return]


def gelu_tanh_in_inference(x: Tensor) -> Tensor | None:
    """GELU's tanh form by the C++ kernel, only in inference mode on a CPU, in eager code; otherwise None. Below 5,000
    elements it is 2 µs slower than torch's, but is used all the same, so that a row's result does not depend on the
    number of rows."""
    # `direct` comes first: it is false in compiled code, and the compiler cannot trace the check for inference mode.
    here = direct(x) and torch.is_inference_mode_enabled()
    if not (here and _fits(x, None, "gelu_tanh") and library() is not None):
        return None
    return bias_activation(x, None, "gelu_tanh")


def _fits(product: Tensor, bias: Tensor | None, activation: str) -> bool:
    """Whether the C++ kernel supports these inputs: on a CPU, in fp32 or bf16, with an activation that it has."""
    vector = torch.float32 if bias is None else bias.dtype
    return (
        activation in ACTIVATION_CODES
        and product.device.type == "cpu"
        and {product.dtype, vector} <= TYPES.keys()
    )
