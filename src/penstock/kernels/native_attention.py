"""Attention in C++ on CPUs that multiply pairs of bf16 values: no scores in memory, and dropout in the kernel.

The kernels and their formulas are in `native/attention.cpp`. The reference is `penstock.kernels.attention.
plain_attention`. Shapes: B samples, H heads, G KV heads, N queries, M keys, K features per head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from ctypes import c_float, c_int64, c_uint32
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.cpu import this_cpu
from penstock.dtypes import format_of
from penstock.errors import ConfigError
from penstock.kernels.choices import HEAD_MULTIPLE, native_obstacle
from penstock.kernels.native import address, direct, direct_function, library, threads_for


def native_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool, dropout: float, scale: float | None
) -> Tensor:
    """Attention in bf16: softmax(scale q kᵀ + mask) v.

    q: (B, H, N, K), k and v: (B, G, M, K), of any strides, read in place if a head's features are adjacent; mask: (B or
    1, 1, 1, M), true for keys that may be attended to, or values to add to the scores; returns (B, H, N, K).

    `dropout` drops weights by a hash of their indices and a seed from torch's generator; the backward pass computes the
    hash again. Differentiable in q, k and v. Raises ConfigError for inputs that the kernel does not support.
    """
    added, seed, scale = _prepare(q, k, v, mask, causal, dropout, scale)
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    if direct(q):
        return _Direct.apply(q, k, v, added, seed, causal, dropout, scale)  # type: ignore[no-any-return]
    out: Tensor = _attend(q, k, v, added, seed, causal, dropout, scale)[0]
    return out


def native_packed_attention(
    packed: Tensor, sequence_first: bool, mask: Tensor | None, *, causal: bool, dropout: float, scale: float | None,
) -> Tensor:  # fmt: skip
    """The same for a packed projection, (B, N, H, 3, K) to (B, N, H, K), or (N, B, …) sequence first.

    Its features must be adjacent. The gradient is written into one tensor, not assembled from three.
    """
    q, k, v = _heads_of(packed, sequence_first)
    added, seed, scale = _prepare(q, k, v, mask, causal, dropout, scale)
    if direct(packed):
        return _DirectPacked.apply(packed, added, seed, causal, dropout, scale, sequence_first)  # type: ignore[no-any-return]
    out: Tensor = _attend_packed(packed, added, seed, causal, dropout, scale, sequence_first)[0]
    return out


def _heads_of(packed: Tensor, sequence_first: bool) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as views (B, H, N, K)."""
    q, k, v = packed.permute(3, 1, 2, 0, 4) if sequence_first else packed.permute(3, 0, 2, 1, 4)
    return q, k, v


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout: float, scale: float | None
) -> tuple[Tensor | None, Tensor, float]:
    """The mask to add, the seed and the scale; raises ConfigError for inputs that the kernel does not support."""
    if reason := _obstacle(q, k, v, mask, causal):
        raise ConfigError(
            f"plan.attention 'native' has no kernel for {reason}; use attention 'auto' or 'plain'."
        )
    seed = torch.randint(1 << 31, (1,)) if dropout else torch.zeros(1, dtype=torch.int64)
    added = None if mask is None else _added(mask, len(q))
    return added, seed, 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale


