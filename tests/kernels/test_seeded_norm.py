"""Dropout, residual and norm in one operation: its reference against torch's operators, its kernels against that."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from helpers.operators import assert_close_to_exact, gradients
from penstock.config.model import PRESETS
from penstock.errors import ConfigError
from penstock.kernels.residual_norm import add_norm, drawn, seed_of
from penstock.models import create
from penstock.models.fuse import fuse

LEVEL = round(0.3 * 2**24)
MUTANTS = [
    ("seeded_norm", "value * scale, 0.0", "value, 0.0"),
    ("seeded_norm", "tl.load(seed), quarter, line", "tl.load(seed), line, quarter"),
    ("seeded_norm", "tl.join(tl.join(a, c), tl.join(b, d))", "tl.join(tl.join(a, b), tl.join(c, d))"),
    ("seeded_norm", "grad -= value * (tl", "grad -= 0.9 * value * (tl"),
    ("seeded_norm", "grad -= (tl.sum(grad, 1)", "grad -= 0.9 * (tl.sum(grad, 1)"),
    ("seeded_norm", "weight_sums += grad * value", "weight_sums = grad * value"),
    ("seeded_norm", "grad += tl.load(to_total", "grad = tl.load(to_total"),
    ("seeded_norm", "bias_sums += grad", "bias_sums += grad * 0.99"),
    ("seeded_norm", "real, value - mean[:, None], 0.0", "real, value - mean[:, None], 0.1"),
]


def seeded_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, p: float,
    centred: bool = True, seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The norm of a residual and a branch x, in the type of the branch, and their sum."""
    own, scale = seed_of(x.device, p)
    kept = (own if seed is None else seed) if p else None
    total, normed = add_norm(
        residual, x, weight, bias, 1e-5, rms=not centred, out=x.dtype, kept=kept, scale=scale
    )
    return normed, total


