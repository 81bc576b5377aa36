"""Norms and activations that write 8 bits, and products of these: plain form and kernels against torch in fp64."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.triton_kernels import compile_for, interpret, needs_triton
from penstock.config.formats import PRODUCTS
from penstock.errors import ConfigError
from penstock.models.perceptron import activate
from penstock.products import fp8, int8
from penstock.products.rounded_rows import FORMS, NormedInt8Linear, rounded_product, rounded_rows

KERNEL = "rounded_rows"
MUTANTS = [
    (KERNEL, "tl.max(tl.abs(value), 1)", "tl.max(value, 1)"),
    (
        KERNEL,
        "tl.store(scales + row, tl.div_rn(largest, 127.0)",
        "tl.store(scales + row, tl.div_rn(largest, 128.0)",
    ),
    (KERNEL, "& 0x7F800000", "& 0x7FC00000"),
    (KERNEL, "x + place + columns", "x + place"),
    (KERNEL, "value * value, 1) / columns + eps", "value * value, 1) / columns + 9 * eps"),
    (KERNEL, "tl.load(b_scales + column", "tl.load(b_scales + column * 0"),
    (KERNEL, "activated(value, ACTIVATION), out", "activated(value, 'none'), out"),
]


def exact_rows(
    x: Tensor, norm: str, weight: Tensor | None, bias: Tensor | None, activation: str, gated: bool
) -> Tensor:
    """The rows that are rounded, in torch's operators."""
    if gated:
        gates, x = x.chunk(2, dim=-1)
        return activate(gates, activation) * x  # type: ignore[arg-type]
    if activation != "none":
        return activate(x, activation)  # type: ignore[arg-type]
    if norm == "layer":
        return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-3)
    return F.rms_norm(x, x.shape[-1:], weight, 1e-3) if norm == "rms" else x


def check(device: str) -> None:
    generator = torch.Generator().manual_seed(0)

    def drawn(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).to(device)

    cases = [
        ((37, 40), torch.bfloat16, "layer", "none", False),
        ((2, 3, 33), torch.float32, "rms", "none", False),
        ((3, 2100), torch.bfloat16, "none", "gelu", False),
        ((5, 2 * 24), torch.float16, "none", "silu", True),
        ((4, 17), torch.float32, "none", "relu", False),
        ((4, 2 * 20), torch.float32, "none", "gelu_tanh", True),
        ((6, 50), torch.float32, "none", "none", False),
    ]
    for (shape, dtype, norm, activation, gated), form in itertools.product(cases, FORMS):
        x = (drawn(shape[-1], *shape[:-1]).movedim(0, -1) - 0.3).to(dtype)
        weight = 1 + drawn(shape[-1]) / 4 if norm != "none" else None
        bias = drawn(shape[-1]) if norm == "layer" else None
        # A small eps would be lost beside the variance.
        numbers, scales = rounded_rows(
            x, form, norm=norm, weight=weight, bias=bias, eps=1e-3, activation=activation, gated=gated
        )
        assert numbers.dtype == FORMS[form]
        assert scales.shape == (*shape[:-1], 1)
        wide = [None if each is None else each.double() for each in (weight, bias)]
        exact = exact_rows(x.double(), norm, *wide, activation, gated)
        plain = int8.rounded if form == "int8" else fp8.rows_in_fp8
        expected, sizes = plain(exact.float().flatten(0, -2))
        torch.testing.assert_close(scales.flatten(0, -2), sizes, rtol=1e-5, atol=0.0)
        # What lies half-way to within the rounding of sums may go to either side.
        flat = numbers.flatten(0, -2)
        off = (flat.float() - expected.float()).abs() * sizes
        step = sizes if form == "int8" else expected.float().abs() * sizes / 8 + sizes * 2.0**-9
        assert bool((off <= step * 1.01).all())
        assert float((off > 0).float().mean()) < 0.02
        if norm == activation == "none":
            assert torch.equal(flat.view(torch.uint8), expected.view(torch.uint8))
    zeros, scales = rounded_rows(torch.zeros(2, 8, device=device), "fp8")
    assert not zeros.float().any()
    assert bool((scales > 0).all())
    assert rounded_rows(x[:0], "int8")[0].shape == (0, 50)
    for (m, n, k), form in itertools.product(((130, 70, 150), (1, 5, 16), (3, 129, 7)), FORMS):
        a, a_scales = rounded_rows(drawn(m, k), form)
        b, b_scales = rounded_rows(drawn(n, k), form)
        bias = drawn(n)
        product = (a.double() * a_scales) @ (b.double() * b_scales).t()
        for activation, offset in (("gelu", bias), ("none", None)):
            y = rounded_product(a, a_scales, b, b_scales, offset, activation=activation, dtype=torch.float32)
            right = exact_rows(
                product if offset is None else product + bias, "none", None, None, activation, False
            )
            if device == "cuda" and form == "fp8":
                # Tensor cores add e4m3 products with about 14 bits (DeepSeek-V3 technical report, section 3.3.2).
                summed = (a.double() * a_scales).abs() @ (b.double() * b_scales).t().abs()
                assert bool(((y.double() - right).abs() <= summed * 2.0**-11 + 1e-5).all())
                continue
            torch.testing.assert_close(y.double(), right, rtol=1e-5, atol=1e-5)
        half = rounded_product(a, a_scales, b, b_scales)
        assert torch.equal(
            half, rounded_product(a, a_scales, b, b_scales, dtype=torch.float32).to(half.dtype)
        )
    # Sums of whole numbers are exact, and rounded once, to fp32, where they are above 2²⁴.
    m, n, k = 5, 18, 1111
    drawn_whole = [
        torch.randint(-127, 128, sides, generator=generator, dtype=torch.int8) for sides in ((m, k), (n, k))
    ]
    ends = [torch.full(sides, 127, dtype=torch.int8) for sides in ((m, k), (n, k))]
    for a, b in (drawn_whole, ends, (ends[0], -ends[1])):
        ones = torch.ones(m, 1, device=device), torch.ones(n, 1, device=device)
        y = rounded_product(a.to(device), ones[0], b.to(device), ones[1], dtype=torch.float32)
        assert torch.equal(y.cpu(), (a.long() @ b.long().t()).float())


