"""Residual, dropout and norm in one pass: s = x + dropout(branch), normed = norm(s) · weight + bias.

Shapes: rows of any leading dimensions, D features. Of a LayerNorm (Ba et al., 2016)

    normed = (s − mean(s)) / √(var(s) + eps) · weight + bias,

and of an RMSNorm (Zhang & Sennrich, NeurIPS 2019) the same with mean 0 and without bias. Statistics are fp32, from s as
it was rounded to its type. Forward reads x and the branch and writes s and its norm: 4 passes over rows × D elements,
where single operators take 6. Backward reads the gradients of the norm and of s, and s, and writes one gradient for
both inputs, with those of weight and bias summed on the way: 4 passes, where single operators take 8.

On a CPU the kernel is C++ (`native/fused.cpp`). On a GPU it is `penstock.kernels.seeded_norm`, which keeps a seed in
place of a mask. `reference` is the form in torch's own operators, and what other
devices and types compute.
"""

from __future__ import annotations

from ctypes import c_float
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.dtypes import sums_type, widened
from penstock.errors import ConfigError
from penstock.kernels.dropout import mask_of
from penstock.kernels.has_triton import runs_triton
from penstock.kernels.native import TYPES, address, direct, direct_function, library, sizes, threads_for
from penstock.kernels.seeded_norm import seeded_norm


