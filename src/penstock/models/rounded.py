"""Quantised weights of linears, in 8 or 4 bits, as stored in a folder: integers, and scales that turn them into values.

    value[n, k] = numbers[n, k] · scales[n, g] + offsets[n, g],    g = ⌊k · G / K⌋

Shapes: N outputs, K inputs, G groups of inputs that share a scale; weights of experts have a first dimension of
experts.

A linear NAME is stored as `NAME.weight`, int8 (N, K), or for 4 bits uint8 (N, K/2), the first of two numbers in the low
half of a byte; `NAME.weight_scale` and for 4 bits `NAME.weight_offset`, fp32 (N, G); and, if one scale for all its
inputs was measured, `NAME.input_scale`, fp32. Numbers range from −127 to 127 without offsets, and from 0 to 15 with. An
offset is a multiple of its scale, so that one of the numbers represents zero.

The layout of compressed-tensors (`penstock.models.convert.compressed_tensors`) is read as well: there `input_scale` is
(1,), and `NAME.weight_packed` holds numbers in int32.

MXFP4 is read too (OCP, 2023, "Microscaling Formats", section 5.3). gpt-oss stores its experts in it, (E, K, N), as
`NAME_blocks`, uint8 (E, N, G, 16), and `NAME_scales`, uint8 (E, N, G): each block is 32 numbers of 4 bits, the first of
two in the low half of a byte, times 2^(scale − 127).

fp8 in blocks, DeepSeek-V3's format, is read too: `NAME.weight`, e4m3 (N, K), and `NAME.weight_scale_inv`, fp32
(⌈N/128⌉, ⌈K/128⌉), the factor of each block's numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.config.formats import FORMATS
from penstock.errors import CheckpointError, ConfigError
from penstock.kernels.frozen_linear import unpacked_numbers

MOST = 127
"""The largest number of int8 that is used; −128 would have no opposite."""
CLIP = "log_clip"
"""Name of a linear's parameter (1,) in training: log₂ of the input value that 127 represents. So a step changes small
and large clips by the same factor (Jain et al., "Trained Quantization Thresholds", MLSys 2020, section 3.3)."""
_SCALE, _OFFSET, _INPUT = ".weight_scale", ".weight_offset", ".input_scale"
_PACKED, _ZERO, _SHAPE = ".weight_packed", ".weight_zero_point", ".weight_shape"
LEAST = 2.0**-100
"""Lower bound of the magnitude for which a scale is computed, so that scales and their inverses are normal fp32
numbers."""


@dataclass(frozen=True, slots=True)
class RoundedWeight:
    """The quantised weight of one linear."""

    numbers: Tensor
    """int8 (…, N, K)."""
    scales: Tensor
    """fp32 (…, N, G)."""
    offsets: Tensor | None = None
    """fp32 (…, N, G), for weights in 4 bits."""
    input_scale: Tensor | None = None
    """fp32 scalar: the value of 1 in 8-bit inputs; None if each row of inputs has a scale of its own."""

    def values(self) -> Tensor:
        """The weight that the numbers represent, fp32 (…, N, K)."""
        groups = _grouped(self.numbers.float(), self.scales) * self.scales[..., None]
        return (groups if self.offsets is None else groups + self.offsets[..., None]).flatten(-2)

    def part(self, number: int) -> RoundedWeight:
        """The weight of one expert of several."""
        offsets = None if self.offsets is None else self.offsets[number]
        return RoundedWeight(self.numbers[number], self.scales[number], offsets, self.input_scale)

    def stored(self, name: str) -> dict[str, Tensor]:
        """The tensors that a folder holds for the linear of this name."""
        numbers = self.numbers
        if self.offsets is not None:
            pairs = numbers.to(torch.uint8).unflatten(-1, (-1, 2))  # type: ignore[no-untyped-call]
            numbers = pairs[..., 0] | (pairs[..., 1] << 4)
        parts = {_SCALE: self.scales, _OFFSET: self.offsets, _INPUT: self.input_scale}
        return {
            f"{name}.weight": numbers,
            **{name + end: part for end, part in parts.items() if part is not None},
        }


def _grouped(weight: Tensor, scales: Tensor) -> Tensor:
    """A matrix (…, N, K) by groups of inputs, (…, N, G, K/G)."""
    return weight.unflatten(-1, (scales.shape[-1], -1))  # type: ignore[no-any-return, no-untyped-call]


def nearest(weight: Tensor, scales: Tensor, offsets: Tensor | None = None) -> RoundedWeight:
    """A weight (…, N, K) rounded to the nearest numbers for these scales."""
    groups = _grouped(weight.detach().float(), scales)
    low, high = (-MOST, MOST) if offsets is None else (0, 15)
    moved = groups if offsets is None else groups - offsets[..., None]
    numbers = (moved / scales[..., None]).round().clamp(low, high).to(torch.int8).flatten(-2)
    return RoundedWeight(numbers, scales, offsets)


def sizes_along(x: Tensor, dim: int) -> Tensor:
    """The largest magnitude along `dim` of an fp32 tensor, at least `LEAST`; `dim` keeps size 1."""
    return x.abs().amax(dim, keepdim=True).clamp(min=LEAST)


def in_levels(x: Tensor, sizes: Tensor) -> Tensor:
    """x scaled so that `sizes` become 127, not yet rounded. Used both in training and for storage."""
    return x * (MOST / sizes)


def round_rows(weight: Tensor, clip: Tensor | float = 1.0) -> RoundedWeight:
    """A weight (…, N, K) in int8 with a scale for each output; 127 represents its largest magnitude times `clip`,
    (…, N) or one number."""
    wide = weight.detach().float()
    share = clip[..., None] if isinstance(clip, Tensor) else clip
    sizes = (sizes_along(wide, -1) * share).clamp(min=LEAST)
    numbers = in_levels(wide, sizes).round().clamp(-MOST, MOST).to(torch.int8)
    return RoundedWeight(numbers, sizes / MOST)


def input_scale_of(clip: Tensor) -> Tensor:
    """The value of 1 in quantised inputs with a learned `clip` (1,): fp32 (1,)."""
    return clip.float().exp2() / MOST


def clip_of(input_scale: Tensor) -> Tensor:
    """The clip (1,) with which 1 in quantised inputs has this value."""
    return (input_scale.reshape(1) * MOST).log2()


def without_clips(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A state dict split into all but the learned clips, and the clips by their names."""
    clips = {name: value for name, value in state.items() if name.rpartition(".")[2] == CLIP}
    return {name: value for name, value in state.items() if name not in clips}, clips