def eager(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, mask: Tensor,
    centred: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """torch's own operators; the mask is 0 or 1 / (1 − p)."""
    total = residual + x * mask.to(x.dtype)
    of = total.to(x.dtype)
    if centred:
        return F.layer_norm(of, of.shape[-1:], weight, bias, 1e-5), total
    return F.rms_norm(of, of.shape[-1:], weight, 1e-5), total


def check(device: str) -> None:
    """Results and gradients of the kernels are as near to exact ones as eager's, of any shape, strides and types."""
    half, wide = torch.bfloat16, torch.float32
    cases = [
        ((70, 48), half, half, True, True, 0.3), ((5, 7, 33), wide, wide, True, False, 0.3),
        ((3, 2500), half, wide, False, False, 0.3), ((2, 1), wide, wide, True, True, 0.0),
        ((6, 65), torch.float16, torch.float16, False, False, 0.0), ((9, 20), half, wide, True, True, 0.0),
    ]  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for shape, narrow, type_of_residual, centred, has_bias, p in cases:
        columns = shape[-1]

        def normal(*sizes: int, dtype: torch.dtype = narrow) -> Tensor:
            return torch.randn(sizes, generator=generator).to(device, dtype)

        # Neither lies in one piece.
        x = normal(columns, *shape[:-1]).movedim(0, -1)
        residual = normal(*shape[:-1], 2 * columns, dtype=type_of_residual)[..., ::2]
        weight = None if has_bias is False and centred else 1 + normal(columns) / 4
        bias = normal(columns) if has_bias else None
        seed = torch.tensor([0x1234567890ABCDEF], device=device)
        level = round(p * 2**24)
        mask = torch.ones(shape, device=device, dtype=torch.float64)
        if level:
            mask = drawn(seed, x[..., 0].numel(), columns, level).view(shape).double() / (1 - level / 2**24)
        inputs = [one for one in (x, residual, weight, bias) if one is not None]
        by_eager = partial(eager, mask=mask, centred=centred)
        fused = gradients(partial(seeded_norm, p=p, centred=centred, seed=seed), inputs)
        exact, plain = gradients(by_eager, [t.double() for t in inputs]), gradients(by_eager, inputs)
        for one, other, right in zip(fused, plain, exact, strict=True):
            assert_close_to_exact(one, other.to(one.dtype), right, least=1e-6)
        assert torch.equal((fused[1] == residual) | (mask > 0), torch.ones_like(mask, dtype=torch.bool))
    check_a_model(device)
    y, total = seeded_norm(x[:0], residual[:0], weight, bias, p=0.5)
    assert y.shape == total.shape == (0, columns)


def check_a_model(device: str) -> None:
    """A fused model learns as an unfused one: weights after 32 steps, without dropout."""
    config = replace(
        PRESETS["bert-tiny"], depth=1, width=16, heads=2, mlp_width=24, vocabulary=40, sequence=6
    )
    tokens = torch.randint(5, 40, (2, 6), generator=torch.Generator().manual_seed(0)).to(device)
    weights = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = create(config).to(device).eval()
        if fused:
            assert fuse(model, ("residual_norm",), device="cuda") == {"residual_norm": 1}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(32):
            optimizer.zero_grad()
            model(tokens).square().mean().backward()
            optimizer.step()
        weights.append([*model.parameters()])
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_plain_form_is_as_exact_as_eager() -> None:
    check("cpu")


def test_its_gradients_are_those_of_its_results() -> None:
    x, residual = (torch.randn(6, 10, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight, bias = (torch.randn(10, dtype=torch.float64, requires_grad=True) for _ in range(2))
    dropped = (None, 1.0), (torch.tensor([5]), 2**24 / (2**24 - LEVEL))
    for kept, of in itertools.product(dropped, ((bias, 1e-5, False), (None, 1e-5, True))):

        def made(x: Tensor, residual: Tensor, weight: Tensor, kept: Any = kept, of: Any = of) -> Any:
            return torch.ops.penstock.add_norm(residual, x, *kept, weight, *of, torch.float64)[:2]

        torch.autograd.gradcheck(made, (x, residual, weight))


def test_a_recomputation_drops_the_same() -> None:
    x, residual = (torch.randn(6, 10, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight, bias = torch.randn(10, dtype=torch.float64), torch.randn(10, dtype=torch.float64)

    def sums(x: Tensor) -> Tensor:
        y, total = seeded_norm(x, residual, weight, bias, p=0.3)
        return (y * total.sin()).sum()

    compiled = torch.compile(sums, backend="aot_eager", fullgraph=True)
    gradients = []
    for run in (sums, compiled, partial(checkpoint, sums, use_reentrant=False)):
        torch.manual_seed(1)
        gradients.append(torch.autograd.grad(run(x), x)[0])
    torch.testing.assert_close(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])
    assert not torch.equal(gradients[0], torch.autograd.grad(sums(x), x)[0]), "another mask"


def test_what_is_dropped_follows_from_the_seed_alone() -> None:
    """Philox's published numbers, the share of zeros, and no likeness of rows, columns or seeds."""
    # The known answers of Philox-4x32-10 for a counter and a key of zeros.
    words = torch.tensor([0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]) >> 8
    for column, word in enumerate(words.tolist()):
        assert drawn(torch.tensor([0]), 1, 4, word)[0, column]
        assert not drawn(torch.tensor([0]), 1, 4, word + 1)[0, column]
    masks = [drawn(torch.tensor([seed]), 400, 300, LEVEL) for seed in (1, 2, 1 << 40)]
    for mask in masks:
        assert abs(mask.float().mean() - 0.7) < 0.006  # four standard deviations of 120,000
        assert (mask.float().mean(0) - 0.7).abs().max() < 0.12
    pairs = [(masks[0], masks[1]), (masks[0], masks[2]), (masks[0][1:], masks[0][:-1])]
    pairs += [(masks[0][:, n:], masks[0][:, :-n]) for n in (1, 4)]
    for one, other in pairs:
        assert abs((one == other).float().mean() - 0.58) < 0.006
    assert torch.equal(masks[0][:7, :9], drawn(torch.tensor([1]), 7, 9, LEVEL))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="p must be at least 0"):
        seed_of(torch.device("cpu"), 1.0)
