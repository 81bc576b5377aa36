"""Dropout of a branch, its residual, and the norm that reads their sum, as one operation whose mask is a seed.

Shapes: R rows (tokens), D features. For a branch x, a residual r, and m = 1 / (1 − p) where an element is kept and 0
where it is dropped (Srivastava et al., JMLR 2014):

    s = r + m ⊙ x                                           the sum
    ŝ = (s − μ) / √(σ² + ε)                                 LayerNorm (Ba et al., 2016), or
    ŝ = s / √(mean s² + ε)                                  RMSNorm (Zhang and Sennrich, NeurIPS 2019)
    y = w ⊙ ŝ + b

With gradients dy and ds of both results, and g = w ⊙ dy,

    dr = ds + (g − ŝ · mean(g ⊙ ŝ) − mean(g)) / √(σ² + ε)   without mean(g) in RMSNorm
    dx = m ⊙ dr          dw = Σ_rows dy ⊙ ŝ          db = Σ_rows dy

Kept for the backward pass are s, which the model needs anyway, and 4 or 8 bytes for each row. The mask follows from a
seed: element (row, column) is dropped where its 24 bits of Philox are below p · 2²⁴. In a type of e bytes the forward
pass reads and writes 4·e·R·D bytes and the backward pass 5·e·R·D, without dropout 4; they take about 10 and 16 FLOPs an
element besides Philox. Separate operators read and write 7 and 10 times e·R·D, and a mask.

On a GPU with Triton one kernel does each pass (kernels/triton/seeded_norm.py). The reference below is the form of
other devices and of fp64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.dtypes import widened
from penstock.errors import ConfigError
from penstock.kernels.has_triton import runs_triton

_LEVELS = 1 << 24
_WORD = 0xFFFFFFFF
MOST = 1 << 13
"""Features up to which a kernel holds a row."""


def seeded_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    p: float = 0.0,
    eps: float = 1e-5,
    centred: bool = True,
    dtype: torch.dtype | None = None,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The norm y of the sum s of a residual and a branch after dropout, and s: both (…, D).

    x and residual: (…, D) of one shape; weight, bias: (D,) or None. `centred` is LayerNorm, else RMSNorm, which has no
    bias. y is in `dtype`, by default the type of autocast, else that of x; s in the wider of x and the residual.
    `seed`, (1,) int64 on the device, decides what is dropped; None draws it from torch's generator, so that a
    recomputation under the same state of it drops the same. Raises ConfigError for shapes or a `p` that do not fit.
    """
    columns = x.shape[-1] if x.ndim else 0
    if x.shape != residual.shape or any(t is not None and t.shape != x.shape[-1:] for t in (weight, bias)):
        raise ConfigError(
            f"seeded_norm needs a branch and a residual of one shape, and weights of the last dimension, but has "
            f"{[None if t is None else tuple(t.shape) for t in (x, residual, weight, bias)]}; reshape them first."
        )
    if not 0.0 <= p < 1.0 or (bias is not None and (not centred or weight is None)):
        raise ConfigError(
            f"seeded_norm has p={p}, centred={centred}, {'no ' if weight is None else ''}weight and "
            f"{'no ' if bias is None else ''}bias; p is at least 0 and below 1, and a bias comes with a weight and "
            "centred."
        )
    level = round(p * _LEVELS)
    if seed is None:
        seed = x.new_empty(0, dtype=torch.int64)
        if level:
            seed = torch.randint(-(1 << 62), 1 << 62, (1,), device=x.device)
    if dtype is None:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    rows = x.reshape(-1, columns), residual.reshape(-1, columns)
    y, total, *_ = _forward(*rows, weight, bias, seed, level, eps, centred, dtype)
    return y.view(x.shape), total.view(x.shape)


