"""AdamW over many tensors in one launch, which reads and writes everything once: fp32 weights and, if present, a
half-precision copy and an average.

Per element it reads 14 to 16 bytes (weight 4, gradient 2 or 4, moments 4 + 4) and writes 12, or 14 with a half copy.
With a half copy, separate operations take 40: the gradient's cast to fp32, the fused update, the copy. An fp32 average
adds 4 read and 4 written, instead of 12 in a separate operation. Unscaling and clipping are one division, and a step
that overflowed writes nothing. 17 FLOPs per element, 3 more for an average.

A program handles BLOCK elements of one tensor. `blocks` says which, and `table` holds the addresses of that tensor's
arrays. Addresses of gradients have a separate table, because only they change from step to step.

Every operation is rounded separately (`enable_fp_fusion=False`, division and square root correctly rounded), so that
the result is the same on every GPU and in the interpreter. The update is limited by memory, not by arithmetic.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.dtypes import HALVES, format_of
from penstock.errors import ConfigError
from penstock.kernels.triton.common import narrow, on

BLOCK = 2048
WARPS = 4
ALIGNMENT = 16
"""Arrays whose address (in bytes) and number of elements are multiples of this are read in vectors."""


@triton.jit  # type: ignore[untyped-decorator]
def _address(table, index, KIND: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    pointer = tl.load(table + index).to(tl.pointer_type(KIND))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit  # type: ignore[untyped-decorator]
def adamw_kernel(  # type: ignore[no-untyped-def]
    table,  # (T, 7) int64: addresses of weight, both moments, step, copy, average; number of elements
    gradients,  # (T,) int64: addresses
    blocks,  # (programs, 2) int32: which tensor, which BLOCK of it
    grad_scale,  # () fp32, read if HAS_SCALE
    found_inf,  # () fp32, read if HAS_FOUND
    decay,  # 1 − lr · weight_decay
    part1,  # 1 − β1
    beta2,
    part2,  # 1 − β2
    eps,
    lr_high,  # lr and log2 β as sums of two fp32: a launch has no fp64 arguments
    lr_low,
    log1_high,
    log1_low,
    log2_high,
    log2_low,
    average_part,  # 1 − decay of the average
    GRADIENT: tl.constexpr,
    COPY: tl.constexpr,  # the type of the copy, or none
    AVERAGES: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_FOUND: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    overflow = 0.0
    if HAS_FOUND:
        overflow = tl.load(found_inf)
    if overflow == 0.0:
        program = tl.program_id(0)
        tensor = tl.load(blocks + 2 * program)
        first = tl.load(blocks + 2 * program + 1).to(tl.int64) * BLOCK
        row = table + tensor * 7
        exp_avgs = _address(row, 1, tl.float32, ALIGNED)
        exp_avg_sqs = _address(row, 2, tl.float32, ALIGNED)
        step = tl.load(tl.load(row + 3).to(tl.pointer_type(tl.float32)))
        at = first + tl.arange(0, BLOCK)
        size = tl.load(row + 6)
        if ALIGNED:
            size = tl.multiple_of(size, 16)
        within = at < size

        # torch computes these on the host in fp64; here the step is known only on the device.
        count = step.to(tl.float64)
        power1 = tl.exp2(count * log1_high + count * log1_low)
        power2 = tl.exp2(count * log2_high + count * log2_low)
        rate = (count - count + lr_high) + lr_low
        step_size = (rate / (1.0 - power1)).to(tl.float32)
        root = tl.sqrt(1.0 - power2).to(tl.float32)

        # bf16 is read as int16 and shifted into place: exact, and right in the interpreter too.
        if GRADIENT == "fp32":
            gradient = tl.load(_address(gradients, tensor, tl.float32, ALIGNED) + at, within, other=0.0)
        elif GRADIENT == "fp16":
            gradient = tl.load(_address(gradients, tensor, tl.float16, ALIGNED) + at, within, other=0.0)
            gradient = gradient.to(tl.float32)
        else:
            high = tl.load(_address(gradients, tensor, tl.int16, ALIGNED) + at, within, other=0)
            gradient = (high.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        if HAS_SCALE:
            gradient = tl.div_rn(gradient, tl.load(grad_scale))
        if MAXIMIZE:
            gradient = -gradient

        weights = _address(row, 0, tl.float32, ALIGNED)
        value = tl.load(weights + at, within, other=0.0)
        exp_avg = tl.load(exp_avgs + at, within, other=0.0)
        exp_avg_sq = tl.load(exp_avg_sqs + at, within, other=0.0)

        value = value * decay
        exp_avg = exp_avg + part1 * (gradient - exp_avg)
        exp_avg_sq = exp_avg_sq * beta2 + part2 * gradient * gradient
        denominator = tl.div_rn(tl.sqrt_rn(exp_avg_sq), root) + eps
        value = value - tl.div_rn(step_size * exp_avg, denominator)

        tl.store(weights + at, value, within)
        if COPY == "bf16":
            tl.store(_address(row, 4, tl.bfloat16, ALIGNED) + at, narrow(value, tl.bfloat16), within)
        elif COPY == "fp16":
            tl.store(_address(row, 4, tl.float16, ALIGNED) + at, value.to(tl.float16), within)
        if AVERAGES:
            averages = _address(row, 5, tl.float32, ALIGNED)
            average = tl.load(averages + at, within, other=0.0)
            tl.store(averages + at, average + average_part * (value - average), within)
        tl.store(exp_avgs + at, exp_avg, within)
        tl.store(exp_avg_sqs + at, exp_avg_sq, within)


Arrays = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
"""Weight, both moments, step, copy and average of one parameter; the step is 0-d, all others are flat and dense (N,).
All parameters of a launch have the same arrays, with the same dtypes."""


def launch(
    arrays: Sequence[Arrays], gradients: Sequence[Tensor], grad_scale: Tensor | None, found_inf: Tensor | None,
    *, maximize: bool, average_part: float, **numbers: float,
) -> None:  # fmt: skip
    """Launch the kernel once per dtype and alignment of gradients, normally once; `step` already counts this step.

    `numbers` are lr, beta1, beta2, eps and weight_decay. Nothing waits for the device: tables of addresses are built on
    the host and sent ahead; the gradients' table is sent again if autograd has allocated new ones.
    """
    kinds: dict[tuple[torch.dtype, bool], list[int]] = {}
    for index, gradient in enumerate(gradients):
        if gradient.dtype not in (torch.float32, *HALVES):
            raise ConfigError(
                f"AdamW in one pass needs bf16, fp16 or fp32 gradients, but got {gradient.dtype}."
            )
        aligned = gradient.numel() % ALIGNMENT == 0 and all(
            array.data_ptr() % ALIGNMENT == 0
            for array in (gradient, *arrays[index][:3], *arrays[index][4:])
            if array is not None
        )
        kinds.setdefault((gradient.dtype, aligned), []).append(index)
    device = gradients[0].device
    *_, copy, average = arrays[0]
    with on(gradients[0]):
        for (dtype, aligned), members in kinds.items():
            blocks, table = _tables([arrays[i] for i in members], device)
            addresses = _on_device(tuple(gradients[i].data_ptr() for i in members), device)
            adamw_kernel[(len(blocks),)](
                table, addresses, blocks, grad_scale if grad_scale is not None else table,
                found_inf if found_inf is not None else table, *_numbers(**numbers), average_part,
                GRADIENT=format_of(dtype), COPY="none" if copy is None else format_of(copy.dtype),
                AVERAGES=average is not None, HAS_SCALE=grad_scale is not None, HAS_FOUND=found_inf is not None,
                MAXIMIZE=maximize, ALIGNED=aligned, BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False,
            )  # fmt: skip


def _numbers(lr: float, beta1: float, beta2: float, eps: float, weight_decay: float) -> tuple[float, ...]:
    # For β = 0 any power is 0, and so is 2^-2000 in fp64.
    logarithms = [math.log2(beta) if beta > 0 else -2000.0 for beta in (beta1, beta2)]
    exact: list[float] = []
    for number in (lr, *logarithms):
        high = torch.tensor(number, dtype=torch.float32).item()
        exact += [high, number - high]
    return (1 - lr * weight_decay, 1 - beta1, beta2, 1 - beta2, eps, *exact)


def _tables(arrays: Sequence[Arrays], device: torch.device) -> tuple[Tensor, Tensor]:
    """The kernel's `blocks` and `table`."""
    sizes = tuple(weight.numel() for weight, *_ in arrays)
    rows = [
        number
        for each, size in zip(arrays, sizes)
        for number in (*(0 if array is None else array.data_ptr() for array in each), size)
    ]
    return _blocks(sizes, device), _on_device(tuple(rows), device)


@functools.lru_cache(maxsize=64)
def _blocks(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    pairs = [(i, n) for i, size in enumerate(sizes) for n in range(-(-size // BLOCK))]
    return _sent(pairs, torch.int32, device)


@functools.lru_cache(maxsize=64)
def _on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """The numbers as int64 on the device, sent again only when they change."""
    return _sent(numbers, torch.int64, device)


def _sent(numbers: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers on the device, sent without waiting."""
    host = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    # torch's allocator does not reuse the pinned memory before the copy has finished.
    return host.to(device, non_blocking=True)
