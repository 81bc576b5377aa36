"""Rows rounded to 8 bits in the pass that makes them, and the product of rounded rows with all that follows it.

Shapes: R or M rows, D or K features, N outputs. For a row v, which is a norm or an activation of x,

    int8   s = max|v| / 127,                 q = round(v / s), to even
    e4m3   s = 2 ** ⌈log2 (max|v| / 448)⌉,   q = fp8(v / s)
    y      = act(s_a[m] · s_b[n] · Σ_k a[m, k] · b[n, k] + bias[n])

as `products.int8.rounded` and `products.fp8.rows_in_fp8` have them; the reference is made of these. From x of e bytes
to q the kernel reads e·R·D bytes, of gated activations twice that, and writes R·D; about 12 to 25 FLOPs an element. A
norm that writes half precision, and a rounding that reads it twice, move 4·e + 1 bytes an element.
The product computes 2·M·N·K FLOPs, reads (M + N)·K bytes and writes e·M·N; a product that leaves int32, and operators
for scales, bias and activation behind it, move about (8 + 2·e)·M·N bytes more.

On a GPU with Triton kernels do this (kernels/triton/rounded_rows.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from penstock.errors import ConfigError
from penstock.kernels.remainder_adamw import runs_triton
from penstock.models.perceptron import activate
from penstock.models.rounded import LEAST
from penstock.products import fp8, int8

FORMS = {"int8": torch.int8, "fp8": fp8.E4M3}
NORMS = ("none", "layer", "rms")
ACTIVATIONS = ("none", "gelu", "gelu_tanh", "relu", "silu")
MOST = 1 << 14
"""Numbers up to which a kernel holds a row."""
_LEAST = {"int8": LEAST, "fp8": fp8._LEAST}


def rounded_rows(
    x: Tensor,
    form: str,
    *,
    norm: str = "none",
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: str = "none",
    gated: bool = False,
) -> tuple[Tensor, Tensor]:
    """Numbers (…, D) in int8 or e4m3 and the value of 1 in each row, (…, 1) fp32, of a norm or an activation of x.

    x: (…, D), or (…, 2·D) if `gated`: activation(first half) · second half. weight, bias: (D,), of the norm. There is
    no gradient: the rounding of a trained layer has its own, see `NormedInt8Linear`. Raises ConfigError for a form,
    norm or activation that there is not.
    """
    choices = ((form, tuple(FORMS)), (norm, NORMS), (activation, ACTIVATIONS))
    for given, known in choices:
        if given not in known:
            raise ConfigError(f"rounded_rows has no {given!r}; choose one of {', '.join(known)}.")
    if norm != "none" and (gated or activation != "none"):
        raise ConfigError("rounded_rows makes a norm or an activation, not both; leave one of them out.")
    flat = x.reshape(-1, x.shape[-1])
    numbers, scales, *_ = _round(flat, form, norm, weight, bias, eps, activation, gated)
    return numbers.view(*x.shape[:-1], numbers.shape[1]), scales.view(*x.shape[:-1], 1)


@torch.library.custom_op("penstock::rounded_rows", mutates_args=())
def _round(
    x: Tensor, form: str, norm: str, weight: Tensor | None, bias: Tensor | None, eps: float, activation: str,
    gated: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Numbers (R, D), scales (R, 1), and of norms each row's mean and inverse deviation (R,)."""
    results = _round_shapes(x, form, norm, weight, bias, eps, activation, gated)
    if not results[0].numel():
        return results
    if runs_triton(x.device) and x.dtype != torch.float64 and results[0].shape[1] <= MOST:
        from penstock.kernels.triton.rounded_rows import round_rows

        weight, bias = (None if each is None else each.contiguous() for each in (weight, bias))
        round_rows(x.contiguous(), weight, bias, eps, norm, activation, gated, _LEAST[form], *results)
        return results
    wide = x.float()
    if gated:
        gates, wide = wide.chunk(2, dim=1)
        wide = _activated(gates, activation) * wide
    else:
        wide = _activated(wide, activation)
    if norm != "none":
        if norm == "layer":
            results[2].copy_(wide.mean(1))
            wide = wide - results[2][:, None]
        results[3].copy_((wide.square().mean(1) + eps).rsqrt())
        wide = wide * results[3][:, None]
        wide = wide if weight is None else wide * weight
        wide = wide if bias is None else wide + bias
    numbers, scales = int8.rounded(wide) if form == "int8" else fp8.rows_in_fp8(wide)
    return numbers, scales, *results[2:]


