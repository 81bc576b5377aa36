"""Products of sorted rows with their experts' weights in C++ on CPUs, beside one expert after the other in fp64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from helpers.native_kernels import changed_terms_are_seen
from helpers.operators import assert_close_to_exact
from penstock.cpu import this_cpu
from penstock.errors import ConfigError
from penstock.kernels import native_grouped
from penstock.kernels.native_grouped import grouped_outer, grouped_product, takes_grouped
from penstock.models.expert_linear import ExpertLinear

TYPES = [
    dtype for dtype in (torch.float32, torch.bfloat16) if takes_grouped(torch.empty(0, dtype=dtype), 1, 8, 8)
]
needs_kernels = pytest.mark.skipif(
    not TYPES, reason="the kernels are made of AVX-512 instructions, by a C++ compiler"
)
CASES = {
    # rows of each expert, outputs, inputs
    "one has none, odd sizes": ((5, 0, 13), 22, 38),
    "several blocks of rows": ((601, 3, 0, 1), 66, 130),
    "several panels": ((9, 2), 770, 16),
    "whole tiles": ((24, 48), 64, 32),
    "one number": ((1,), 2, 2),
    "no rows": ((0, 0), 8, 8),
}
PAST = 2
"""Rows past the last end."""


def _loop(x: Tensor, weight: Tensor, counts: tuple[int, ...]) -> Tensor:
    parts = [rows @ one.t() for rows, one in zip(x.split([*counts, PAST]), weight)]
    return torch.cat([*parts, x.new_zeros(PAST, weight.shape[1])])


def _outer_loop(grad: Tensor, x: Tensor, counts: tuple[int, ...]) -> Tensor:
    sizes = [*counts, PAST]
    return torch.stack([d.t() @ rows for d, rows in list(zip(grad.split(sizes), x.split(sizes)))[:-1]])


def _hold(dtype: torch.dtype, cases: tuple[str, ...] = tuple(CASES)) -> None:
    """All three products are as exact as those of one expert after the other, from any strides."""
    generator = torch.Generator().manual_seed(0)
    for case in cases:
        counts, outputs, inputs = CASES[case]
        rows, ends = sum(counts) + PAST, torch.tensor(counts).cumsum(0).to(torch.int32)
        # Rows lie apart from each other by more than their features, and weights with either dimension inside.
        x = torch.randn(rows, inputs + 6, generator=generator).to(dtype)[:, :inputs]
        grad = torch.randn(rows, outputs, generator=generator).to(dtype)
        weight = torch.randn(len(counts), outputs, inputs, generator=generator).to(dtype)
        products: list[tuple[Tensor, Callable[..., Tensor], tuple[Tensor, Tensor]]] = [
            (grouped_product(x, weight, ends), _loop, (x, weight)),
            (grouped_product(grad, weight.transpose(1, 2), ends), _loop, (grad, weight.transpose(1, 2))),
            (grouped_product(x, weight[:, ::2], ends), _loop, (x, weight[:, ::2])),
            (grouped_outer(grad, x, ends), _outer_loop, (grad, x)),
            (grouped_outer(grad[:, 1:], x[:, 1:], ends), _outer_loop, (grad[:, 1:], x[:, 1:])),
        ]
        for made, reference, factors in products:
            exact = reference(*(each.double() for each in factors), counts)
            eager = reference(*factors, counts)
            assert_close_to_exact(made, eager, exact, least=2e-7)


@needs_kernels
@pytest.mark.parametrize("dtype", TYPES)
def test_errors_are_those_of_the_loop_at_most_twice(dtype: torch.dtype) -> None:
    _hold(dtype)


@needs_kernels
@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_does_not_depend_on_others_nor_on_threads(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    counts, x, weight = (300, 7, 40), torch.randn(347, 48).to(dtype), torch.randn(3, 130, 48).to(dtype)
    grad, ends = torch.randn(347, 130).to(dtype), torch.tensor(counts).cumsum(0).to(torch.int32)
    whole, outer = grouped_product(x, weight, ends), grouped_outer(grad, x, ends)
    for row, expert in ((0, 0), (299, 0), (306, 1), (346, 2)):
        alone = grouped_product(x[row : row + 1], weight[expert : expert + 1], ends.new_ones(1))
        assert torch.equal(alone[0], whole[row])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(grouped_product(x, weight, ends), whole)
        assert torch.equal(grouped_outer(grad, x, ends), outer)
    finally:
        torch.set_num_threads(before)


@needs_kernels
@pytest.mark.parametrize("dtype", TYPES)
def test_experts_learn_alike_in_eager_and_compiled_code(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = ExpertLinear(3, 24, 40, bias=True)
    torch.nn.init.normal_(linear.weight)
    torch.nn.init.normal_(linear.bias)
    linear = linear.to(dtype)
    x, experts = torch.randn(11, 24).to(dtype), torch.tensor([0] * 4 + [2] * 7)
    ends = torch.tensor([4, 4, 11], dtype=torch.int32)
    results = []
    for way in ("loop", "eager", "compiled"):
        linear.plain = way == "loop"
        run = torch.compile(linear, backend="aot_eager", fullgraph=True) if way == "compiled" else linear
        leaf = x.clone().requires_grad_()
        out = run(leaf, ends, experts)
        grads = torch.autograd.grad(out.float().square().sum(), [leaf, linear.weight, linear.bias])
        results.append([out.detach(), *grads])
    torch.testing.assert_close(results[1], results[0])
    assert all(torch.equal(one, other) for one, other in zip(results[1], results[2]))


@needs_kernels
def test_ends_out_of_order_or_past_the_rows_are_refused() -> None:
    x, weight = torch.randn(5, 8), torch.randn(2, 8, 8)
    for ends in ([3, 2], [-1, 5], [5, 6]):
        with pytest.raises(ConfigError, match="in ascending order and up to 5"):
            grouped_product(x, weight, torch.tensor(ends, dtype=torch.int32))
        with pytest.raises(ConfigError, match="in ascending order and up to 5"):
            grouped_outer(x, x, torch.tensor(ends, dtype=torch.int32))


def test_other_types_and_cpus_have_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {dtype: torch.empty(1, 8, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)}
    assert not takes_grouped(rows[torch.float16], 1, 8, 8)
    assert not takes_grouped(rows[torch.bfloat16], 1, 7, 8)
    assert not takes_grouped(rows[torch.float32].to("meta"), 1, 8, 8)
    pairs = replace(this_cpu(), isa="AVX512", bf16=True, amx=False)
    expected = {
        pairs: [True, True],
        replace(pairs, bf16=False): [True, False],
        replace(pairs, amx=True): [True, False],
        replace(pairs, isa="AVX2"): [False, False],
    }
    monkeypatch.setattr(native_grouped, "library", lambda name: object())
    for cpu, takes in expected.items():
        monkeypatch.setattr(native_grouped, "this_cpu", lambda cpu=cpu: cpu)
        taken = [takes_grouped(rows[dtype], 1, 8, 8) for dtype in (torch.float32, torch.bfloat16)]
        assert taken == takes, cpu
    monkeypatch.setattr(native_grouped, "this_cpu", lambda: pairs)
    for dtype, takes in ((torch.float32, [True, True]), (torch.bfloat16, [False, True])):
        many = torch.empty(2048, 8, dtype=dtype)
        assert [takes_grouped(many, experts, 8, 8) for experts in (2, 3)] == takes
    monkeypatch.setattr(native_grouped, "library", lambda name: None)
    assert not takes_grouped(rows[torch.float32], 1, 8, 8)


MUTANTS = (
    ("left.data += 6 * left.row;", "left.data += 5 * left.row;"),
    ("_mm512_loadu_ps(base + r * base_row", "_mm512_loadu_ps(base"), ("w == W - 1 ? lanes", "w < W ? lanes"),
    ("n <= 0 ? 0 : __mmask16((1 << n)", "n <= 0 ? 0 : __mmask16((1 << (n - 1))"),
    ("if (i < here) std::memcpy", "if (i + 1 < here) std::memcpy"),
    ("_mm512_shuffle_i32x4(odd, odd2, 0x88)", "_mm512_shuffle_i32x4(odd, odd2, 0xdd)"),
    ("row > first[expert] ? sums + column : nullptr", "nullptr"), ("].expert * strides[0]", "].expert * 0"),
    ("memset(to, 0, here", "memset(to, 63, here"), ("(out) + done, 0, rows", "(out) + done, 63, rows"),
    ("x + rows.first * x_row", "x"), ("task % spans * span * strides[1]", "0"),
)  # fmt: skip
"""Changes of one term of the kernels, each of which `_hold` sees."""


test_a_changed_term_is_seen = changed_terms_are_seen(
    "grouped", MUTANTS, [native_grouped], lambda: [_hold(dtype) for dtype in TYPES], needs_kernels
)
