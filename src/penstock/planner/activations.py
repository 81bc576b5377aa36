"""The bytes that autograd keeps between the forward and the backward pass, from the configuration alone.

Counted as eager PyTorch keeps them: every distinct block of memory once, without parameters and without the
images themselves, which are the caller's. Compilation and recomputation keep less.

Shapes: B samples, N tokens, T = B·N rows, D width, M MLP width, H heads, K features per head.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.model import ViTConfig
from penstock.config.plan import Plan
from penstock.planner.operations import attention_form, conv_widths


@dataclass(frozen=True, slots=True)
class _Widths:
    """Bytes of one number: in the residual stream, into matrix products, of norm statistics, of dropout
    masks.
    """

    stream: int
    compute: int
    statistic: int
    mask: int
    cast: int
    """Of the copies of weights that autocast keeps; 0 without autocast."""

    @classmethod
    def of(cls, plan: Plan, device: str) -> _Widths:
        stream = 2 if plan.precision in ("O2", "O3") else 4
        compute = 4 if plan.precision == "O0" else 2
        on_cpu = device == "cpu"
        return cls(
            stream=stream,
            compute=compute,
            # On a CPU statistics take the type of the norm's weight; CUDA always keeps them in fp32.
            statistic=stream if on_cpu else 4,
            # On a CPU a dropout mask is a tensor of factors, in the type of its input; CUDA keeps booleans.
            mask=compute if on_cpu else 1,
            cast=2 if plan.precision == "O1" else 0,
        )


def activation_bytes(config: ViTConfig, batch: int, plan: Plan, *, device: str = "cuda") -> int:
    """Bytes kept for the backward pass of `batch` samples, at their most: when the forward pass ends."""
    return sum(activation_parts(config, batch, plan, device=device).values())


def activation_parts(config: ViTConfig, batch: int, plan: Plan, *, device: str = "cuda") -> dict[str, int]:
    """`activation_bytes` by part; `blocks` parts are of all blocks together.

    `cast_weights` are the half-precision copies of weights that autocast makes once a step, whatever the
    batch.
    """
    widths = _Widths.of(plan, device)
    rows = batch * config.tokens
    block = {
        "norms": 2 * rows * (config.width * widths.stream + 2 * widths.statistic),
        "attention": _attention(config, rows, plan, widths, device),
        "mlp": _mlp(config, rows, widths),
        "branches": 2 * _branch(config, batch, rows, widths),
    }
    return {
        "stem": _stem(config, batch, plan, widths),
        **{part: config.depth * size for part, size in block.items()},
        "head": _head(config, batch, widths),
        "cast_weights": _cast_weights(config) * widths.cast,
    }


def working_bytes(config: ViTConfig, batch: int, plan: Plan, *, device: str = "cuda") -> int:
    """Bytes that the last block's MLP needs on top of what is kept, when its backward pass begins.

    The gradient of the residual stream and that of the hidden features, the place of whose activation was just freed
    and taken again, and the gradients of the head's and the MLP's last weights.
    """
    widths = _Widths.of(plan, device)
    rows = batch * config.tokens
    passing = rows * (config.width * widths.stream + config.mlp_width * widths.compute)
    standing = plan.optimizer == "contiguous" or plan.accumulate > 1
    weights = config.width * config.mlp_width + (0 if standing else config.width * config.classes)
    return passing + weights * (2 if plan.precision in ("O2", "O3") else 4)


def _attention(config: ViTConfig, rows: int, plan: Plan, widths: _Widths, device: str) -> int:
    d, c = config.width, widths.compute
    form = attention_form(plan, config.tokens, device)
    copies = plan.layout == "batch_first"
    scores = rows * config.heads * config.tokens
    kept = rows * d * c  # the normalised rows that go into qkv
    kept += rows * d * c  # what goes into the output projection
    if config.qk_norm:
        # The packed projection stays for its norms.
        kept += 3 * rows * d * c + 2 * 2 * rows * config.heads * widths.statistic
    if form == "math":
        # The math kernel computes in fp32 on copies of q and k, scaled, and of v unless it is fp32 in place.
        kept += 2 * rows * d * 4 + scores * 4
        if c != 4 or copies:
            kept += rows * d * 4
        elif not config.qk_norm:
            kept += 3 * rows * d * c
        return kept
    if config.qk_norm:
        kept += 2 * rows * d * c  # the normalised q and k
        kept += rows * d * c if form == "plain" and copies else 0  # v, copied out of the packed projection
    else:
        kept += 3 * rows * d * c
    if form == "plain":
        kept += scores * c
    else:
        kept += rows * config.heads * 4  # log-sum-exp of each row of scores
    return kept


def _mlp(config: ViTConfig, rows: int, widths: _Widths) -> int:
    d, m, c = config.width, config.mlp_width, widths.compute
    kept = rows * d * c + 2 * rows * m * c  # into up, into the activation, into down
    return kept + (rows * m * widths.mask if config.dropout else 0)


def _branch(config: ViTConfig, batch: int, rows: int, widths: _Widths) -> int:
    size = rows * config.width
    kept = size * widths.mask if config.dropout else 0
    if config.layer_scale is not None:
        kept += size * widths.compute
    if config.drop_path:
        # One factor per sample, in the type of the branch: LayerScale widens it to the stream's.
        kept += batch * (widths.compute if config.layer_scale is None else widths.stream)
    return kept


def _stem(config: ViTConfig, batch: int, plan: Plan, widths: _Widths) -> int:
    rows, c = batch * config.patches, widths.compute
    if config.stem == "patchify":
        kept = rows * config.channels * config.patch_size**2 * c
    else:
        # Autocast copies the images; else they are the caller's.
        kept = batch * config.channels * config.image_size**2 * widths.cast
        side, width = config.image_size, 0
        for width in conv_widths(config):
            side //= 2
            kept += 2 * batch * side * side * width * c  # into the norm, and out of the ReLU
            kept += 2 * width * (2 if plan.precision == "O3" else 4)
        kept += rows * width * c
    if config.dropout:
        # In the stream's type on a CPU, where masks take the type of what they mask.
        kept += batch * config.tokens * config.width * (widths.stream if widths.mask > 1 else 1)
    return kept


def _head(config: ViTConfig, batch: int, widths: _Widths) -> int:
    every_token = config.classifier == "pooled" and config.pool_norm == "before"
    normed = batch * (config.tokens if every_token else 1)
    kept = normed * (config.width * widths.stream + 2 * widths.statistic)
    return kept + batch * config.width * widths.compute


def _cast_weights(config: ViTConfig) -> int:
    """Weights whose half-precision copy autograd keeps: of all products whose input's gradient is wanted."""
    d, m = config.width, config.mlp_width
    total = config.depth * (4 * d * d + 2 * d * m) + d * config.classes
    if config.stem == "conv":
        widths = conv_widths(config)
        total += sum(9 * a * b for a, b in zip([config.channels, *widths], widths))
        total += widths[-1] * d
    return total
