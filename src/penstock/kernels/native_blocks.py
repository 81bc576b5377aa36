"""Whole Transformer blocks with weights in int8, in one C++ call on CPUs with AVX512-VNNI, for inference in fp32.

The kernel and its formulas are in `native/blocks.cpp`; the reference is the block's own forward pass. Linear layers
give the same bits as `penstock.kernels.native_integers`; norms, attention and activations differ from torch's only by
rounding.

Shapes: B samples, concatenated to T tokens, D features, H heads of K features.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Sequence
from ctypes import POINTER, c_float, c_int, c_int32, c_int64, c_void_p
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.kernels.bias_activation import ACTIVATION_CODES
from penstock.kernels.native import library, threads_for, typed_kernel
from penstock.kernels.native_integers import PRODUCTS_PER_ELEMENT, InputScale, PackedInt8, multiplies_integers

VECTOR = 16
"""The width of a head must be a multiple of this."""


class _Linear(ctypes.Structure):
    _fields_ = (
        ("inputs", c_int64), ("outputs", c_int64), ("weight", c_void_p), ("zeros", c_void_p), ("scales", c_void_p),
        ("sums", c_void_p), ("bias", c_void_p), ("scaling", c_int32), ("inverse", c_float), ("factors", c_void_p),
    )  # fmt: skip


class _Norm(ctypes.Structure):
    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("eps", c_float), ("rms", c_int32))


class _Block(ctypes.Structure):
    _fields_ = (
        *((name, _Linear) for name in ("qkv", "out", "up", "down")), ("first", _Norm), ("second", _Norm),
        ("heads", c_int64), ("width", c_int64), ("scale", c_float), ("norm_first", c_int32), ("activation", c_int32),
    )  # fmt: skip


_ARGUMENTS = {
    "penstock_attend_samples": (POINTER(c_int64), c_void_p, POINTER(c_int64), c_float, c_void_p, c_int),
    "penstock_int8_block": (
        c_void_p, c_int64, POINTER(c_int64), c_int64, c_void_p, c_void_p, c_void_p, c_int,
    ),
}  # fmt: skip


def computes_blocks() -> bool:
    """Whether the kernel of whole blocks is available; it is compiled at first use."""
    return multiplies_integers() and library("blocks") is not None


def _ends(lengths: Sequence[int]) -> Any:
    return (c_int64 * len(lengths))(*itertools.accumulate(lengths))


def attend_samples(qkv: Tensor, width: int, lengths: Sequence[int], scale: float | None = None) -> Tensor:
    """Attention within each of the concatenated samples, whose `lengths` are given: softmax(scale q kᵀ) v.

    qkv: fp32 (T, H·3·K), for each head queries, keys and values of `width` = K features; returns (T, H·K), with zeros
    after the last sample. `scale` is by default 1 / √K. The reference is `penstock.kernels.attention.plain_attention`.
    """
    qkv, heads = qkv.contiguous(), qkv.shape[1] // (3 * width)
    out = qkv.new_empty(qkv.shape[0], heads * width)
    scores = sum(length * length for length in lengths) * heads
    typed_kernel("blocks", "penstock_attend_samples", _ARGUMENTS)(
        (c_int64 * 4)(qkv.shape[0], len(lengths), heads, width), qkv.data_ptr(), _ends(lengths),
        1.0 / math.sqrt(width) if scale is None else scale, out.data_ptr(), threads_for(scores),
    )  # fmt: skip
    return out


class BlockKernel:
    """A block's weights as the kernel reads them: qkv projection, attention's output projection and the perceptron's
    two layers, each with the scale of its inputs.

    `norms` belong to attention and the perceptron, in fp32; they come before these if `norm_first`, else after the
    residual sums. An Identity means no norm. Raises KeyError for an activation that the kernel does not have.
    """

    def __init__(
        self, layers: Sequence[tuple[PackedInt8, InputScale]], norms: Sequence[nn.Module], *, width: int,
        scale: float | None, norm_first: bool, activation: str,
    ) -> None:  # fmt: skip
        settings: dict[str, Any] = {
            "width": width, "scale": scale, "norm_first": norm_first, "activation": activation,
        }  # fmt: skip
        self._made_of = partial(BlockKernel, **settings), (layers, norms)
        self._kept: list[object] = []
        """Tensors whose memory the kernel reads, other than `layers`."""
        inner, self._features = (layers[1][0].shape[1], layers[1][0].shape[0])
        self._room = 4 * inner + self._features
        self._work = sum(math.prod(packed.shape) for packed, _ in layers) // PRODUCTS_PER_ELEMENT
        self._block = _Block(
            *(self._linear(*layer) for layer in layers), *map(self._norm, norms), inner // width, width,
            1.0 / math.sqrt(width) if scale is None else scale, norm_first, ACTIVATION_CODES[activation],
        )  # fmt: skip

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild a copy from its own layers, so that it reads their memory."""
        return self._made_of

    def _linear(self, packed: PackedInt8, scale: InputScale) -> _Linear:
        scaling, inverse, scales = packed.scaled(scale)
        self._kept.append(scales)
        outputs, inputs = packed.shape
        read = (packed.panels, packed.zeros, scales, packed.sums, packed.bias, packed.factors)
        *addresses, factors = (None if tensor is None else tensor.data_ptr() for tensor in read)
        return _Linear(inputs, outputs, *addresses, scaling, inverse, factors)

    def _norm(self, norm: nn.Module) -> _Norm:
        if not isinstance(norm, nn.LayerNorm | nn.RMSNorm):
            return _Norm()
        weight = torch.ones(norm.normalized_shape) if norm.weight is None else norm.weight.detach()
        bias = getattr(norm, "bias", None)
        bias = torch.zeros(norm.normalized_shape) if bias is None else bias.detach()
        self._kept += [weight, bias]
        eps = torch.finfo(torch.float32).eps if norm.eps is None else norm.eps
        return _Norm(weight.data_ptr(), bias.data_ptr(), eps, isinstance(norm, nn.RMSNorm))

    def __call__(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """The block's output for fp32 tokens x (…, D) of concatenated samples with these `lengths`; nothing attends to
        tokens after the last sample."""
        rows = x.contiguous()
        count = rows.numel() // self._features
        y, room = torch.empty_like(rows), rows.new_empty(count * self._room)
        typed_kernel("blocks", "penstock_int8_block", _ARGUMENTS)(
            ctypes.byref(self._block), count, _ends(lengths), len(lengths), rows.data_ptr(), y.data_ptr(),
            room.data_ptr(), threads_for(count * self._work),
        )  # fmt: skip
        return y
