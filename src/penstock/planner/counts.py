"""What a model costs, from its configuration alone: parameters, operations with their FLOPs and traffic,
memory.

A multiply-add is two FLOPs, and only matrix products and convolutions are counted as FLOPs, as is usual:
elementwise work is memory traffic. Attention is counted in full (nothing here is causal). Tests hold these
counts to torch's FlopCounterMode and to the tensors that autograd really keeps.

Shapes: B samples, N tokens, D width, M MLP width, H heads, K features per head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.config.model import ModelConfig, ViTConfig

OpKind = Literal["gemm", "bmm", "conv", "pointwise", "norm", "softmax", "copy", "reduce"]
Phase = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operation, done `count` times. All figures but `count` are of one time.

    `gemm` and `bmm` multiply (m, k) by (k, n); a `bmm` does so for `batch` pairs in one launch.
    """

    name: str
    kind: OpKind
    phase: Phase
    count: int = 1
    batch: int = 1
    m: int = 0
    n: int = 0
    k: int = 0
    read_elements: int = 0
    written_elements: int = 0
    recomputed_flops: int = 0
    """FLOPs that repeat forward work: part of hardware utilisation (HFU), not of model utilisation (MFU)."""

    @property
    def flops(self) -> int:
        """Model FLOPs of one time."""
        return 2 * self.batch * self.m * self.n * self.k


def parameters(config: ModelConfig) -> int:
    """Learned numbers of the model, buffers not counted."""
    return sum(parameter_shapes_total(config).values())


def parameter_shapes_total(config: ViTConfig) -> dict[str, int]:
    """Parameters by part: stem, embeddings, blocks, head."""
    d, m = config.width, config.mlp_width
    block = 2 * 2 * d  # two norms
    block += 3 * d * d + 3 * d * config.qkv_bias + d * d + d  # qkv, out
    block += 2 * d * m + m + d
    if config.qk_norm:
        block += 2 * 2 * config.head_width
    if config.layer_scale is not None:
        block += 2 * d
    return {
        "stem": _stem_parameters(config),
        "embeddings": config.tokens * d + d * (config.classifier == "token"),
        "blocks": config.depth * block,
        "head": 2 * d + d * config.classes + config.classes,
    }


def _stem_parameters(config: ViTConfig) -> int:
    if config.stem == "patchify":
        return config.channels * config.patch_size**2 * config.width + config.width
    total, channels = 0, config.channels
    for width in conv_widths(config):
        total += 9 * channels * width + 2 * width
        channels = width
    return total + channels * config.width + config.width


def conv_widths(config: ViTConfig) -> list[int]:
    """Output channels of each stride-2 convolution of the conv stem: doubling up to the model's width."""
    halvings = config.patch_size.bit_length() - 1
    return [max(8, config.width >> (halvings - 1 - i)) for i in range(halvings)]
