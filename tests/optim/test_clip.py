"""Clipping equals torch's, in whatever form, and folds into the fused kernels."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from penstock.errors import ConfigError
from penstock.optim import clip_grad_norm_, clipped_step, grad_norm, make_optimizer
from penstock.precision import LossScaler


def model_with_gradients(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(31, 97), nn.Tanh(), nn.Linear(97, 3)).to(dtype)


def backward(model: nn.Module, factor: float = 1.0) -> None:
    x = torch.randn(5, 31, generator=torch.Generator().manual_seed(0)).to(next(model.parameters()).dtype)
    (model(x).float().square().mean() * factor).backward()


@pytest.mark.parametrize("form", ["loop", "contiguous"])
@pytest.mark.parametrize("max_norm", [0.01, 100.0])
def test_clips_like_torch(form: Any, max_norm: float) -> None:
    model = model_with_gradients()
    twin = copy.deepcopy(model)
    optimizer = make_optimizer(model.parameters(), form, lr=0.1)
    backward(model)
    backward(twin)
    norm = clip_grad_norm_(optimizer, max_norm)
    expected = nn.utils.clip_grad_norm_(twin.parameters(), max_norm)
    torch.testing.assert_close(norm, expected)
    for mine, theirs in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(mine.grad, theirs.grad)
    same = clip_grad_norm_(list(twin.parameters()), max_norm)
    torch.testing.assert_close(same, norm.clamp(max=max_norm))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [[5_000_000], [3, 100_001], [2048 * 64, 2048 * 65], [1]])
def test_norm_is_exact_to_its_dtype(dtype: torch.dtype, sizes: list[int]) -> None:
    gradients = [torch.rand(size).to(dtype) for size in sizes]
    expected = torch.cat([gradient.double() for gradient in gradients]).norm()
    # One running fp32 sum over five million numbers would be off by 1e-3. Halves are rounded to 2^-9 per row of 1024,
    # which mostly averages out: measured at most 4.2e-4 over 20 seeds (torch's own half norm is rounded to 2^-9).
    tolerance = 1e-3 if dtype in (torch.bfloat16, torch.float16) else 1e-5
    norm = grad_norm(gradients)
    assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(norm.double(), expected, rtol=tolerance, atol=0.0)


@pytest.mark.parametrize("sizes", [[5], [5, 7], [70_000], [70_000, 80_000]])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_gradients_have_the_norm_of_their_parts(dtype: torch.dtype, sizes: list[int]) -> None:
    parameters = [nn.Parameter(torch.randn(size, dtype=dtype)) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    parts = torch.cat([torch.view_as_real(p.grad).flatten() for p in parameters if p.grad is not None])
    norm = clip_grad_norm_(parameters, 1.0)
    assert norm.dtype == (torch.float64 if dtype == torch.complex128 else torch.float32)
    torch.testing.assert_close(norm.double(), parts.double().norm(), rtol=1e-5, atol=0.0)
    torch.testing.assert_close(clip_grad_norm_(parameters, 1.0).item(), 1.0, rtol=1e-4, atol=0.0)


def test_norm_of_nothing_is_zero_and_of_nan_is_nan() -> None:
    assert grad_norm([]).item() == 0.0
    assert grad_norm([torch.tensor([1.0, float("nan")])]).isnan()
    assert grad_norm([torch.ones(3), torch.full((4096,), float("inf"))]).isinf()


@pytest.mark.parametrize("form", ["fused", "contiguous"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_norm", [0.003, 1e3])
def test_folded_clipping_equals_clipping_first(form: Any, dtype: torch.dtype, max_norm: float) -> None:
    model = model_with_gradients(dtype)
    twin = copy.deepcopy(model)
    optimizer = make_optimizer(model.parameters(), form, lr=0.01, eps=1e-3)
    reference = torch.optim.AdamW(twin.parameters(), lr=0.01, eps=1e-3, weight_decay=0.0, fused=True)
    for _ in range(4):
        optimizer.zero_grad()
        reference.zero_grad()
        backward(model)
        backward(twin)
        norm = clipped_step(optimizer, max_norm=max_norm)
        expected = nn.utils.clip_grad_norm_(twin.parameters(), max_norm)
        reference.step()
        assert norm is not None
        torch.testing.assert_close(
            norm, expected.float(), rtol=1e-5 if dtype == torch.float32 else 0.01, atol=0.0
        )
    for mine, theirs in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(mine, theirs)
    # The kernel also stores what it divided: whoever looks at gradients afterwards sees them clipped.
    clipped = grad_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert clipped <= max_norm * 1.01
    assert not hasattr(optimizer, "grad_scale")


def test_nothing_asked_is_a_plain_step() -> None:
    model = model_with_gradients()
    optimizer = make_optimizer(model.parameters(), "contiguous", lr=0.01)
    backward(model)
    assert clipped_step(optimizer) is None


@pytest.mark.parametrize("form", ["fused", "contiguous"])
def test_scaled_steps_equal_unscaled_ones_and_overflows_are_skipped(form: Any) -> None:
    model = model_with_gradients()
    twin = copy.deepcopy(model)
    optimizer = make_optimizer(model.parameters(), form, lr=0.01)
    reference = make_optimizer(twin.parameters(), form, lr=0.01)
    scaler = LossScaler(initial=2.0**10, interval=3)
    scales = []
    for step in range(8):
        optimizer.zero_grad()
        overflow = step in (2, 3)
        backward(model, float("inf") if overflow else scaler.scale.item())
        before = [p.detach().clone() for p in model.parameters()]
        norm = clipped_step(optimizer, max_norm=0.05, scaler=scaler)
        scales.append(scaler.scale.item())
        assert norm is not None
        if overflow:
            assert not norm.isfinite()
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
            continue
        reference.zero_grad()
        backward(twin)
        torch.testing.assert_close(norm, clipped_step(reference, max_norm=0.05))
        for mine, theirs in zip(model.parameters(), twin.parameters()):
            torch.testing.assert_close(mine, theirs)
    assert scales == [2.0**10, 2.0**10, 2.0**9, 2.0**8, 2.0**8, 2.0**8, 2.0**9, 2.0**9]
    assert scaler.overflows.item() == 2
    states = optimizer.state_dict()["state"].values()
    assert {state["step"].item() for state in states} == {6.0}  # skipped steps do not age the moments


@pytest.mark.parametrize("form", ["loop", "foreach"])
def test_a_scaler_needs_an_optimizer_that_skips(form: Any) -> None:
    model = model_with_gradients()
    optimizer = make_optimizer(model.parameters(), form, lr=0.01)
    backward(model)
    with pytest.raises(ConfigError, match="optimizer=fused or contiguous"):
        clipped_step(optimizer, scaler=LossScaler())