def reference(
    x: Tensor, branch: Tensor, kept: Tensor | None, scale: float, weight: Tensor | None, bias: Tensor | None,
    eps: float, rms: bool, out: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """s, in the type of x, and its norm in the type `out`, by torch's operators. Shapes (…, D); `kept` is bool."""
    added = branch if kept is None else torch.where(kept, branch, 0.0) * scale
    s = x + added.to(x.dtype)
    wide = widened(s)
    vectors = [None if one is None else one.to(wide.dtype) for one in (weight, bias)]
    shape = s.shape[-1:]
    normed = (
        F.rms_norm(wide, shape, vectors[0], eps)
        if rms
        else F.layer_norm(wide, shape, vectors[0], vectors[1], eps)
    )
    return s, normed.to(out)


def _forward(
    x: Tensor, branch: Tensor, kept: Tensor | None, scale: float, weight: Tensor | None, bias: Tensor | None,
    eps: float, rms: bool, out: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """s, its norm, and the mean and the inverse deviation of each row, fp32."""
    shape, n = x.shape, x.shape[-1]
    kernels = library() if _fits(x, branch, weight, out) else None
    means, inverses = (x.new_empty(shape[:-1], dtype=sums_type(x.dtype)) for _ in range(2))
    if kernels is None:
        s, normed = reference(x, branch, kept, scale, weight, bias, eps, rms, out)
        wide = s.to(means.dtype)
        means = wide.mean(-1) * (not rms)
        inverses = ((wide - means[..., None]).square().mean(-1) + eps).rsqrt()
        return s, normed, means, inverses
    x, branch = x.contiguous(), branch.contiguous()
    kept = None if kept is None else kept.contiguous()
    weight, bias = _vector(weight), _vector(bias)
    s, normed = torch.empty_like(x), torch.empty_like(x, dtype=out)
    if x.numel():
        kernels.penstock_add_norm(
            address(x), address(branch), address(kept), c_float(scale), address(weight), address(bias), c_float(eps),
            int(rms), address(s), address(normed), address(means), address(inverses), *sizes(x.numel() // n, n),
            TYPES[x.dtype], TYPES[branch.dtype], 0 if weight is None else TYPES[weight.dtype], TYPES[out],
            threads_for(x.numel()),
        )  # fmt: skip
    return s, normed, means, inverses


_add_norm = torch.library.custom_op("penstock::add_norm", _forward, mutates_args=())


@_add_norm.register_fake
def _add_norm_shapes(x: Tensor, *settings: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    statistic = x.new_empty(x.shape[:-1], dtype=sums_type(x.dtype))
    empty = torch.empty_like(x, memory_format=torch.contiguous_format)
    return empty, torch.empty_like(empty, dtype=settings[-1]), statistic, torch.empty_like(statistic)


def _make_gradient(
    normed_gradient: Tensor, sum_gradient: Tensor | None, s: Tensor, means: Tensor, inverses: Tensor,
    kept: Tensor | None, scale: float, weight: Tensor | None, bias: Tensor | None, rms: bool,
    branch_type: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, branch, weight and bias; empty where it is the gradient of x too, or where there is none."""
    n = s.shape[-1]
    own_gradient = kept is not None or branch_type != s.dtype
    kernels = library() if _fits(s, normed_gradient, weight, branch_type) else None
    if kernels is None:
        return _plain_gradient(
            normed_gradient, sum_gradient, s, means, inverses, kept, scale, weight, bias, rms, branch_type
        )
    given, s = normed_gradient.contiguous(), s.contiguous()
    more = None if sum_gradient is None else sum_gradient.to(s.dtype).contiguous()
    kept = None if kept is None else kept.contiguous()
    vector = _vector(weight)
    into_x = torch.empty_like(s)
    into_branch = torch.empty_like(s, dtype=branch_type) if own_gradient else s.new_empty(0)
    # Outputs of an operator may not share memory, not even of no elements.
    into_weight, into_bias = (s.new_empty(0) if one is None else _zeros(one) for one in (weight, bias))
    if s.numel():
        kernels.penstock_add_norm_gradient(
            address(given), address(more), address(s), address(means), address(inverses), address(kept), c_float(scale),
            address(vector), int(rms), address(into_x), address(into_branch if own_gradient else None),
            address(None if weight is None else into_weight), address(None if bias is None else into_bias),
            *sizes(s.numel() // n, n), TYPES[s.dtype], TYPES[branch_type],
            0 if vector is None else TYPES[vector.dtype], TYPES[given.dtype], threads_for(s.numel()),
        )  # fmt: skip
    return into_x, into_branch, into_weight, into_bias


_gradient = torch.library.custom_op("penstock::add_norm_gradient", _make_gradient, mutates_args=())


@_gradient.register_fake
def _gradient_shapes(
    normed_gradient: Tensor, sum_gradient: Any, s: Tensor, means: Tensor, inverses: Tensor, kept: Any, scale: float,
    weight: Any, bias: Any, rms: bool, branch_type: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    own_gradient = kept is not None or branch_type != s.dtype
    empty = torch.empty_like(s, memory_format=torch.contiguous_format)
    into_branch = torch.empty_like(empty, dtype=branch_type) if own_gradient else s.new_empty(0)
    into_weight, into_bias = (s.new_empty(0) if one is None else _zeros(one) for one in (weight, bias))
    return empty, into_branch, into_weight, into_bias


def _plain_gradient(
    normed_gradient: Tensor, sum_gradient: Tensor | None, s: Tensor, means: Tensor, inverses: Tensor,
    kept: Tensor | None, scale: float, weight: Tensor | None, bias: Tensor | None, rms: bool, branch_type: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The same by torch's operators."""
    n, wide = s.shape[-1], means.dtype
    given = normed_gradient.to(wide)
    unit = (s.to(wide) - means[..., None]) * inverses[..., None]
    weighted = given if weight is None else given * weight.to(wide)
    inner = weighted - unit * (weighted * unit).mean(-1, keepdim=True)
    if not rms:
        inner = inner - weighted.mean(-1, keepdim=True)
    into_x = inner * inverses[..., None]
    if sum_gradient is not None:
        into_x = into_x + sum_gradient.to(wide)
    into_branch = into_x if kept is None else torch.where(kept, into_x, 0.0) * scale
    own_gradient = kept is not None or branch_type != s.dtype
    return (
        into_x.to(s.dtype),
        into_branch.to(branch_type) if own_gradient else s.new_empty(0),
        s.new_empty(0) if weight is None else (given * unit).reshape(-1, n).sum(0).to(weight.dtype),
        s.new_empty(0) if bias is None else given.reshape(-1, n).sum(0).to(bias.dtype),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, branch, kept, ctx.scale, weight, bias, _, ctx.rms, _ = inputs
    s, _, means, inverses = output
    ctx.set_materialize_grads(False)
    ctx.branch_type = branch.dtype
    ctx.save_for_backward(s, means, inverses, kept, weight, bias)


def _backward(ctx: Any, into_sum: Tensor | None, into_normed: Tensor | None, *_: Any) -> tuple[Any, ...]:
    s, means, inverses, kept, weight, bias = ctx.saved_tensors
    make = _make_gradient if direct(s) else torch.ops.penstock.add_norm_gradient
    x, branch, by_weight, by_bias = make(
        torch.zeros_like(s) if into_normed is None else into_normed, into_sum, s, means, inverses, kept, ctx.scale,
        weight, bias, ctx.rms, ctx.branch_type,
    )  # fmt: skip
    own_gradient = kept is not None or ctx.branch_type != s.dtype
    return (
        x, branch if own_gradient else x, None, None, None if weight is None else by_weight,
        None if bias is None else by_bias, None, None, None,
    )  # fmt: skip


_add_norm.register_autograd(_backward, setup_context=_save)
_DirectNorm = direct_function("_DirectNorm", _forward, _save, _backward, outputs=2)


def residual_norm(
    x: Tensor,
    branch: Tensor,
    norm: nn.LayerNorm | nn.RMSNorm,
    *,
    dropout: float = 0.0,
    for_products: bool = False,
) -> tuple[Tensor, Tensor]:
    """x + dropout(branch), and its `norm` over the last dimension, in one pass forward and one backward.

    x and branch: (…, D) of one shape; norm: over D features. `dropout` is a probability, 0 in evaluation, whose mask is
    drawn as `penstock.kernels.dropout` draws it. `for_products` says that matrix products alone read the norm, so that
    it is returned in the type that autocast would cast it to. Differentiable in x, branch and the norm's weights.
    Raises ConfigError where the shapes differ.
    """
    if x.shape != branch.shape or tuple(norm.normalized_shape) != (x.shape[-1],):
        raise ConfigError(
            f"residual_norm adds tensors of one shape and norms their last dimension, but was given "
            f"{tuple(x.shape)}, {tuple(branch.shape)} and a norm over {tuple(norm.normalized_shape)}; call the norm "
            "itself for other shapes."
        )
    x = x.to(torch.promote_types(x.dtype, branch.dtype))
    out, place = x.dtype, x.device.type
    if for_products and out == torch.float32 and torch.is_autocast_enabled(place):
        out = torch.get_autocast_dtype(place)
    bias = None if isinstance(norm, nn.RMSNorm) else norm.bias
    eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
    rms = isinstance(norm, nn.RMSNorm)
    if place != "cpu" or runs_triton(x.device):
        normed, s = seeded_norm(branch, x, norm.weight, bias, p=dropout, eps=eps, centred=not rms, dtype=out)
        return s, normed
    kept, scale = mask_of(branch, dropout) if dropout else (None, 1.0)
    return add_norm(x, branch, norm.weight, bias, eps, rms=rms, out=out, kept=kept, scale=scale)


def add_norm(
    x: Tensor,
    branch: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    rms: bool = False,
    out: torch.dtype | None = None,
    kept: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`residual_norm` with the norm's weights, (D,), and with what dropout keeps, bool like x, and its factor."""
    inputs = (x, branch, kept, scale, weight, bias, eps, rms, out or x.dtype)
    if direct(x):
        return _DirectNorm.apply(*inputs)  # type: ignore[no-any-return]
    s, normed, _, _ = torch.ops.penstock.add_norm(*inputs)
    return s, normed


def _fits(x: Tensor, other: Tensor, weight: Tensor | None, out: torch.dtype) -> bool:
    """Whether the C++ kernel takes them: on a CPU, of fp32 and bf16."""
    vector = torch.float32 if weight is None else weight.dtype
    return x.device.type == "cpu" and {x.dtype, other.dtype, vector, out} <= TYPES.keys()


def _zeros(vector: Tensor) -> Tensor:
    return torch.zeros_like(vector, memory_format=torch.contiguous_format)


def _vector(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.contiguous()