def _obstacle(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> str | None:
    """The first property of these inputs that the kernel does not support, in words, or None."""
    for one in (q, k, v):
        pairs = this_cpu().bf16_pairs
        reason = native_obstacle(q.device.type, format_of(one.dtype), one.shape[-1], bf16_pairs=pairs)
        if reason is not None:
            return reason
    if v.shape[-1] != q.shape[-1]:
        return "values of another width than keys"
    if mask is not None and (mask.requires_grad or mask.shape[1:3] != (1, 1)):
        return "biases of scores, or masks that differ between queries or heads"
    return "a causal mask over fewer keys than queries" if causal and q.shape[-2] > k.shape[-2] else None


def _added(mask: Tensor, samples: int) -> Tensor:
    """The mask as values to add, fp32, (B, M rounded up to a whole vector)."""
    mask = mask[:, 0, 0]
    if not mask.is_floating_point():
        mask = torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
    return F.pad(mask.float(), (0, -mask.shape[-1] % HEAD_MULTIPLE)).expand(samples, -1).contiguous()


def _kernels() -> Any:
    kernels = library("attention")
    if kernels is None:
        raise ConfigError(
            "plan.attention 'native' could not be compiled; use attention 'auto', or install g++."
        )
    return kernels


def _sizes(q: Tensor, k: Tensor, causal: bool, dropout: float, scale: float, seed: Tensor) -> tuple[Any, ...]:
    samples, heads, tokens, width = q.shape
    sizes = (c_int64 * 6)(samples, heads, k.shape[1], tokens, k.shape[2], width)
    return sizes, c_float(scale), int(causal), c_float(dropout), c_uint32(int(seed))


def _strides(*tensors: Tensor) -> Any:
    numbers = [t.stride(i) for t in tensors for i in range(3)]
    return (c_int64 * len(numbers))(*numbers)


def _by_token(like: Tensor) -> Tensor:
    """An empty tensor (B, H, N, K) in which the heads of a token are adjacent in memory."""
    samples, heads, tokens, width = like.shape
    return like.new_empty(samples, tokens, heads, width).transpose(1, 2)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, seed: Tensor, causal: bool, dropout: float,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The result, and each query's log-sum-exp, (B, H, N) in fp32."""
    return _attend_into(_by_token(q), q, k, v, added, seed, causal, dropout, scale)


def _attend_into(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, seed: Tensor, causal: bool, dropout: float,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    sums = q.new_empty(q.shape[:3], dtype=torch.float32)
    if out.numel():
        _kernels().penstock_attend(
            *_sizes(q, k, causal, dropout, scale, seed), address(q), address(k), address(v), _strides(q, k, v, out),
            address(added), address(out), address(sums), threads_for(sums.numel() * k.shape[2]),
        )  # fmt: skip
    return out, sums


_attend = torch.library.custom_op("penstock::attend", _forward, mutates_args=())


@_attend.register_fake
def _attend_shapes(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _by_token(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _make_gradients(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, added: Tensor | None, seed: Tensor,
    causal: bool, dropout: float, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    into = _by_token(q), _by_token(k), _by_token(v)
    _write_gradients(into, gradient, q, k, v, out, sums, added, seed, causal, dropout, scale)
    return into


def _write_gradients(
    into: tuple[Tensor, Tensor, Tensor], gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor,
    added: Tensor | None, seed: Tensor, causal: bool, dropout: float, scale: float,
) -> None:  # fmt: skip
    gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
    if out.numel():
        _kernels().penstock_attend_gradient(
            *_sizes(q, k, causal, dropout, scale, seed), *map(address, (q, k, v, out, gradient)),
            _strides(q, k, v, out, gradient, *into), address(added), address(sums), *map(address, into),
            threads_for(sums.numel() * k.shape[2]),
        )  # fmt: skip
    else:  # without queries, keys get no gradient
        for each in into:
            each.zero_()


_gradients = torch.library.custom_op("penstock::attend_gradient", _make_gradients, mutates_args=())


@_gradients.register_fake
def _gradient_shapes(_: Tensor, q: Tensor, k: Tensor, v: Tensor, *__: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _by_token(q), _by_token(k), _by_token(v)


def _differentiable(
    attend: Any, forward: Callable[..., Any], gradients: Any, make_gradients: Callable[..., Any], projections: int
) -> Any:  # fmt: skip
    """Register an operator's gradient, and return an autograd Function that does the same without torch's dispatcher.

    The inputs are `projections` tensors, the mask, the seed and settings. `gradients` is `make_gradients` as an
    operator.
    """

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        added, seed, *ctx.settings = inputs[projections:]
        ctx.save_for_backward(*inputs[:projections], *output, added, seed)

    def backward(ctx: Any, gradient: Tensor, _: Any = None) -> tuple[Any, ...]:
        make = make_gradients if direct(gradient) else gradients
        grads = make(gradient, *ctx.saved_tensors, *ctx.settings)
        return (*([grads] if projections == 1 else grads), *[None] * (2 + len(ctx.settings)))

    attend.register_autograd(backward, setup_context=save)
    return direct_function("DirectAttention", forward, save, backward, outputs=1)


_Direct = _differentiable(_attend, _forward, torch.ops.penstock.attend_gradient, _make_gradients, 3)


def _forward_packed(
    packed: Tensor, added: Tensor | None, seed: Tensor, causal: bool, dropout: float, scale: float,
    sequence_first: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The result in the layout of the projection, and the log-sum-exp as in `_forward`."""
    q, k, v = _heads_of(packed, sequence_first)
    out = packed.new_empty(*packed.shape[:3], packed.shape[4])
    seen = out.permute(1, 2, 0, 3) if sequence_first else out.transpose(1, 2)
    return out, _attend_into(seen, q, k, v, added, seed, causal, dropout, scale)[1]


_attend_packed = torch.library.custom_op("penstock::attend_packed", _forward_packed, mutates_args=())


@_attend_packed.register_fake
def _packed_shapes(packed: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    first, second, heads, _, width = packed.shape
    samples, tokens = (second, first) if settings[-1] else (first, second)
    out = packed.new_empty(first, second, heads, width)
    return out, packed.new_empty(samples, heads, tokens, dtype=torch.float32)


def _make_packed_gradient(
    gradient: Tensor, packed: Tensor, out: Tensor, sums: Tensor, added: Tensor | None, seed: Tensor, causal: bool,
    dropout: float, scale: float, sequence_first: bool,
) -> Tensor:  # fmt: skip
    into = torch.empty_like(packed, memory_format=torch.contiguous_format)
    seen = [t.permute(1, 2, 0, 3) if sequence_first else t.transpose(1, 2) for t in (gradient, out)]
    heads = _heads_of(packed, sequence_first)
    _write_gradients(
        _heads_of(into, sequence_first), seen[0], *heads, seen[1], sums, added, seed, causal, dropout, scale
    )
    return into


_packed_gradient = torch.library.custom_op(
    "penstock::attend_packed_gradient", _make_packed_gradient, mutates_args=()
)


@_packed_gradient.register_fake
def _packed_gradient_shape(_: Tensor, packed: Tensor, *__: Any) -> Tensor:
    return torch.empty_like(packed, memory_format=torch.contiguous_format)


_DirectPacked = _differentiable(
    _attend_packed, _forward_packed, torch.ops.penstock.attend_packed_gradient, _make_packed_gradient, 1
)