def rounded_by_clips(state: Mapping[str, Tensor]) -> dict[str, RoundedWeight]:
    """The weights of the linears with learned clips in a state dict, by name, quantised as in training: with a scale
    for each output, and one for the inputs."""
    return {
        name: replace(round_rows(state[f"{name}.weight"]), input_scale=input_scale_of(clip).cpu()[0])
        for name, clip in (
            (key.removesuffix(f".{CLIP}"), clip) for key, clip in without_clips(state)[1].items()
        )
    }


def round_groups(weight: Tensor, clip: Tensor | float = 1.0) -> RoundedWeight:
    """A weight (…, N, K) in 4 bits with a scale and an offset for each group of inputs; the 16 numbers cover a group's
    range times `clip`, (…, N, G) or one number."""
    groups = weight.detach().float().unflatten(-1, (-1, FORMATS["int4"].group))  # type: ignore[no-untyped-call]
    # One of the numbers is zero, as other programs require; one end of the range is then off by at most half a scale.
    low, high = groups.amin(-1).clamp(max=0.0), groups.amax(-1).clamp(min=0.0)
    scales = ((high - low) * clip / 15).clamp(min=1e-6)
    zeros = (7.5 - (low + high) / (2 * scales)).round().clamp(0, 15)
    return nearest(weight, scales, -zeros * scales)


def zero_points(name: str, weight: RoundedWeight) -> Tensor:
    """The zero points of a weight in 4 bits, int8 (…, N, G). Raises ConfigError if it has none, because an older
    version wrote it."""
    assert weight.offsets is not None
    exact = -weight.offsets / weight.scales
    zeros = exact.round()
    if bool(((exact - zeros).abs() > 1e-3).any()) or bool((zeros.clamp(0, 15) != zeros).any()):
        raise ConfigError(
            f"{name} is in 4 bits without a number for zero, as an older version of Penstock rounded; quantise the "
            "original model again."
        )
    return zeros.to(torch.int8)


