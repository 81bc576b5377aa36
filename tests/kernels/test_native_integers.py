"""Products with weights in int8 in C++ on CPUs, beside the same formulas in torch and sums of 64 bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from helpers.native_kernels import changed_terms_are_seen
from penstock.cpu import this_cpu
from penstock.kernels import native_integers
from penstock.kernels.native_integers import (
    PAIRS,
    QUADS,
    PackedInt8,
    in_panels,
    multiplies_integers,
    out_of_panels,
    widened_product,
    widens_integers,
)

needs_int8 = pytest.mark.skipif(
    not multiplies_integers(), reason="the kernel is made of instructions of AVX512-VNNI, by a C++ compiler"
)
needs_bf16 = pytest.mark.skipif(
    not widens_integers(), reason="the kernel is made of instructions of AVX512-BF16, by a C++ compiler"
)
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
SHAPES = ((1, 64, 48), (5, 384, 40), (3, 3072, 17), (7, 6, 130), (301, 770, 70), (49, 9, 64), (8, 1, 1))
"""Rows, inputs, outputs: tiles and panels that are full and are not, and more than one block of rows."""
STEP = 0.07
"""A given scale, of which some inputs are beyond 127."""


def _sums(q: Tensor, numbers: Tensor) -> Tensor:
    """Exact, before they are rounded to fp32 once."""
    return (q.long() @ numbers.long().t()).float()


def _given(x: Tensor, packed: PackedInt8, numbers: Tensor) -> Tensor:
    sums, scales = _sums((x * (1 / STEP)).round().clamp(-128, 127), numbers), packed.scales * STEP
    return sums * scales if packed.bias is None else torch.addcmul(packed.bias, sums, scales)


def _by_size(x: Tensor, packed: PackedInt8, numbers: Tensor) -> Tensor:
    sizes = x.abs().amax(1, keepdim=True).clamp(min=1e-12)
    product = _sums((x * (127 / sizes)).round(), numbers) * packed.scales
    return (
        product * (sizes / 127) if packed.bias is None else torch.addcmul(packed.bias, product, sizes / 127)
    )


def _by_range(x: Tensor, packed: PackedInt8, numbers: Tensor) -> Tensor:
    low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    middle, scale = (low + high) / 2, ((high - low) / 254).clamp(min=1e-12)
    product = _sums(((x - middle) * scale.reciprocal()).round(), numbers) * packed.scales
    offset = middle * packed.sums if packed.bias is None else torch.addcmul(packed.bias, middle, packed.sums)
    return torch.addcmul(offset, product, scale)


WAYS: dict[str, tuple[float | str, Callable[[Tensor, PackedInt8, Tensor], Tensor]]] = {
    "given": (STEP, _given), "size": ("size", _by_size), "range": ("range", _by_range),
}  # fmt: skip


def _hold(shapes: tuple[tuple[int, int, int], ...] = SHAPES) -> None:
    """Each way of rounding gives the bits of torch's formula, with a bias and without, in both types."""
    generator = torch.Generator().manual_seed(0)
    for rows, inputs, outputs in shapes:
        numbers = torch.randint(-127, 128, (outputs, inputs), generator=generator, dtype=torch.int8)
        scales = torch.rand(outputs, generator=generator) * 0.01
        for bias in (None, torch.randn(outputs, generator=generator)):
            packed = PackedInt8(numbers, scales, bias)
            assert torch.equal(packed.numbers, numbers)
            for dtype in (torch.float32, torch.bfloat16):
                x = (3 * torch.randn(rows, inputs, generator=generator) + 1).to(dtype)
                x[0] = x[0].abs()
                for name, (scale, formula) in WAYS.items():
                    made = packed.product(x, scale)  # type: ignore[arg-type]
                    assert torch.equal(made, formula(x.float(), packed, numbers).to(dtype)), (name, x.shape)
                sizes = 2 * x.float().abs().amax(1, keepdim=True)
                product = _sums((x.float() * (127 / sizes)).round(), numbers) * scales
                more = 0.0 if bias is None else bias
                torch.testing.assert_close(
                    packed.product(x, sizes),
                    (product * (sizes / 127) + more).to(dtype),
                    msg="sizes that are given",
                )


@needs_int8
def test_each_way_of_rounding_has_the_bits_of_its_formula() -> None:
    _hold()


@needs_int8
@TYPES
def test_sums_are_exact_with_all_numbers_at_their_ends(dtype: torch.dtype) -> None:
    numbers = torch.full((66, 3072), 127, dtype=torch.int8)
    numbers[1::2] = -127
    packed = PackedInt8(numbers, torch.ones(66), None)
    for value in (127, -128):
        x = torch.full((7, 3072), float(value), dtype=dtype)
        assert torch.equal(
            packed.product(x, 1.0), (x.long() @ numbers.long().t()).to(torch.float32).to(dtype)
        )


def _rows_and_products() -> list[tuple[Tensor, Callable[[Tensor], Tensor]]]:
    torch.manual_seed(0)
    numbers, scales = torch.randint(-127, 128, (130, 70), dtype=torch.int8), torch.rand(130)
    packed, panels = PackedInt8(numbers, scales, torch.randn(130)), in_panels(numbers, PAIRS)
    made: list[tuple[Tensor, Callable[[Tensor], Tensor]]] = []
    for x in (torch.randn(500, 70), torch.randn(500, 70).bfloat16()):
        made += [(x, lambda x, scale=scale: packed.product(x, scale)) for scale, _ in WAYS.values()]  # type: ignore[misc,arg-type]
        if widens_integers():
            made.append((x, lambda x: widened_product(x, panels, scales, packed.bias)))
    return made