def kept(seed: Tensor, rows: int, columns: int, level: int) -> Tensor:
    """Elements (R, D) that are kept, bool: those whose bits of Philox-4x32-10 (Salmon et al., SC 2011) under the
    counter (column // 4, row, 0, 0) and the seed's key are not below `level` of 2²⁴."""
    device = seed.device
    quarter = torch.arange(-(-columns // 4), device=device).expand(rows, -1)
    line = torch.arange(rows, device=device)[:, None].expand_as(quarter)
    words = [quarter, line, torch.zeros_like(line), torch.zeros_like(line)]
    keys = [seed & _WORD, (seed >> 32) & _WORD]
    for _ in range(10):
        # Products of 64 bits wrap around, and their bits stay right.
        odd, even = words[2] * 0xCD9E8D57, words[0] * 0xD2511F53
        words = [
            ((odd >> 32) & _WORD) ^ words[1] ^ keys[0], odd & _WORD,
            ((even >> 32) & _WORD) ^ words[3] ^ keys[1], even & _WORD,
        ]  # fmt: skip
        keys = [(keys[0] + 0x9E3779B9) & _WORD, (keys[1] + 0xBB67AE85) & _WORD]
    return torch.stack(words, -1).flatten(1)[:, :columns] >> 8 >= level


def _scale(level: int) -> float:
    return _LEVELS / (_LEVELS - level)


def plain_seeded_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, seed: Tensor, level: int, eps: float,
    centred: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The reference, of matrices (R, D), differentiable: y, s, and each row's μ (none of RMSNorm) and 1 / √(σ² + ε)."""
    branch = widened(x)
    if level:
        branch = torch.where(kept(seed, x.shape[0], x.shape[1], level), branch * _scale(level), 0.0)
    total = (branch + residual).to(torch.promote_types(x.dtype, residual.dtype))
    value = widened(total)
    mean = value.mean(1) if centred else value.new_empty(0)
    value = value - mean[:, None] if centred else value
    inverse = (value.square().mean(1) + eps).rsqrt()
    y = value * inverse[:, None]
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return y.to(dtype), total, mean, inverse


@torch.library.custom_op("penstock::seeded_norm", mutates_args=())
def _forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, seed: Tensor, level: int, eps: float,
    centred: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    if not _is_fused(x, residual):
        return plain_seeded_norm(x, residual, weight, bias, seed, level, eps, centred, dtype)
    results = _shapes(x, residual, weight, bias, seed, level, eps, centred, dtype)
    if x.numel():
        from penstock.kernels.triton.seeded_norm import forward

        weight, bias = _dense(weight), _dense(bias)
        forward(
            x.contiguous(),
            residual.contiguous(),
            weight,
            bias,
            seed,
            level,
            _scale(level),
            eps,
            centred,
            *results,
        )
    return results


def _shapes(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, seed: Tensor, level: int, eps: float,
    centred: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    total = torch.promote_types(x.dtype, residual.dtype)
    wide, rows = torch.promote_types(total, torch.float32), x.shape[0]
    return (
        x.new_empty(x.shape, dtype=dtype),
        x.new_empty(x.shape, dtype=total),
        x.new_empty(rows if centred else 0, dtype=wide),
        x.new_empty(rows, dtype=wide),
    )


_forward.register_fake(_shapes)


@torch.library.custom_op("penstock::seeded_norm_backward", mutates_args=())
def _backward(
    to_y: Tensor, to_total: Tensor | None, total: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor,
    inverse: Tensor, seed: Tensor, level: int, centred: bool, x_dtype: torch.dtype, residual_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, where they differ from those of the residual, of this, of the weight and of the bias."""
    results = _backward_shapes(
        to_y, to_total, total, weight, bias, mean, inverse, seed, level, centred, x_dtype, residual_dtype
    )
    if not total.numel():
        return *results[:2], results[2].zero_(), results[3].zero_()
    if _is_fused(total, to_y):
        from penstock.kernels.triton.seeded_norm import backward

        sums = backward(
            to_y.contiguous(), _dense(to_total), total, _dense(weight), bias is not None, mean, inverse, seed, level,
            _scale(level), centred, *results[:2],
        )  # fmt: skip
    else:
        value = total.to(inverse.dtype)
        value = (value - mean[:, None] if centred else value) * inverse[:, None]
        grad = to_y.to(value.dtype)
        sums = (grad * value).sum(0), grad.sum(0)
        grad = grad if weight is None else grad * weight
        grad = grad - value * (grad * value).mean(1, keepdim=True)
        grad = (grad - grad.mean(1, keepdim=True) if centred else grad) * inverse[:, None]
        grad = grad if to_total is None else grad + to_total
        results[1].copy_(grad)
        if level:
            grad = torch.where(kept(seed, grad.shape[0], grad.shape[1], level), grad * _scale(level), 0.0)
        if results[0].numel():
            results[0].copy_(grad)
    for result, total_sum in zip(results[2:], sums):
        if result.numel():
            result.copy_(total_sum)
    return results


def _backward_shapes(
    to_y: Tensor, to_total: Tensor | None, total: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor,
    inverse: Tensor, seed: Tensor, level: int, centred: bool, x_dtype: torch.dtype, residual_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    own = level > 0 or x_dtype != residual_dtype
    return (
        total.new_empty(total.shape if own else (0,), dtype=x_dtype),
        total.new_empty(total.shape, dtype=residual_dtype),
        total.new_empty(0) if weight is None else torch.empty_like(weight),
        total.new_empty(0) if bias is None else torch.empty_like(bias),
    )


_backward.register_fake(_backward_shapes)


def _dense(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _is_fused(*tensors: Tensor) -> bool:
    """Whether the kernels compute a row of these (R, D)."""
    narrow = all(t.dtype != torch.float64 for t in tensors)
    return runs_triton(tensors[0].device) and narrow and tensors[0].shape[1] <= MOST


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, bias, seed, ctx.level, _, ctx.centred, ctx.dtype = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], weight, bias, *output[2:], seed)
    ctx.types = x.dtype, residual.dtype


def _gradients(ctx: Any, to_y: Tensor | None, to_total: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    total, weight, bias, mean, inverse, seed = ctx.saved_tensors
    if to_y is None:
        if to_total is None:
            return (None,) * 9
        to_y = torch.zeros_like(total, dtype=ctx.dtype)
    to_x, to_residual, to_weight, to_bias = _backward(
        to_y, to_total, total, weight, bias, mean, inverse, seed, ctx.level, ctx.centred, *ctx.types
    )
    to_x = to_x if ctx.level or ctx.types[0] != ctx.types[1] else to_residual
    return (
        to_x, to_residual, None if weight is None else to_weight, None if bias is None else to_bias, *[None] * 5
    )  # fmt: skip


_forward.register_autograd(_gradients, setup_context=_keep)
