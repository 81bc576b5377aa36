"""A linear layer with a frozen weight that is stored in few bits: y = x · Wᵀ + b, and the gradients of x and b.

    W[n, k] = numbers[n, k] · scales[n, g] + offsets[n, g],    g = ⌊k · G / K⌋

W is dequantised for each matrix product, in the product's dtype, and freed afterwards. Neither W nor x is saved for the
backward pass, which dequantises W again (Dettmers et al., "QLoRA", NeurIPS 2023, section 3).

Shapes: x (…, K); numbers int8 (N, K), or 4-bit (N, K/2), two per byte, the first in the low half; scales and, for 4
bits, offsets (N, G); bias (N); y (…, N).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def unpacked_numbers(pairs: Tensor, dtype: torch.dtype) -> Tensor:
    """Unpack bytes (…, K/2) into 4-bit numbers (…, K), each from 0 to 15; the low half of a byte comes first."""
    whole = torch.empty(*pairs.shape, 2, dtype=dtype, device=pairs.device)
    whole[..., 0], whole[..., 1] = pairs & 15, pairs >> 4
    return whole.flatten(-2)


def unpacked(numbers: Tensor, scales: Tensor, offsets: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The dequantised weight (N, K) in `dtype`, rounded once."""
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
    """The layer's output (…, N), in autocast's dtype if autocast is on, else in the dtype of x."""
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