def packed_words(numbers: Tensor, bits: int) -> Tensor:
    """Unsigned numbers (…, K) of 4 or 8 bits, packed in int32 (…, ⌈K · bits / 32⌉), the first in the lowest bits."""
    each = 32 // bits
    words: Tensor = F.pad(numbers.to(torch.int64), (0, -numbers.shape[-1] % each)).unflatten(-1, (-1, each))  # type: ignore[no-untyped-call]
    return (words << torch.arange(0, 32, bits)).sum(-1).to(torch.int32)


def unpacked_words(words: Tensor, bits: int, count: int) -> Tensor:
    """The inverse of `packed_words`: words (…, W) to their first `count` numbers, int16 (…, K)."""
    shifts = torch.arange(0, 32, bits, device=words.device)
    numbers = (words[..., None] >> shifts) & ((1 << bits) - 1)
    return numbers.flatten(-2)[..., :count].to(torch.int16)


def rounded_in(state: Mapping[str, Tensor]) -> dict[str, RoundedWeight]:
    """The quantised weights in a state dict, by the names of their linears; tensors may be on the meta device. Raises
    CheckpointError if the tensors of a linear do not match.
    """
    rounded = {}
    for name in (key.removesuffix(_SCALE) for key in state if key.endswith(_SCALE)):
        if name + _PACKED in state:
            rounded[name] = _unpacked(state, name)
            continue
        numbers, scales = state.get(f"{name}.weight"), state[name + _SCALE]
        offsets, one = state.get(name + _OFFSET), state.get(name + _INPUT)
        one = one[0] if one is not None and one.shape == (1,) else one
        whole = torch.int8 if offsets is None else torch.uint8
        if numbers is None or numbers.dtype != whole or numbers.ndim < 2:
            raise CheckpointError(f"{name}.weight has scales, but is not a matrix of {whole}. {_REMEDY}")
        inputs = numbers.shape[-1] * (1 if offsets is None else 2)
        fits = scales.shape[:-1] == numbers.shape[:-1] and scales.shape[-1] and inputs % scales.shape[-1] == 0
        fits = fits and (offsets is None or offsets.shape == scales.shape)
        if not fits or (one is not None and one.ndim):
            raise CheckpointError(
                f"{name}{_SCALE} is {tuple(scales.shape)}, which does not go with numbers of "
                f"{tuple(numbers.shape)} or with the other scales. {_REMEDY}"
            )
        if any(not part.is_floating_point() for part in (scales, offsets, one) if part is not None):
            raise CheckpointError(f"{name} has scales that are not floating-point numbers. {_REMEDY}")
        if offsets is not None:
            numbers = unpacked_numbers(numbers, torch.int8)
        rounded[name] = RoundedWeight(
            numbers, scales.float(), None if offsets is None else offsets.float(),
            None if one is None else one.float(),
        )  # fmt: skip
    return rounded


_REMEDY = "Fetch or write the folder again."


