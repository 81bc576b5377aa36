"""The loss of each sample in chunks: held to the plain form, forward and backward, and to its budget of memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels import linear_cross_entropy as module
from penstock.kernels.sample_losses import sample_losses

SAMPLES, LENGTH, WIDTH, WORDS = 4, 9, 24, 60
BUDGET = 8 * WORDS * 8
"""Eight rows of fp32."""
WEIGHTS = torch.tensor([1.0, -0.5, 0.0, 3.0])


def _case(dtype: torch.dtype, *, bias: bool = True) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, LENGTH, WIDTH).to(dtype).requires_grad_()
    weight = (torch.randn(WORDS, WIDTH) * 0.3).to(dtype).requires_grad_()
    offset = [torch.randn(WORDS).to(dtype).requires_grad_()] if bias else []
    targets = torch.randint(0, WORDS, (SAMPLES, LENGTH))
    targets[:, ::4] = -100
    targets[1] = -100  # a sample without targets
    return [x, weight, *offset], targets


def _run(inputs: list[Tensor], targets: Tensor, factor: float = 1.0, **options: Any) -> list[Tensor]:
    """Losses, and the gradients of their sum with weights, squared so that these are not known beforehand."""
    x, weight, *bias = inputs
    losses = sample_losses(x, weight, bias[0] if bias else None, targets, **options)
    total = (losses.square() * WEIGHTS).sum() * factor
    learning = [tensor for tensor in inputs if tensor.requires_grad]
    return [losses.detach(), *(each / factor for each in torch.autograd.grad(total, learning))]


@pytest.mark.parametrize("budget", [1, BUDGET, 1 << 30])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_losses_and_gradients_are_those_of_the_plain_form(
    dtype: torch.dtype, bias: bool, smoothing: float, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, targets = _case(dtype, bias=bias)
    expected = _run(inputs, targets, smoothing=smoothing)
    assert expected[0][1] == 0.0
    assert len(expected) == 3 + bias
    for padded in (set[str](), {"cpu"}):  # as on a GPU, where products want rows of whole pieces
        monkeypatch.setattr(module, "_PADDED_ON", padded)
        found = _run(inputs, targets, smoothing=smoothing, budget=budget)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6 if dtype == torch.float64 else 1e-5, atol=1e-5)
            assert (one - other).norm() <= 1e-6 * other.norm()


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_only_what_learns_gets_a_gradient(frozen: int) -> None:
    inputs, targets = _case(torch.float64)
    inputs[frozen].requires_grad_(False)
    for one, other in zip(_run(inputs, targets, budget=BUDGET), _run(inputs, targets), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_products_keep_their_range_whatever_the_loss_scale_is(dtype: torch.dtype) -> None:
    inputs, targets = _case(torch.float32)
    expected = _run(inputs, targets)
    with torch.autocast("cpu", dtype):
        found = _run(inputs, targets, factor=2.0**20, budget=BUDGET)
    for one, other in zip(found, expected, strict=True):
        assert one.isfinite().all()
        # The rounding of bf16; measured 0.006, and 0.001 of fp16.
        assert (one - other).norm() <= 0.02 * other.norm()


def test_without_targets_losses_and_gradients_are_zero() -> None:
    inputs, targets = _case(torch.float32)
    for each in _run(inputs, torch.full_like(targets, -100), budget=BUDGET):
        assert not each.any()
