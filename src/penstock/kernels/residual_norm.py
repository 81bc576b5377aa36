"""Residual, dropout and norm in one pass: s = x + dropout(branch), normed = norm(s) · weight + bias.

Shapes: rows of any leading dimensions, D features. For a LayerNorm (Ba et al., 2016)

    normed = (s − mean(s)) / √(var(s) + eps) · weight + bias,

and for an RMSNorm (Zhang & Sennrich, NeurIPS 2019) the same with mean 0 and without bias. Statistics are fp32, computed
after s is rounded to its dtype. Forward reads x and the branch and writes s and its norm: 4 passes over rows × D
elements, while separate operators take 6. Backward reads the gradients of the norm and of s, and s, and writes one
gradient for both inputs, summing the gradients of weight and bias meanwhile: 4 passes, while separate operators take 8.

Dropout (Srivastava et al., JMLR 2014) is given as a mask or a seed. On a CPU the kernel is C++ (`native/fused.cpp`) and
reads a mask, one byte per element. On a GPU with Triton one kernel does each pass (`triton/seeded_norm.py`): it draws
the mask from the seed in both passes, and stores none. `reference` serves other devices and dtypes.
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

_LEVELS = 1 << 24
_WORD = 0xFFFFFFFF
MOST = 1 << 13
"""Most features per row for the Triton kernels, which hold a whole row."""


def seed_of(device: torch.device, p: float) -> tuple[Tensor, float]:
    """A seed, (1,) int64, from torch's generator for a dropout mask with probability `p`, and the factor of kept
    elements. Recomputation under the same generator state draws the same seed. Raises ConfigError unless 0 ≤ p < 1."""
    if not 0.0 <= p < 1.0:
        raise ConfigError(f"Dropout has p={p}, but p must be at least 0 and below 1.")
    return torch.randint(-(1 << 62), 1 << 62, (1,), device=device), _LEVELS / (_LEVELS - round(p * _LEVELS))


def drawn(seed: Tensor, rows: int, columns: int, level: int) -> Tensor:
    """Elements (R, D) that a seed keeps, bool: an element is kept if its 24 bits from Philox-4x32-10 (Salmon et al., SC
    2011), with counter (column // 4, row, 0, 0) and the seed as key, are not below `level` of 2²⁴."""
    device = seed.device
    quarter = torch.arange(-(-columns // 4), device=device).expand(rows, -1)
    line = torch.arange(rows, device=device)[:, None].expand_as(quarter)
    words = [quarter, line, torch.zeros_like(line), torch.zeros_like(line)]
    keys = [seed & _WORD, (seed >> 32) & _WORD]
    for _ in range(10):
        # 64-bit products wrap around, but their bits stay right.
        odd, even = words[2] * 0xCD9E8D57, words[0] * 0xD2511F53
        words = [
            ((odd >> 32) & _WORD) ^ words[1] ^ keys[0], odd & _WORD,
            ((even >> 32) & _WORD) ^ words[3] ^ keys[1], even & _WORD,
        ]  # fmt: skip
        keys = [(keys[0] + 0x9E3779B9) & _WORD, (keys[1] + 0xBB67AE85) & _WORD]
    return torch.stack(words, -1).flatten(1)[:, :columns] >> 8 >= level


def _level(scale: float) -> int:
    """The level of `drawn` for dropout that multiplies kept elements by `scale`."""
    return round((1.0 - 1.0 / scale) * _LEVELS)


def _mask(kept: Tensor | None, like: Tensor, scale: float) -> Tensor | None:
    """Which elements are kept, bool; None: all."""
    if kept is None or kept.dtype == torch.bool:
        return kept
    rows = like.numel() // max(1, like.shape[-1])
    return drawn(kept, rows, like.shape[-1], _level(scale)).view(like.shape)


def reference(
    x: Tensor, branch: Tensor, kept: Tensor | None, scale: float, weight: Tensor | None, bias: Tensor | None,
    eps: float, rms: bool, out: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """s, in x's dtype, and its norm in dtype `out`, with torch's operators. Shapes (…, D); for `kept` see
    `add_norm`."""
    added, mask = widened(branch), _mask(kept, x, scale)
    s = (x + (added if mask is None else torch.where(mask, added * scale, 0.0))).to(x.dtype)
    wide = widened(s)
    gain, offset = (None if each is None else each.to(wide.dtype) for each in (weight, bias))
    shape = s.shape[-1:]
    normed = F.rms_norm(wide, shape, gain, eps) if rms else F.layer_norm(wide, shape, gain, offset, eps)
    return s, normed.to(out)


def _forward(
    x: Tensor, branch: Tensor, kept: Tensor | None, scale: float, weight: Tensor | None, bias: Tensor | None,
    eps: float, rms: bool, out: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """s, its norm, and each row's mean and inverse standard deviation, fp32."""
    shape, n = x.shape, x.shape[-1]
    means, inverses = (x.new_empty(shape[:-1], dtype=sums_type(x.dtype)) for _ in range(2))
    if _launches(kept, x, branch):
        weight, bias = _vector(weight), _vector(bias)
        s, seed = torch.empty_like(x, memory_format=torch.contiguous_format), means if kept is None else kept
        normed = torch.empty_like(s, dtype=out)
        if x.numel():
            from penstock.kernels.triton.seeded_norm import forward

            rows = branch.reshape(-1, n).contiguous(), x.reshape(-1, n).contiguous()
            results = normed.view(-1, n), s.view(-1, n), means.view(-1), inverses.view(-1)
            forward(*rows, weight, bias, seed, _level(scale), scale, eps, not rms, *results)
        return s, normed, means, inverses
    kernels = library() if _fits(x, branch, kept, weight, out) else None
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
    """Gradients of x, branch, weight and bias. Empty: the branch's if it equals x's, and a missing weight's or
    bias's."""
    n = s.shape[-1]
    own_gradient = kept is not None or branch_type != s.dtype
    if _launches(kept, s, normed_gradient):
        results: tuple[Tensor, Tensor, Tensor, Tensor] = _gradient_shapes(
            normed_gradient, sum_gradient, s, means, inverses, kept, scale, weight, bias, rms, branch_type
        )
        if s.numel():
            from penstock.kernels.triton.seeded_norm import backward

            normed_rows, total = normed_gradient.reshape(-1, n).contiguous(), s.reshape(-1, n).contiguous()
            more = None if sum_gradient is None else sum_gradient.reshape(-1, n).contiguous()
            sums = backward(
                normed_rows, more, total, _vector(weight), bias is not None, means.view(-1), inverses.view(-1),
                means if kept is None else kept, _level(scale), scale, not rms,
                results[1].view(-1, n) if own_gradient else results[1], results[0].view(-1, n),
            )  # fmt: skip
            for result, vector_sum in zip(results[2:], sums):
                if result.numel():
                    result.copy_(vector_sum)
        return results
    kernels = library() if _fits(s, normed_gradient, kept, weight, branch_type) else None
    if kernels is None:
        return _plain_gradient(
            normed_gradient, sum_gradient, s, means, inverses, kept, scale, weight, bias, rms, branch_type
        )
    normed_rows, s = normed_gradient.contiguous(), s.contiguous()
    more = None if sum_gradient is None else sum_gradient.to(s.dtype).contiguous()
    kept = None if kept is None else kept.contiguous()
    vector = _vector(weight)
    into_x = torch.empty_like(s)
    into_branch = torch.empty_like(s, dtype=branch_type) if own_gradient else s.new_empty(0)
    # Outputs of an operator may not share memory, not even if they are empty.
    into_weight, into_bias = (
        s.new_empty(0) if parameter is None else torch.zeros_like(parameter) for parameter in (weight, bias)
    )
    if s.numel():
        kernels.penstock_add_norm_gradient(
            address(normed_rows), address(more), address(s), address(means), address(inverses), address(kept),
            c_float(scale), address(vector), int(rms), address(into_x), address(into_branch if own_gradient else None),
            address(None if weight is None else into_weight), address(None if bias is None else into_bias),
            *sizes(s.numel() // n, n), TYPES[s.dtype], TYPES[branch_type],
            0 if vector is None else TYPES[vector.dtype], TYPES[normed_rows.dtype], threads_for(s.numel()),
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
    into_weight, into_bias = (
        s.new_empty(0) if parameter is None else torch.zeros_like(parameter) for parameter in (weight, bias)
    )
    return empty, into_branch, into_weight, into_bias


def _plain_gradient(
    normed_gradient: Tensor, sum_gradient: Tensor | None, s: Tensor, means: Tensor, inverses: Tensor,
    kept: Tensor | None, scale: float, weight: Tensor | None, bias: Tensor | None, rms: bool, branch_type: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The same with torch's operators."""
    n, wide = s.shape[-1], means.dtype
    wide_gradient = normed_gradient.to(wide)
    unit = (s.to(wide) - means[..., None]) * inverses[..., None]
    weighted = wide_gradient if weight is None else wide_gradient * weight.to(wide)
    inner = weighted - unit * (weighted * unit).mean(-1, keepdim=True)
    if not rms:
        inner = inner - weighted.mean(-1, keepdim=True)
    into_x = inner * inverses[..., None]
    if sum_gradient is not None:
        into_x = into_x + sum_gradient.to(wide)
    mask = _mask(kept, s, scale)
    into_branch = into_x if mask is None else torch.where(mask, into_x, 0.0) * scale
    own_gradient = kept is not None or branch_type != s.dtype
    return (
        into_x.to(s.dtype),
        into_branch.to(branch_type) if own_gradient else s.new_empty(0),
        s.new_empty(0) if weight is None else (wide_gradient * unit).reshape(-1, n).sum(0).to(weight.dtype),
        s.new_empty(0) if bias is None else wide_gradient.reshape(-1, n).sum(0).to(bias.dtype),
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
    x: Tensor, branch: Tensor, norm: nn.LayerNorm | nn.RMSNorm, *, dropout: float = 0.0,
    for_products: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x + dropout(branch), and its `norm` over the last dimension, in one pass forward and one backward.

    x and branch: (…, D) of one shape; norm: over D features. `dropout` is a probability, 0 in evaluation; its mask is
    drawn as in `penstock.kernels.dropout`. `for_products` says that only matrix products read the norm, which is then
    returned in the dtype that autocast would cast it to. Differentiable in x, branch and the norm's weights. Raises
    ConfigError if the shapes differ.
    """
    if x.shape != branch.shape or tuple(norm.normalized_shape) != (x.shape[-1],):
        raise ConfigError(
            f"residual_norm adds tensors of one shape and norms their last dimension, but got "
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
    kept: Tensor | None = None
    scale = 1.0
    if dropout:
        seeded = place != "cpu" or runs_triton(x.device)
        kept, scale = seed_of(x.device, dropout) if seeded else mask_of(branch, dropout)
    return add_norm(x, branch, norm.weight, bias, eps, rms=rms, out=out, kept=kept, scale=scale)


def add_norm(
    x: Tensor, branch: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, rms: bool = False,
    out: torch.dtype | None = None, kept: Tensor | None = None, scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`residual_norm` from the norm's weights, (D,), and dropout as `kept`, a bool mask like x or a seed (1,) int64 on
    the device (see `drawn`), with the factor `scale`. The branch's dtype is no wider than x's."""
    inputs = (x, branch, kept, scale, weight, bias, eps, rms, out or x.dtype)
    if direct(x):
        return _DirectNorm.apply(*inputs)  # type: ignore[no-any-return]
    s, normed, _, _ = torch.ops.penstock.add_norm(*inputs)
    return s, normed


def _launches(kept: Tensor | None, *tensors: Tensor) -> bool:
    """Whether the Triton kernels support these tensors (…, D)."""
    narrow = all(t.dtype != torch.float64 for t in tensors)
    seeded = kept is None or kept.dtype == torch.int64
    return seeded and narrow and tensors[0].shape[-1] <= MOST and runs_triton(tensors[0].device)


def _fits(x: Tensor, other: Tensor, kept: Tensor | None, weight: Tensor | None, out: torch.dtype) -> bool:
    """Whether the C++ kernel supports these inputs: on a CPU, in fp32 or bf16, with a mask or without dropout."""
    vector = torch.float32 if weight is None else weight.dtype
    if kept is not None and kept.dtype != torch.bool:
        return False
    return x.device.type == "cpu" and {x.dtype, other.dtype, vector, out} <= TYPES.keys()


def _vector(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.contiguous()
