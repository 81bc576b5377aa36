"""Linears that multiply from a folder's numbers, against whole numbers of 64 bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from helpers.cpus import pretend
from penstock.cpu import this_cpu
from penstock.kernels.native_integers import multiplies_integers
from penstock.models.expert_linear import ExpertLinear
from penstock.models.rounded import RoundedWeight, round_groups, round_rows
from penstock.products.rounded import RoundedInt8, in_8_bits, stored_form

KINDS = pytest.mark.parametrize("kind", ["here", "without our kernel", "avx2"])


def be(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply as on this machine, as where our kernel cannot be compiled, or as on a CPU of another kind."""
    if kind == "without our kernel":
        monkeypatch.setattr("penstock.products.rounded.multiplies_integers", lambda: False)
    elif kind != "here":
        pretend(monkeypatch, kind)


def layer(numbers: torch.Tensor, scale: float | None, *, bias: bool = False) -> RoundedInt8:
    linear = nn.Linear(numbers.shape[1], len(numbers), bias=bias)
    one = None if scale is None else torch.tensor(scale)
    return RoundedInt8(linear, RoundedWeight(numbers, torch.ones(len(numbers), 1), None, one))


@KINDS
def test_sums_are_those_of_whole_numbers_also_at_the_ends(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    be(kind, monkeypatch)
    generator = torch.Generator().manual_seed(0)
    for rows, inputs, outputs in ((1, 384, 40), (5, 64, 48), (3, 3072, 17)):
        shapes = (rows, inputs), (outputs, inputs)
        drawn = [torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8) for shape in shapes]
        ends = [torch.full(shape, 127, dtype=torch.int8) for shape in shapes]
        for x, numbers in (drawn, ends, (ends[0], -ends[1]), (-ends[0], ends[1])):
            made = layer(numbers, 1.0)
            assert (made.fused is not None) == (kind == "here" and multiplies_integers())
            assert (made.packed is None and made.fused is None) == (not this_cpu().vnni)
            expected = x.long() @ numbers.long().t()
            # Above 2²⁴ a sum is rounded once, when it becomes fp32.
            assert torch.equal(made(x.float()), expected.float())
            assert torch.equal(made.sums(x), expected.float())


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_multiplies_alike_whatever_is_beside_it(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    be(kind, monkeypatch)
    torch.manual_seed(0)
    linear = nn.Linear(64, 48).requires_grad_(False).to(dtype)
    x = torch.randn(6, 64).to(dtype)
    for scale in (None, torch.tensor(float(x.abs().max()) / 127)):
        made = RoundedInt8(linear, replace(round_rows(linear.weight), input_scale=scale))
        found = made(x)
        assert found.dtype == dtype
        error = (found - linear(x)).float().std() / linear(x).float().std()
        assert error < 0.02, "measured 0.009"
        outlier = x.clone()
        outlier[3] *= 1000
        kept = [0, 1, 2, 4, 5]
        assert torch.equal(made(outlier)[kept], found[kept])
        assert torch.equal(made(x[2]), found[2])
        assert made(x[:0]).shape == (0, 48)
        rows = x.float() if scale is None else in_8_bits(x.float(), float(scale))
        if scale is None:
            sizes = x.float().abs().amax(1, keepdim=True)
            rows = in_8_bits(x.float() * (127 / sizes), 1.0)
        factor = made.scales * (sizes / 127 if scale is None else scale)
        expected = made.sums(rows) * factor + linear.bias.float()
        torch.testing.assert_close(
            found, expected.to(dtype), rtol=2**-7 if dtype != torch.float32 else 1e-5, atol=1e-5
        )


@pytest.mark.parametrize("form", ["int8", "int8_weights", "int4"])
def test_experts_multiply_as_each_alone(form: str) -> None:
    torch.manual_seed(0)
    experts = ExpertLinear(3, 64, 48, bias=True)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_()
    rounded = (round_groups if form == "int4" else round_rows)(experts.weight)
    made = stored_form(experts, form, rounded)  # type: ignore[arg-type]
    loads = torch.tensor([4, 0, 3])
    x, numbers = torch.randn(7, 64), torch.repeat_interleave(torch.arange(3), loads)
    with torch.no_grad():
        expected = experts(x, loads.cumsum(0).to(torch.int32), numbers)
    found = made(x, loads.cumsum(0).to(torch.int32), numbers)
    error = (found - expected).std() / expected.std()
    assert error < (0.12 if form == "int4" else 0.02)
    single = nn.Linear(64, 48)
    with torch.no_grad():
        single.weight.copy_(experts.weight[2])
        single.bias.copy_(experts.bias[2])  # type: ignore[index]
    alone = stored_form(single, form, rounded.part(2))  # type: ignore[arg-type]
    assert torch.equal(alone(x[4:]), found[4:])
