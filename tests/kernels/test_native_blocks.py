"""Whole blocks with weights in int8 in C++ on CPUs, beside the blocks' own modules."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from torch import Tensor, nn

from helpers.native_kernels import changed_terms_are_seen
from penstock.config.stack import Stack
from penstock.kernels import native_blocks
from penstock.kernels.attention import Scores, plain_attention
from penstock.kernels.bias_activation import ACTIVATION_CODES, apply_activation
from penstock.kernels.documents import Documents
from penstock.kernels.native_blocks import attend_samples, computes_blocks
from penstock.models.block import Block
from penstock.models.inputs import Context
from penstock.models.rounded import RoundedWeight, round_rows
from penstock.models.wrap import find
from penstock.products.blocks import OneCall, join_blocks
from penstock.products.integers import Int8
from penstock.products.rounded import stored_form

needs_blocks = pytest.mark.skipif(
    not computes_blocks(), reason="the kernel is made of instructions of AVX512-VNNI, by a C++ compiler"
)
SAMPLES = ((197,), (1, 16, 5), (30, 31, 60, 2), (130, 3))
"""Tokens of samples: parts of queries and vectors of keys that are full and are not."""


def _attended(qkv: Tensor, width: int, lengths: tuple[int, ...], scale: float | None) -> Tensor:
    """The same by the reference, in fp64, without rows behind the last sample."""
    parts = []
    for sample in torch.split(qkv[: sum(lengths)].double(), lengths):
        q, k, v = sample.view(1, len(sample), -1, 3, width).permute(3, 0, 2, 1, 4)
        mixed = plain_attention(q, k, v, Scores(scale=scale))
        parts.append(mixed[0].transpose(0, 1).flatten(1))
    return torch.cat(parts).float()


def _hold_attention() -> None:
    torch.manual_seed(0)
    for lengths in SAMPLES:
        for heads, width, scale, rest in ((2, 64, None, 0), (3, 16, 0.5, 4)):
            qkv = torch.randn(sum(lengths) + rest, heads * 3 * width)
            mixed = attend_samples(qkv, width, lengths, scale)
            torch.testing.assert_close(mixed[: sum(lengths)], _attended(qkv, width, lengths, scale))
            assert not mixed[sum(lengths) :].any()


@needs_blocks
def test_attention_is_that_of_each_sample_alone() -> None:
    _hold_attention()


@needs_blocks
def test_scores_may_be_as_large_as_numbers_are_and_nan_stays() -> None:
    torch.manual_seed(0)
    qkv = torch.randn(20, 2 * 3 * 16)
    qkv[:7] *= 1e4
    mixed = attend_samples(qkv, 16, (7, 13))
    torch.testing.assert_close(mixed, _attended(qkv, 16, (7, 13), None))
    qkv[8, 3] = math.nan  # a query of the first head of the second sample
    seen = attend_samples(qkv, 16, (7, 13))
    assert seen[8, :16].isnan().all()
    seen[8, :16] = mixed[8, :16]
    assert torch.equal(seen, mixed)


def _activated(x: Tensor, name: str) -> Tensor:
    made = x.clone()
    kernel = native_blocks.library("blocks").penstock_activate  # type: ignore[union-attr]
    kernel(ACTIVATION_CODES[name], ctypes.c_void_p(made.data_ptr()), ctypes.c_int64(made.numel()))
    return made


def _hold_activations() -> None:
    x = torch.cat([torch.linspace(-9, 9, 20_001), torch.tensor([0.0, 1e-30, -1e-30, 90.0, -90.0, 3e4, -3e4])])
    for name in ACTIVATION_CODES:
        made = _activated(x, name)
        torch.testing.assert_close(made, apply_activation(x.double(), name).float(), msg=name)
        assert _activated(torch.full((3,), math.nan), name).isnan().all(), name


@needs_blocks
def test_activations_are_those_of_torch_in_fp64() -> None:
    _hold_activations()


def _int8(linear: nn.Linear, kind: str) -> nn.Module:
    if kind in ("range", "factors"):
        return Int8(linear, torch.rand(linear.in_features) + 0.5 if kind == "factors" else None)
    rounded = round_rows(linear.weight)
    scale = torch.tensor(0.03) if kind == "static" else None
    return stored_form(linear, "int8", RoundedWeight(rounded.numbers, rounded.scales, input_scale=scale))


def _block(sizes: Stack, kind: str) -> Block:
    torch.manual_seed(0)
    block = Block(sizes, sizes.layers[0]).eval()
    for module in block.modules():
        for parameter in module.parameters(recurse=False):
            nn.init.normal_(parameter, std=0.3)
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):
            nn.init.normal_(module.weight, 1.0, 0.2)
    attention, mlp = block.attention, block.mlp
    attention.qkv, attention.out = _int8(attention.qkv, kind), _int8(attention.out, kind)  # type: ignore[assignment]
    mlp.up, mlp.down = _int8(mlp.up, kind), _int8(mlp.down, kind)  # type: ignore[assignment,union-attr,arg-type]
    return block


_SMALL = {"width": 48, "depth": 1, "heads": 3, "mlp_width": 100}
STACKS = {
    "pre": Stack(**_SMALL),
    "post": Stack(**_SMALL, norm_first=False, norm_eps=1e-12),
    "rms": Stack(**_SMALL, norm="rms", bias=False, qkv_bias=False, mlp="silu", norm_eps=0.3),
    "no first norm": Stack(**_SMALL, first_norm=False, norm_bias=False, mlp="gelu_tanh"),
    "narrow heads": Stack(**_SMALL, head_features=32, attention_scale=0.5, mlp="relu"),
    "quick": Stack(**_SMALL, mlp="gelu_quick"),
}  # fmt: skip
LENGTHS = (20, 31, 7, 25, 40)


def _hold_blocks() -> None:
    for name, sizes in STACKS.items():
        for kind in ("static", "token", "range", "factors"):
            block = _block(sizes, kind)
            assert join_blocks(block) == 1, name
            joined = find(block, OneCall)
            assert joined is not None
            samples = torch.randn(4, 30, 48)
            behind = torch.randn(1, sum(LENGTHS) + 3, 48)
            packed = Context(mask=Documents([[*LENGTHS]], causal=False))
            with torch.inference_mode():
                for x, context in ((samples, Context()), (behind, packed)):
                    whole = joined.computed(x, context)
                    assert whole is not None, name
                    assert torch.equal(block(x, context), whole)
                    apart = joined.forward(x, context)
                    real = sum(LENGTHS) if x is behind else None
                    off = (whole - apart)[:, :real].abs()
                    # Where norms and softmax round otherwise, a number halfway between two of 8 bits may become the
                    # other: one element by a step, and its sample by what it sees of it.
                    assert off.median() < 2e-6, (name, kind, off.median())
                    assert off.max() < 0.2, (name, kind, off.max())
                    assert float((off < 1e-4).float().mean()) > 0.7, (name, kind)


@needs_blocks
def test_a_block_in_one_call_is_that_of_its_modules() -> None:
    _hold_blocks()


@needs_blocks
@pytest.mark.parametrize("name", STACKS)
def test_a_sample_depends_neither_on_others_nor_on_threads(name: str) -> None:
    block = _block(STACKS[name], "static")
    join_blocks(block)
    x = torch.randn(1, sum(LENGTHS), 48)
    packed = Context(mask=Documents([[*LENGTHS]], causal=False))
    before = torch.get_num_threads()
    with torch.inference_mode():
        whole = block(x, packed)
        try:
            torch.set_num_threads(2)
            many = torch.cat([x] * 40, 1)
            several = block(many, Context(mask=Documents([[*LENGTHS] * 40], causal=False)))
        finally:
            torch.set_num_threads(before)
        assert torch.equal(several, torch.cat([whole] * 40, 1))
        begin = 0
        for length in LENGTHS:
            part = slice(begin, begin + length)
            assert torch.equal(block(x[:, part]), whole[:, part])
            begin += length


MUTANTS = (
    ("_mm512_fmsub_ps(_mm512_loadu_ps(of + j), factor, top)", "_mm512_loadu_ps(of + j)"),
    ("_mm512_maskz_mov_ps(first_lanes(n - j), power)", "power"),
    ("begin = sample ? ends[sample - 1] : 0", "begin = sample ? ends[0] : 0"),
    ("std::memset(out + last * heads * width, 0,", "std::memset(out + last * heads * width, 1,"),
    ("_mm512_set1_ps(inverse[r])", "_mm512_set1_ps(inverse[0])"),
    ("terms[0][INTERVALS - 1] = 1.0f", "terms[0][INTERVALS - 1] = 0.9999f"),
    ("sums[0] = slopes[k] - at[k] * sums[0]", "sums[0] = slopes[k]"),
    ("values[i] *= share", "values[i] = share"),
    ("values[i] += more[i]", "values[i] = more[i]"),
    ("first = b.norm_first ? b.first : none", "first = b.first"),
    ("second = b.norm_first ? b.second : none", "second = b.second"),
    ("norm_in_place(b.first, u, rows, n, threads)", "norm_in_place(b.second, u, rows, n, threads)"),
    ("last[i] * factors[i]", "last[i]"),
    ("norm.weight ? out : from", "from"),
    ("here, y + begin * n, adding(from, n)", "here, y + begin * n, adding(x, n)"),
    ("square / n + eps", "square / n"),
    ("_mm512_set1_ps(2.12194440e-4f)", "_mm512_set1_ps(0.0f)"),
)  # fmt: skip
"""Changes of one term of the kernel, each of which the tests above see."""


def _hold() -> None:
    _hold_attention()
    _hold_activations()
    _hold_blocks()


test_a_changed_term_is_seen = changed_terms_are_seen("blocks", MUTANTS, [native_blocks], _hold, needs_blocks)
