"""What "Mixed Precision Training" (Micikevicius et al., ICLR 2018) builds on, checked on torch's own arithmetic.

Section 3.1 says why weights need a master copy, section 3.2 why the loss needs a scale, and within which bounds.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from penstock.optim import clipped_step
from penstock.precision import LossScaler

# Bits of the fraction, the leading one among them: the spacing of numbers from 1 to 2 is 2^(1 − bits).
SIGNIFICANT = {torch.float16: 11, torch.bfloat16: 8}


def test_the_least_fp16_is_two_to_the_minus_24() -> None:
    least = torch.tensor(2.0**-24).half()
    assert least.item() == 2.0**-24 == torch.finfo(torch.float16).smallest_normal * 2.0**-10
    assert least.view(torch.int16).item() == 1  # no pattern lies between this and zero
    assert torch.tensor(2.0**-25).half().item() == 0.0  # a tie, to even
    assert torch.tensor(2.0**-25 * 1.001).half().item() == 2.0**-24
    # As fp16 but in bf16: 2^-133, so that no loss scale is needed.
    assert torch.tensor(1, dtype=torch.int16).view(torch.bfloat16).item() == 2.0**-133


@pytest.mark.parametrize(("dtype", "shift"), [(torch.float16, 11), (torch.bfloat16, 8)])
@pytest.mark.parametrize("weight", [1.0, 0.25, 640.0])
def test_an_update_too_small_for_its_weight_is_lost_in_half_and_kept_in_fp32(
    dtype: torch.dtype, shift: int, weight: float
) -> None:
    """At least 2^11 times smaller than its weight, in fp16, and 2^8 times in bf16: half of the last place or less."""
    assert SIGNIFICANT[dtype] == shift
    start = torch.tensor(weight, dtype=dtype)
    exponent = 2.0 ** torch.tensor(weight).log2().floor().item()
    lost, kept = exponent * 2.0**-shift, exponent * 2.0 ** -(shift - 1)
    assert (start + torch.tensor(lost, dtype=dtype)).item() == weight
    assert (start + torch.tensor(kept, dtype=dtype)).item() == weight + kept
    master = start.float()
    for _ in range(2**shift):
        start += torch.tensor(lost, dtype=dtype)
        master += lost
    assert start.item() == weight
    assert master.item() == weight + exponent  # a whole doubling of the exponent, one step at a time


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_training_stalls_without_master_weights_and_goes_on_with_them(dtype: torch.dtype) -> None:
    """AdamW's steps are as large as its rate: 2^-12 of a weight here."""

    def final(weight: nn.Parameter, optimizer: torch.optim.Optimizer, model: Tensor | None = None) -> float:
        for _ in range(512):
            weight.grad = torch.full_like(weight, -1.0)
            optimizer.step()
            if model is not None:
                model.copy_(weight.detach())
        return (weight if model is None else model)[0].item()

    options = {"lr": 2.0**-12, "weight_decay": 0.0}
    alone = nn.Parameter(torch.ones(8, dtype=dtype))
    assert final(alone, torch.optim.AdamW([alone], eps=1e-4, **options)) == 1.0
    master = nn.Parameter(torch.ones(8))
    published = torch.ones(8, dtype=dtype)
    optimizer = torch.optim.AdamW([master], eps=1e-4, **options)
    assert final(master, optimizer, published) == pytest.approx(1.125, rel=1e-3)


def fp16_gradient(scale: float) -> Tensor:
    """Gradients of y = x · w in fp16, with values of the loss's own gradient from 2^-30 to 2^-3; (28)."""
    incoming = 2.0 ** torch.arange(-30, -2)
    weight = torch.zeros(28, dtype=torch.float16, requires_grad=True)
    loss = (weight.float() * incoming).sum() * scale
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float16
    return weight.grad


def test_scaling_brings_back_gradients_that_were_zero() -> None:
    plain = fp16_gradient(1.0)
    assert int((plain == 0).sum()) == 6  # 2^-30 to 2^-25
    scaled = fp16_gradient(2.0**10)
    assert not (scaled == 0).any()
    assert torch.equal(scaled.float() / 2.0**10, 2.0 ** torch.arange(-30, -2))
    # Powers of two move the exponent alone: what was representable is not changed by the way there and back.
    assert torch.equal(scaled.float()[6:] / 2.0**10, plain.float()[6:])


def test_small_gradients_train_only_when_scaled() -> None:
    """The same through an optimizer: a weight whose gradient is 2^-27, with and without the scaler."""

    def moved(scale: float) -> float:
        model = nn.Parameter(torch.ones(1, dtype=torch.float16))
        master = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.AdamW([master], lr=0.1, weight_decay=0.0, eps=1e-12, fused=True)
        scaler = LossScaler(initial=scale, ceiling=2.0**24)
        scaler.scaled((model.float() * 2.0**-27).sum()).backward()  # type: ignore[no-untyped-call]
        assert model.grad is not None
        master.grad = model.grad.float()
        clipped_step(optimizer, scaler=scaler)
        assert scaler.overflows.item() == 0
        return master.item()

    assert moved(1.0) == 1.0
    assert moved(2.0**16) == pytest.approx(0.9, abs=1e-4)


def test_65504_bounds_the_scale() -> None:
    assert torch.finfo(torch.float16).max == 65504.0 == (2.0 - 2.0**-10) * 2.0**15
    greatest = 0.125  # of fp16_gradient
    assert fp16_gradient(65504.0 / greatest)[-1].item() == 65504.0
    # Rounding to nearest allows half a last place more, and no further.
    assert fp16_gradient(65519.0 / greatest)[-1].item() == 65504.0
    assert fp16_gradient(65520.0 / greatest)[-1].isinf()


def test_a_scale_beyond_the_bound_overflows_is_skipped_and_comes_down() -> None:
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    scaler = LossScaler(initial=2.0**20)
    for _ in range(6):
        half = weight.detach().half().requires_grad_()
        scaler.scaled((half.float() * 0.5).sum()).backward()
        assert half.grad is not None
        weight.grad = None
        weight.grad_dtype = torch.float32
        weight.grad = half.grad.float()
        clipped_step(optimizer, scaler=scaler)
    # 2^20 · 0.5 and three halvings more are above 65,504; 2^16 · 0.5 is below, and so the last two steps are taken.
    assert scaler.overflows.item() == 4
    assert scaler.scale.item() == 2.0**16
    assert optimizer.state[weight]["step"].item() == 2.0