def _unpacked(state: Mapping[str, Tensor], name: str) -> RoundedWeight:
    """A weight packed by compressed-tensors: in 4 bits if there are zero points, else in 8."""
    words, scales = state[name + _PACKED], state[name + _SCALE]
    zeros, shape = state.get(name + _ZERO), state.get(name + _SHAPE)
    bits = 8 if zeros is None else 4
    fits = words.ndim == scales.ndim == 2 and scales.is_floating_point() and words.dtype == torch.int32
    outputs, inputs = (words.shape[0], words.shape[1] * 32 // bits) if fits else (0, 0)
    fits = fits and scales.shape[0] == outputs and scales.shape[1] > 0 and inputs % scales.shape[1] == 0
    if zeros is not None:
        fits = fits and (zeros.dtype, *zeros.shape) == (torch.int32, -(-outputs // 8), scales.shape[1])
    if not fits:
        raise CheckpointError(f"{name}{_PACKED} does not go with its scales and zero points. {_REMEDY}")
    if shape is not None and not shape.is_meta and shape.tolist() != [outputs, inputs]:
        raise CheckpointError(
            f"{name}{_PACKED} holds {outputs} × {inputs} numbers of {bits} bits, but {name}{_SHAPE} says "
            f"{shape.tolist()}. {_REMEDY}"
        )
    numbers, scales = unpacked_words(words, bits, inputs), scales.float()
    if zeros is None:
        return RoundedWeight((numbers - 128).to(torch.int8), scales)
    offsets = -unpacked_words(zeros.t(), 4, outputs).t().float() * scales
    return RoundedWeight(numbers.to(torch.int8), scales, offsets)


_FOUR_BITS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of MXFP4's codes: a sign, two bits of exponent, one of mantissa."""


def _of_blocks(name: str, blocks: Tensor, scales: Tensor) -> Tensor:
    """The weight (E, K, N) of tensors stored in MXFP4, in bf16, which represents each value exactly."""
    fits = blocks.dtype == scales.dtype == torch.uint8 and blocks.shape == (*scales.shape, 16)
    if not fits or scales.ndim != 3:
        raise CheckpointError(
            f"{name}_blocks {tuple(blocks.shape)} does not go with {name}_scales {tuple(scales.shape)}: MXFP4 has a "
            f"scale for each 16 bytes. {_REMEDY}"
        )
    experts, outputs, groups = scales.shape
    made = torch.empty(experts, outputs, groups, 32, dtype=torch.bfloat16, device=blocks.device)
    if not made.is_meta:
        pairs = [(_FOUR_BITS[byte & 15], _FOUR_BITS[byte >> 4]) for byte in range(256)]
        table = torch.tensor(pairs, dtype=torch.bfloat16).view(torch.int32).squeeze(1).to(blocks.device)
        powers = torch.ldexp(torch.ones(256), torch.arange(256) - 127).to(made)
        for expert, (own, scale) in enumerate(zip(blocks, scales)):
            values = table.index_select(0, own.flatten().int()).view(torch.bfloat16)
            torch.mul(values.view(made[expert].shape), powers[scale.int()][..., None], out=made[expert])
    return made.flatten(2).mT


_BLOCK = 128
"""Rows, and columns, of a block of fp8 numbers that share a scale."""
_BLOCK_SCALE = ".weight_scale_inv"


def _of_fp8(name: str, numbers: Tensor, scales: Tensor) -> Tensor:
    """The weight (N, K), in bf16, of tensors stored in fp8 with a scale for each block."""
    if numbers.dtype != torch.float8_e4m3fn or scales.shape != tuple(-(-n // _BLOCK) for n in numbers.shape):
        raise CheckpointError(
            f"{name}.weight, {numbers.dtype} {tuple(numbers.shape)}, does not go with {name}{_BLOCK_SCALE} "
            f"{tuple(scales.shape)}: there is a scale for each {_BLOCK} × {_BLOCK} numbers of fp8. {_REMEDY}"
        )
    spread = scales.float().repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)
    return (numbers.float() * spread[: numbers.shape[0], : numbers.shape[1]]).bfloat16()


def plain_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict with quantised weights replaced by their values, in fp32, or bf16 for MXFP4 and fp8. Raises as
    `rounded_in`."""
    plain = dict(state)
    for name in (key.removesuffix(_BLOCK_SCALE) for key in state if key.endswith(_BLOCK_SCALE)):
        if f"{name}.weight" in state:
            scales = plain.pop(name + _BLOCK_SCALE)
            plain[f"{name}.weight"] = _of_fp8(name, state[f"{name}.weight"], scales)
    for name in (key.removesuffix("_blocks") for key in state if key.endswith("_blocks")):
        if f"{name}_scales" in state:
            plain[name] = _of_blocks(name, plain.pop(f"{name}_blocks"), plain.pop(f"{name}_scales"))
    for name, weight in rounded_in(state).items():
        for end in (_SCALE, _OFFSET, _INPUT, _PACKED, _ZERO, _SHAPE):
            plain.pop(name + end, None)
        plain[f"{name}.weight"] = weight.values()
    return plain