@needs_int8
def test_a_row_depends_neither_on_others_nor_on_threads() -> None:
    for x, product in _rows_and_products():
        whole = product(x)
        for first, count in ((0, 1), (3, 5), (17, 16), (17, 17), (200, 49), (499, 1)):
            assert torch.equal(product(x[first : first + count]), whole[first : first + count])
        others = x.clone()
        others[100], others[101, 3], others[102, 4] = 1e6 * x[100], math.nan, math.inf
        changed = product(others)
        kept = [row for row in range(500) if row not in (100, 101, 102)]
        assert torch.equal(changed[kept], whole[kept])
        before = torch.get_num_threads()
        torch.set_num_threads(2)
        try:
            assert torch.equal(product(x), whole)
        finally:
            torch.set_num_threads(before)


@needs_int8
@TYPES
def test_a_row_that_is_not_finite_stays_so(dtype: torch.dtype) -> None:
    packed = PackedInt8(torch.ones(3, 40, dtype=torch.int8), torch.ones(3), torch.zeros(3))
    x = torch.randn(4, 40).to(dtype)
    x[0, 0], x[1, 39], x[2, 20] = math.nan, math.inf, -math.inf
    for scale in ("size", "range"):
        finite = packed.product(x, scale).isfinite()  # type: ignore[arg-type]
        assert finite.tolist() == [[False] * 3] * 3 + [[True] * 3]


def _hold_widened() -> None:
    generator = torch.Generator().manual_seed(0)
    for rows, inputs, outputs in SHAPES:
        numbers = torch.randint(-127, 128, (outputs, inputs), generator=generator, dtype=torch.int8)
        scales = torch.rand(outputs, generator=generator) * 0.01
        for bias in (None, torch.randn(outputs, generator=generator)):
            for dtype in (torch.float32, torch.bfloat16):
                x = torch.randn(rows, inputs, generator=generator).to(dtype)
                made = widened_product(x, in_panels(numbers, PAIRS), scales, bias)
                exact = (x.bfloat16().double() @ numbers.double().t()) * scales.double()
                exact = exact if bias is None else exact + bias.double()
                assert made.dtype == dtype
                # Sums of up to 3,072 products in fp32, and a result that is rounded once.
                torch.testing.assert_close(
                    made, exact.to(dtype), rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-4
                )


@needs_bf16
def test_widened_products_are_those_of_bf16() -> None:
    _hold_widened()


@needs_int8
def test_half_precision_of_another_kind_is_read_as_fp32() -> None:
    packed = PackedInt8(torch.ones(3, 8, dtype=torch.int8), torch.ones(3), None)
    x = torch.randn(2, 8).half()
    made = packed.product(x, "range")
    assert made.dtype == torch.float16
    assert torch.equal(made, packed.product(x.float(), "range").half())


@pytest.mark.parametrize("each", [QUADS, PAIRS])
def test_panels_hold_what_they_are_made_of(each: int) -> None:
    for outputs, inputs in ((1, 1), (64, 8), (65, 7), (200, 33)):
        numbers = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
        panels = in_panels(numbers, each)
        assert panels.shape == (-(-outputs // 64), -(-inputs // each), 64, each)
        assert torch.equal(out_of_panels(panels, outputs, inputs), numbers)
        assert int(panels.long().abs().sum()) == int(numbers.long().abs().sum())


def test_other_cpus_have_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = replace(this_cpu(), isa="AVX512", vnni=True, bf16=True)
    expected = {
        whole: (True, True),
        replace(whole, bf16=False): (True, False),
        replace(whole, vnni=False): (False, False),
        replace(whole, isa="AVX2"): (False, False),
    }
    monkeypatch.setattr(native_integers, "library", lambda name: object())
    for cpu, there in expected.items():
        monkeypatch.setattr(native_integers, "this_cpu", lambda cpu=cpu: cpu)
        assert (multiplies_integers(), widens_integers()) == there, cpu
    monkeypatch.setattr(native_integers, "this_cpu", lambda: whole)
    monkeypatch.setattr(native_integers, "library", lambda name: None)
    assert (multiplies_integers(), widens_integers()) == (False, False)


MUTANTS = (
    ("value < low ? value : low", "value < low ? low : value"),
    ("(low + high) / 2, scale", "low, scale"),
    ("1.0f / size * MOST", "MOST / size * 0.99f"),
    ("float size = given ? given :", "float size ="),
    ("_mm512_sub_epi32(_mm512_load_si512(totals + i), zeros)", "_mm512_load_si512(totals + i)"),
    ("scaled[r + i], part", "scaled[r], part"),
    ("of.zeros + column, of.scales + column", "of.zeros + column, of.scales"),
    ("word ? totals : nullptr", "nullptr"),
    ("Left<u32>{left + word, words, 1}", "Left<u32>{left, words, 1}"),
    ("if (inputs % 2) to[inputs] = 0;", "if (inputs % 2) to[inputs] = 0x7fc0;"),
    ("scales + column, more, out", "scales, more, out"),
)
"""Changes of one term of the kernels, each of which `_hold` or `_hold_widened` sees."""


test_a_changed_term_is_seen = changed_terms_are_seen(
    "integers", MUTANTS, [native_integers], lambda: (_hold(), _hold_widened()), needs_bf16
)
