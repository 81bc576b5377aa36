"""Grouped products that gather and scatter: plain form and kernels against torch's operators in fp64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers.triton_kernels import after_steps, assert_close_to_exact, compile_for, interpret, needs_triton
from penstock.errors import ConfigError
from penstock.kernels.grouped import gathered_product, scattered_product

KERNEL = "grouped"
MUTANTS = [
    (KERNEL, "tile - until + tiles", "until - until"),
    (KERNEL, "source = visit // visits", "source = visit // visits // 2"),
    (KERNEL, "sums *= tl.load(shares", "sums += tl.load(shares"),
    (KERNEL, "right += BLOCK_K * stride_k", "right += BLOCK_K"),
    (KERNEL, "rows.to(tl.float32) * factor[None, :]", "rows.to(tl.float32)"),
    (KERNEL, "left = grad + source[None, :] * n", "left = grad + token[None, :] * n"),
    (
        KERNEL,
        "        place = row.to(tl.int64)\n        if SCATTERS",
        "        place = visit\n        if SCATTERS",
    ),
]


def visits_of(tokens: int, experts: int, chosen: int, dropped: int) -> tuple[Tensor, Tensor, Tensor]:
    """Experts of visits in order, their numbers among all, and where each expert's end; one expert has none."""
    generator = torch.Generator().manual_seed(tokens)
    picked = torch.rand(tokens, experts - 1, generator=generator).topk(chosen).indices
    sorted_experts, order = (picked + (picked > 0)).flatten().sort(stable=True)
    stays = torch.ones(len(order), dtype=torch.bool)
    stays[torch.randperm(len(order), generator=generator)[:dropped]] = False
    sorted_experts, order = sorted_experts[stays], order[stays]
    ends = torch.bincount(sorted_experts, minlength=experts).cumsum(0).to(torch.int32)
    return sorted_experts, order, ends


def mixture(
    x: Tensor, up: Tensor, down: Tensor, shares: Tensor, experts: Tensor, order: Tensor, visits: int
) -> Tensor:
    """Both products of a mixture, visit by visit."""
    tokens = order // visits
    hidden = torch.tanh((x[tokens][:, None] @ up[experts].transpose(1, 2))[:, 0])
    made = (hidden[:, None] @ down[experts].transpose(1, 2))[:, 0] * shares[:, None]
    return torch.zeros_like(x).index_add(0, tokens, made.to(x.dtype))


def fused(
    x: Tensor, up: Tensor, down: Tensor, shares: Tensor, ends: Tensor, order: Tensor, visits: int
) -> Tensor:
    hidden = torch.tanh(gathered_product(x, up, ends, order, visits))
    return scattered_product(hidden, down, ends, order, visits, len(x), shares)


def check(device: str) -> None:
    """Outputs and all gradients of a mixture, with an expert that nobody visits, and visits that are dropped."""
    generator = torch.Generator().manual_seed(1)
    for tokens, count, width, hidden, visits, dropped, dtype in (
        (70, 3, 40, 70, 2, 0, torch.float32),  # two tiles of each expert's visits
        (9, 5, 24, 8, 3, 5, torch.bfloat16),
        (5, 4, 130, 3, 1, 0, torch.float16),
    ):
        experts, order, ends = (each.to(device) for each in visits_of(tokens, count, visits, dropped))

        def drawn(*sizes: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(sizes, generator=generator).to(device, dtype)

        # The second weights lie transposed.
        inputs = [
            drawn(tokens, width),
            drawn(count, hidden, width) / 8,
            drawn(count, hidden, width).transpose(1, 2) / 8,
        ]
        inputs.append(drawn(len(order), dtype=torch.float32).abs())
        grad = drawn(tokens, width)
        results = []
        for run, upper in (
            (partial(fused, ends=ends, order=order, visits=visits), False),
            (partial(mixture, experts=experts, order=order, visits=visits), False),
            (partial(mixture, experts=experts, order=order, visits=visits), True),
        ):
            leaves = [(each.double() if upper else each).detach().requires_grad_() for each in inputs]
            out = run(*leaves)
            results.append([out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))])
        for one, eager, exact in zip(*results, strict=True):
            assert_close_to_exact(one, eager, exact, least=3e-7 if dtype == torch.float32 else 1e-6)
    check_many_steps(device)


