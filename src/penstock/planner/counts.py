"""What a model costs, from its configuration alone: parameters, FLOPs, and the memory its backward pass
needs.

A multiply-add is two FLOPs, and only matrix products and convolutions are counted as FLOPs, as is usual:
elementwise work is memory traffic, which `operations` lists. Attention is counted in full, as nothing here is
causal. Tests hold the counts to real modules, to torch's FlopCounterMode and to what autograd really keeps.
"""

from __future__ import annotations

from penstock.config.model import ViTConfig
from penstock.config.plan import Plan
from penstock.planner.activations import activation_bytes, activation_parts
from penstock.planner.operations import Op, conv_widths, operations

__all__ = [
    "Op",
    "activation_bytes",
    "activation_parts",
    "backward_flops",
    "forward_flops",
    "model_flops_per_sample",
    "operations",
    "parameter_parts",
    "parameters",
    "recomputed_flops",
]


def parameters(config: ViTConfig) -> int:
    """Learned numbers of the model; buffers are not counted."""
    return sum(parameter_parts(config).values())


def parameter_parts(config: ViTConfig) -> dict[str, int]:
    """Learned numbers by part: `stem`, `embeddings`, `blocks` (all of them), `head` (with the last norm)."""
    d, m = config.width, config.mlp_width
    block = 2 * 2 * d  # norms
    block += 3 * d * d + 3 * d * config.qkv_bias + d * d + d  # qkv and out
    block += d * m + m + m * d + d  # up and down
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
        total += 9 * channels * width + 2 * width  # no bias, batch norm's two
        channels = width
    return total + channels * config.width + config.width


def forward_flops(config: ViTConfig, batch: int = 1) -> int:
    """FLOPs of one forward pass of `batch` samples."""
    return sum(op.count * op.flops for op in operations(config, batch) if op.phase == "forward")


def backward_flops(config: ViTConfig, batch: int = 1) -> int:
    """FLOPs of one backward pass: twice the forward pass, less the gradient of the image, which nobody
    needs.
    """
    return sum(op.count * op.flops for op in operations(config, batch) if op.phase == "backward")


def model_flops_per_sample(config: ViTConfig) -> int:
    """Forward and backward FLOPs of one sample: the numerator of MFU. Nothing recomputed is in it."""
    return forward_flops(config) + backward_flops(config)


def recomputed_flops(config: ViTConfig, batch: int, plan: Plan, *, device: str = "cuda") -> int:
    """FLOPs that the backward pass repeats of the forward pass: HFU counts them, MFU does not.

    Fused attention kernels keep no scores and compute them again.
    """
    return sum(op.count * op.recomputed_flops for op in operations(config, batch, plan, device=device))