def _round_shapes(
    x: Tensor, form: str, norm: str, weight: Tensor | None, bias: Tensor | None, eps: float, activation: str,
    gated: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    rows, columns = x.shape[0], x.shape[1] // (2 if gated else 1)
    of_norm = [rows if norm == "layer" else 0, rows if norm != "none" else 0]
    made = (x.new_empty(size, dtype=torch.float32) for size in of_norm)
    return (
        x.new_empty((rows, columns), dtype=FORMS[form]),
        x.new_empty((rows, 1), dtype=torch.float32),
        *made,
    )  # type: ignore[return-value]


_round.register_fake(_round_shapes)


def _activated(x: Tensor, activation: str) -> Tensor:
    return x if activation == "none" else activate(x, activation)  # type: ignore[arg-type]


def rounded_product(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """act(a bᵀ · scales + bias), (M, N) in `dtype`, of numbers a (M, K) and b (N, K), both int8 or both e4m3, with the
    value of 1 in each of their rows, (M, 1) and (N, 1) fp32. bias: (N,). Sums of int8 are exact."""
    if a.dtype != b.dtype or a.dtype not in FORMS.values() or a.shape[1] != b.shape[1]:
        raise ConfigError(
            f"rounded_product needs two matrices in int8 or e4m3 of as many columns, but has {a.dtype} "
            f"{tuple(a.shape)} and {b.dtype} {tuple(b.shape)}; round both with rounded_rows."
        )
    y: Tensor = _multiply(a, a_scales, b, b_scales, bias, activation, dtype)
    return y


@torch.library.custom_op("penstock::rounded_product", mutates_args=())
def _multiply(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, bias: Tensor | None, activation: str, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    out = _product_shape(a, a_scales, b, b_scales, bias, activation, dtype)
    if runs_triton(a.device) and out.numel():
        from penstock.kernels.triton.rounded_rows import multiply

        bias = None if bias is None else bias.contiguous()
        scales = (each.contiguous().float() for each in (a_scales, b_scales))
        multiply(a.contiguous(), next(scales), b.contiguous(), next(scales), bias, activation, out)
        return out
    if a.dtype == torch.int8:
        sums = int8.integer_product(a, b.t())
    else:
        sums = a.float() @ b.float().t()
    wide = int8.scale_sums(sums, b_scales.view(1, -1), a_scales.view(-1, 1), bias, torch.float32)
    return _activated(wide, activation).to(dtype)


def _product_shape(a: Tensor, _: Tensor, b: Tensor, *settings: Any) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=settings[-1])


_multiply.register_fake(_product_shape)


class _NormedInt8(torch.autograd.Function):
    """A norm and an int8 linear layer, whose gradient passes the rounding as if there were none."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, weight: Tensor, bias: Tensor | None,
        eps: float, centred: bool, weights_too: bool, dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        kind = "layer" if centred else "rms"
        rows, scales, mean, inverse = _round(x, "int8", kind, norm_weight, norm_bias, eps, "none", False)
        outputs, output_scales = int8.rounded(weight)
        ctx.save_for_backward(x, norm_weight, norm_bias, weight, rows, scales, mean, inverse)
        ctx.centred, ctx.weights_too, ctx.dtype = centred, weights_too, dtype
        ctx.bias_type = None if bias is None else bias.dtype
        y: Tensor = _multiply(rows, scales, outputs, output_scales, bias, "none", dtype)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, norm_weight, norm_bias, weight, rows, scales, mean, inverse = ctx.saved_tensors
        outputs, output_scales = int8.rounded(weight)
        of_norm = int8.input_gradient(dy, outputs, output_scales, torch.float32)
        to_weight = int8.weight_gradient(dy, rows, scales, ctx.dtype, weights_too=ctx.weights_too)
        none = x.new_empty(0, dtype=torch.int64)
        _, to_x, to_norm, to_norm_bias = torch.ops.penstock.seeded_norm_backward(
            of_norm, None, x, norm_weight, norm_bias, mean, inverse, none, 0, ctx.centred, x.dtype, x.dtype
        )
        return (
            to_x,
            None if norm_weight is None else to_norm,
            None if norm_bias is None else to_norm_bias,
            to_weight.to(weight.dtype),
            None if ctx.bias_type is None else dy.sum(0, dtype=torch.float32).to(ctx.bias_type),
            *[None] * 4,
        )


class NormedInt8Linear(nn.Module):
    """A norm and the linear layer that alone reads it, whose products are in int8: the norm's output is rounded as it
    is made, and never written in half precision. It keeps the parameters of both, under `norm` and `linear`."""

    def __init__(
        self, norm: nn.LayerNorm | nn.RMSNorm, linear: nn.Linear, *, weights_too: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        """Raises ConfigError for a norm that is not over the last dimension alone."""
        super().__init__()
        if tuple(norm.normalized_shape) != (linear.in_features,):
            raise ConfigError(
                f"A norm over {tuple(norm.normalized_shape)} does not make the {linear.in_features} inputs of this "
                "linear layer; pass the norm that it reads."
            )
        self.norm, self.linear, self.weights_too, self.dtype = norm, linear, weights_too, dtype

    def forward(self, x: Tensor) -> Tensor:
        """(…, K) to (…, N) in `dtype`."""
        norm, linear = self.norm, self.linear
        eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
        function: Any = _NormedInt8
        y: Tensor = function.apply(
            x.reshape(-1, x.shape[-1]), norm.weight, getattr(norm, "bias", None), linear.weight, linear.bias, eps,
            isinstance(norm, nn.LayerNorm), self.weights_too, self.dtype,
        )  # fmt: skip
        return y.view(*x.shape[:-1], linear.out_features)