def check_many_steps(device: str) -> None:
    """Weights of all experts but the one that nobody visits move, and end where single products end."""
    experts, order, ends = (each.to(device) for each in visits_of(9, 3, 2, 1))
    generator = torch.Generator().manual_seed(2)
    sizes = (9, 6), (9, 6), (3, 10, 6), (3, 6, 10)
    x, wanted, up, down = (torch.randn(each, generator=generator).to(device) for each in sizes)
    shares = torch.rand(len(order), generator=generator).to(device)

    def loss_of(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda up, down: (run(x, up, down, shares) - wanted).square().mean()

    plain = after_steps(loss_of(partial(mixture, experts=experts, order=order, visits=2)), (up, down))
    ours = after_steps(loss_of(partial(fused, ends=ends, order=order, visits=2)), (up, down))
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
    assert [bool((plain[0][number] - up[number]).any()) for number in range(3)] == [True, False, True]


def test_the_plain_form_is_as_exact_as_eager() -> None:
    check("cpu")


@pytest.mark.slow
@needs_triton
def test_kernels_are_as_exact_as_eager_and_mutants_are_not() -> None:
    interpret(__file__)


@pytest.mark.gpu
@needs_triton
def test_kernels_are_as_exact_as_eager_on_a_gpu() -> None:
    check("cuda")


def test_the_operators_are_ones_to_torch() -> None:
    _, order, ends = visits_of(4, 3, 2, 0)
    x, rows = torch.randn(4, 3, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)
    weight, shares = torch.randn(3, 5, 3, dtype=torch.float64), torch.rand(8, dtype=torch.float64)
    leaves = [each.requires_grad_() for each in (x, rows, weight, shares)]
    gathered = torch.ops.penstock.gathered_product.default, (x, weight, ends, order, 2, shares.detach())
    scattered = torch.ops.penstock.scattered_product.default, (rows, weight, ends, order, 2, 4, shares)
    for operator, arguments in (gathered, scattered):
        torch.library.opcheck(operator, arguments)
        torch.autograd.gradcheck(operator, arguments)
    none = gathered_product(x[:0], weight, torch.zeros_like(ends), order[:0], 2)
    assert none.shape == (0, 5)
    (grad,) = torch.autograd.grad(none.sum(), leaves[2])
    assert not grad.any()
    with pytest.raises(ConfigError, match="cast or transpose"):
        gathered_product(x.float(), weight, ends, order, 2)
    with pytest.raises(ConfigError, match="pass a row for each"):
        scattered_product(x, weight, ends, order, 2, 4)


@needs_triton
@pytest.mark.parametrize(
    "architecture",
    [90, pytest.param(80, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.slow)],
)
def test_kernels_compile_without_spilling(
    architecture: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from penstock.kernels.triton import grouped as kernels

    types = dict.fromkeys(("x", "weight", "grad", "out"), "*bf16") | {"ends": "*i32", "order": "*i64"}
    types |= {"shares": "*fp32"} | dict.fromkeys(("n", "k", "experts", "visits"), "i32")
    types |= dict.fromkeys(("stride_e", "stride_n", "stride_k"), "i32")
    flags = {"GATHERS": True, "HAS_SHARES": True}
    for kernel, constants in (
        (
            kernels.grouped_kernel,
            flags | {"SCATTERS": True, "EXPERTS_WIDE": 128, "stride_k": 1} | kernels.TILE,
        ),
        (kernels.grouped_outer_kernel, flags | {"GATHERS_GRAD": False} | kernels.OUTER_TILE),
    ):
        count = compile_for(
            architecture,
            kernel,
            types,
            constants,
            aligned=["n", "k", "stride_e", "stride_n"],
            num_warps=kernels.WARPS,
            num_stages=kernels.STAGES,
        )
        assert count(r"wgmma|mma\.sync|tcgen05\.mma") > 0, "no tensor cores"
