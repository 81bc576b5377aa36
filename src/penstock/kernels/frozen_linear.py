"""A linear layer whose weight does not learn and is stored in few bits: y = x · Wᵀ + b, and the gradients of x and b.

    W[n, k] = numbers[n, k] · scales[n, g] + offsets[n, g],    g = ⌊k · G / K⌋

W is made of its numbers for each product, in the type of the product, and freed behind it. Neither W nor x is kept for
the backward pass, which makes W again (Dettmers et al., "QLoRA", NeurIPS 2023, section 3).

Shapes: x (…, K), numbers int8 (N, K), or of 4 bits (N, K/2), the first of two in the low half of a byte; scales and, of
4 bits, offsets (N, G); bias (N); y (…, N).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def unpacked_numbers(pairs: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers of 4 bits (…, K), each from 0 to 15, of bytes (…, K/2) that hold the first of two in the low half."""
    whole = torch.empty(*pairs.shape, 2, dtype=dtype, device=pairs.device)
    whole[..., 0], whole[..., 1] = pairs & 15, pairs >> 4
    return whole.flatten(-2)


def unpacked(numbers: Tensor, scales: Tensor, offsets: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The weight (N, K) in `dtype`: rounded once, from what the numbers stand for."""
    if offsets is None:
        whole = numbers.to(dtype)
        groups = whole.unflatten(1, (scales.shape[1], -1))  # type: ignore[no-untyped-call]
        return torch.mul(groups, scales.to(dtype)[..., None], out=groups).flatten(1)
    whole = unpacked_numbers(numbers.view(torch.uint8), dtype)
    groups = whole.view(len(whole), scales.shape[1], -1)
    own = (scales.to(dtype)[..., None], offsets.to(dtype)[..., None])
    return torch.addcmul(own[1], groups, own[0], out=groups).flatten(1)


def frozen_linear(
    x: Tensor, numbers: Tensor, scales: Tensor, offsets: Tensor | None, bias: Tensor | None
) -> Tensor:
    """The layer's output (…, N), in the type of autocast where that is on, else in the type of x."""
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    return _Frozen.apply(x, numbers, scales, offsets, bias, dtype)  # type: ignore[no-any-return, no-untyped-call]


class _Frozen(torch.autograd.Function):
    """See the head of this file. The reference is F.linear with the weight of `unpacked`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, numbers: Tensor, scales: Tensor, offsets: Tensor | None, bias: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(numbers, scales, offsets)
        ctx.types = x.dtype, None if bias is None else bias.dtype
        weight = unpacked(numbers, scales, offsets, dtype)
        return F.linear(x.to(dtype), weight, None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        into = of_bias = None
        numbers, scales, offsets = ctx.saved_tensors
        if ctx.needs_input_grad[0]:
            into = grad.matmul(unpacked(numbers, scales, offsets, grad.dtype)).to(ctx.types[0])
        if ctx.needs_input_grad[4]:
            of_bias = grad.flatten(0, -2).sum(0).to(ctx.types[1])
        return into, None, None, None, of_bias, None
