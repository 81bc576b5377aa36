"""Loss and gradient of rows of logits, in place: see penstock/kernels/logit_rows.py for what it computes.

A program handles one row. It reads the row once for the largest logit, the sum of exponentials relative to it and the
other terms of the loss, and again, by then from the cache, to overwrite it with the gradient. An ignored row is not
read at all.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.common import exponential, narrow, on, power_above

IGNORED = tl.constexpr(-100)
_NONE = tl.constexpr(float("-inf"))
BLOCK = 8192
WARPS = 8
TAUGHT_SHARE = 2
"""Factor by which spans are shorter with a teacher, whose sums take registers."""


@triton.jit
def _finite(value):  # type: ignore[no-untyped-def]
    """The value to subtract before exponentials: 0 for a span with nothing but −∞, which would give NaN."""
    return tl.where(value == _NONE, 0.0, value)


@triton.jit  # type: ignore[untyped-decorator]
def logit_rows_kernel(  # type: ignore[no-untyped-def]
    logits,  # (R, V), rows `stride` apart
    targets,  # (R,) int64
    taught,  # (R, V), rows `taught_stride` apart: a teacher's logits
    row_weights,  # (R,)
    losses,  # (R,) fp32
    sums,  # (R,) fp32: log Σ exp
    stride,
    taught_stride,
    columns,  # V
    smoothing,
    z_loss,
    share,  # of the divergence in the loss
    temperature,
    scale,
    SMOOTHS: tl.constexpr,  # without smoothing, logits are not summed: −∞ would make the sum infinite
    TAUGHT: tl.constexpr,
    WEIGHED: tl.constexpr,
    WRITES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    line = logits + row * stride
    teacher = taught + row * taught_stride
    lane = tl.arange(0, BLOCK)
    kind: tl.constexpr = logits.dtype.element_ty
    if target == IGNORED:
        tl.store(losses + row, 0.0)
        tl.store(sums + row, 0.0)
        if WRITES:
            for first in range(0, columns, BLOCK):
                tl.store(
                    line + first + lane, narrow(tl.zeros([BLOCK], tl.float32), kind), first + lane < columns
                )
    else:  # a target that is no column makes the loss NaN
        # Each lane has its own sum, so that the loop's only barrier is for the maximum.
        most, most_cool, most_taught = float("-inf"), float("-inf"), float("-inf")
        total = tl.zeros([BLOCK], tl.float32)
        cool = tl.zeros([BLOCK], tl.float32)  # at the temperature
        warm = tl.zeros([BLOCK], tl.float32)  # of the teacher
        drift = tl.zeros([BLOCK], tl.float32)
        added = tl.zeros([BLOCK], tl.float32)
        within = (target >= 0) & (target < columns)
        of_target = tl.load(line + target, within, other=float("nan")).to(tl.float32)
        for first in range(0, columns, BLOCK):
            real = first + lane < columns
            value = tl.load(line + first + lane, real, other=_NONE).to(tl.float32)
            new = tl.maximum(most, tl.max(value, 0))
            total = total * exponential(_finite(most) - _finite(new)) + exponential(value - _finite(new))
            most = new
            if SMOOTHS:
                added += tl.where(real, value, 0.0)
            if TAUGHT:
                value = value / temperature
                meant = tl.load(teacher + first + lane, real, other=_NONE).to(tl.float32) / temperature
                new = tl.maximum(most_cool, tl.max(value, 0))
                cool = cool * exponential(_finite(most_cool) - _finite(new))
                cool += exponential(value - _finite(new))
                most_cool = new
                new = tl.maximum(most_taught, tl.max(meant, 0))
                weight = exponential(meant - _finite(new))
                fading = exponential(_finite(most_taught) - _finite(new))
                warm = warm * fading + weight
                drift = drift * fading + tl.where(weight > 0.0, weight * (meant - value), 0.0)
                most_taught = new
        log_sum = _finite(most) + tl.log(tl.sum(total, 0))
        loss = log_sum - (1.0 - smoothing) * of_target
        if SMOOTHS:
            loss -= smoothing / columns * tl.sum(added, 0)
        loss += z_loss * log_sum * log_sum
        if TAUGHT:
            cool_sum = _finite(most_cool) + tl.log(tl.sum(cool, 0))
            taught_total = tl.sum(warm, 0)
            taught_sum = _finite(most_taught) + tl.log(taught_total)
            divergence = tl.sum(drift, 0) / taught_total - taught_sum + cool_sum
            loss = (1.0 - share) * loss + share * temperature * temperature * divergence
        tl.store(losses + row, loss)
        tl.store(sums + row, log_sum)
        if WRITES:
            factor = scale
            if WEIGHED:
                factor = factor * tl.load(row_weights + row).to(tl.float32)
            for first in range(0, columns, BLOCK):
                at = first + lane
                real = at < columns
                value = tl.load(line + at, real, other=_NONE).to(tl.float32)
                grad = exponential(value - log_sum) * (1.0 + 2.0 * z_loss * log_sum) - smoothing / columns
                grad = tl.where(at == target, grad - (1.0 - smoothing), grad)
                if TAUGHT:
                    meant = tl.load(teacher + at, real, other=_NONE).to(tl.float32)
                    pull = exponential(value / temperature - cool_sum) - exponential(
                        meant / temperature - taught_sum
                    )
                    grad = (1.0 - share) * grad + share * temperature * pull
                tl.store(line + at, narrow(grad * factor, kind), real)


def launch(
    logits: Tensor, targets: Tensor, taught: Tensor | None, row_weights: Tensor | None, smoothing: float,
    z_loss: float, share: float, temperature: float, scale: float, gradient: bool, losses: Tensor, sums: Tensor,
) -> None:  # fmt: skip
    """Fill `losses` and `sums`, and with `gradient` overwrite the logits, whose rows must be contiguous."""
    block = min(BLOCK // (1 if taught is None else TAUGHT_SHARE), max(16, power_above(logits.shape[1])))
    with on(logits):
        logit_rows_kernel[(len(logits),)](
            logits, targets, logits if taught is None else taught, logits if row_weights is None else row_weights,
            losses, sums, logits.stride(0), 0 if taught is None else taught.stride(0), logits.shape[1], smoothing,
            z_loss, share, temperature, scale, SMOOTHS=smoothing != 0.0, TAUGHT=taught is not None,
            WEIGHED=row_weights is not None, WRITES=gradient, BLOCK=block, num_warps=WARPS,
        )  # fmt: skip