def test_the_plain_form_rounds_as_products_do() -> None:
    check("cpu")


@pytest.mark.slow
@needs_triton
def test_kernels_round_as_products_do_and_mutants_do_not() -> None:
    interpret(__file__)


@pytest.mark.gpu
@needs_triton
def test_kernels_round_as_products_do_on_a_gpu() -> None:
    check("cuda")


def test_the_operators_are_ones_to_torch() -> None:
    x = torch.randn(5, 8)
    for form in FORMS:
        arguments = x, form, "layer", torch.ones(8), torch.ones(8), 1e-5, "none", False
        # Of numbers in e4m3 torch cannot tell whether they are equal.
        checks: Any = (
            {} if form == "int8" else {"test_utils": ["test_faketensor", "test_autograd_registration"]}
        )
        torch.library.opcheck(torch.ops.penstock.rounded_rows.default, arguments, **checks)
        rows = rounded_rows(x, form)
        arguments = *rows, *rows, torch.ones(5), "silu", torch.bfloat16
        torch.library.opcheck(torch.ops.penstock.rounded_product.default, arguments, **checks)
    with pytest.raises(ConfigError, match="has no 'int4'; choose one of int8, fp8"):
        rounded_rows(x, "int4")
    with pytest.raises(ConfigError, match="not both"):
        rounded_rows(x, "int8", norm="rms", activation="relu")
    with pytest.raises(ConfigError, match="round both"):
        rounded_product(x, x, x, x)


@pytest.mark.parametrize("weights_too", [False, True])
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_a_norm_and_its_int8_linear_learn_as_two_layers_do(kind: type[nn.Module], weights_too: bool) -> None:
    """Against a norm in fp32 and `int8_linear` behind it; only the rounding of gradients is drawn."""
    torch.manual_seed(0)
    norm, linear = kind(32), nn.Linear(32, 24)
    nn.init.normal_(norm.weight)
    x, grad = torch.randn(3, 20, 32), torch.randn(3, 20, 24)
    fused = NormedInt8Linear(norm, linear, weights_too=weights_too, dtype=torch.float32)
    passes = PRODUCTS["int8_all" if weights_too else "int8"].passes
    results = []
    for run in (
        fused,
        lambda x: int8.int8_linear(
            norm(x),
            linear.weight,
            linear.bias,
            passes=passes,
            dtype=torch.float32,
        ),
    ):
        torch.manual_seed(1)
        leaf = x.clone().requires_grad_()
        leaves = [leaf, *norm.parameters(), *linear.parameters()]
        y = run(leaf)
        results.append([y.detach(), *torch.autograd.grad(y, leaves, grad)])
    assert len(results[0]) == len(list(fused.parameters())) + 2
    torch.testing.assert_close(
        results[0][0], results[1][0], rtol=1e-4, atol=0.02
    )  # where halves went elsewhere
    for one, other in zip(*results, strict=True):
        assert float((one - other).norm() / other.norm()) < 5e-3
    assert list(fused.state_dict())[-2:] == ["linear.weight", "linear.bias"]
    with pytest.raises(ConfigError, match="pass the norm that it reads"):
        NormedInt8Linear(kind(16), linear)


@needs_triton
@pytest.mark.parametrize(
    "architecture",
    [90, pytest.param(80, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.slow)],
)
def test_kernels_compile_without_spilling_and_read_in_vectors(
    architecture: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from penstock.kernels.triton import rounded_rows as kernels
    from penstock.kernels.triton.common import tile_of

    types = dict.fromkeys(("x", "weight", "bias", "out"), "*bf16")
    types |= dict.fromkeys(("scales", "means", "inverses", "a_scales", "b_scales"), "*fp32")
    types |= dict.fromkeys(("rows", "columns", "m", "n", "k"), "i32") | {"eps": "fp32", "least": "fp32"}
    for form, kind in (("int8", "*i8"), ("fp8", "*fp8e4nv")):
        if form == "fp8" and architecture < 90:
            continue  # no such type
        types |= dict.fromkeys(("numbers", "a", "b"), kind)
        rows, block, warps = tile_of(4096)
        flags = {"FP8": form == "fp8", "ROWS": rows, "BLOCK": block, "HAS_WEIGHT": True, "HAS_BIAS": True}
        for shape in (
            {"NORM": "layer", "ACTIVATION": "none", "GATED": False},
            {"NORM": "none", "ACTIVATION": "silu", "GATED": True},
        ):
            kernel = kernels.rounded_rows_kernel
            compile_for(architecture, kernel, types, flags | shape, aligned=["columns"], num_warps=warps)
        constants = {"ACTIVATION": "gelu", "HAS_BIAS": True} | kernels.TILE
        count = compile_for(
            architecture,
            kernels.rounded_product_kernel,
            types,
            constants,
            aligned=["m", "n", "k"],
            num_warps=kernels.WARPS,
            num_stages=kernels.STAGES,
        )
        assert count(r"wgmma|mma\.sync|tcgen05\.mma") > 0, "no tensor cores"
