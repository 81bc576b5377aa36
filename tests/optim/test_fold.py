"""Kernels of torch that are known to be wrong are found out, and those that are right are left alone."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from penstock.config.run import Recipe
from penstock.errors import ConfigError
from penstock.optim import contiguous, learning_rate
from penstock.optim.clip import fused_sgd_works, loses_updates, spoils_momentum, steps_by_sgd


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fused_sgd_is_tried(dtype: torch.dtype) -> None:
    moved = []
    for fused in (False, True):
        weight = Parameter(torch.linspace(-1, 1, 100).to(dtype))
        weight.grad = torch.ones_like(weight)
        torch.optim.SGD([weight], lr=0.25, fused=fused, foreach=False).step()
        moved.append(weight.detach().float())
    assert fused_sgd_works(dtype) == torch.allclose(moved[0], moved[1], atol=0.01)
    optimizer = torch.optim.SGD([Parameter(torch.zeros(4, dtype=dtype))], fused=True)
    assert loses_updates(optimizer) != fused_sgd_works(dtype)


def test_other_optimizers_are_not_suspected() -> None:
    weight = Parameter(torch.zeros(64, dtype=torch.bfloat16))
    assert not loses_updates(torch.optim.AdamW([weight], fused=True))
    assert not loses_updates(torch.optim.SGD([weight], fused=False))
    assert not spoils_momentum(torch.optim.AdamW([weight], fused=True))
    assert steps_by_sgd(contiguous(torch.optim.SGD, [Parameter(torch.zeros(4))]))
    assert not steps_by_sgd(contiguous(torch.optim.AdamW, [Parameter(torch.zeros(4))]))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_skipped_step_leaves_momentum_alone_on_a_cpu(momentum: float) -> None:
    weight = Parameter(torch.ones(64))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=momentum, fused=True)
    assert not spoils_momentum(optimizer)
    for found, gradient in ((0.0, 1.0), (1.0, float("inf"))):
        before = (weight.detach().clone(), dict(optimizer.state[weight]))
        state = {k: v.clone() for k, v in before[1].items() if v is not None}
        weight.grad = torch.full_like(weight, gradient)
        optimizer.found_inf = torch.tensor(found)  # type: ignore[attr-defined]
        optimizer.step()
    assert torch.equal(weight, before[0])
    for key, value in state.items():
        assert torch.equal(value, optimizer.state[weight][key])


@pytest.mark.gpu
def test_momentum_on_cuda_goes_through_the_host_unless_torch_has_mended_it() -> None:
    weight = Parameter(torch.ones(64, device="cuda"))
    assert spoils_momentum(torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=True))
    assert not spoils_momentum(torch.optim.SGD([weight], lr=0.1, fused=True))


# The learning-rate curve.


def test_equals_torchs_cosine() -> None:
    recipe = Recipe(lr=0.3, warmup_steps=0)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)
    for step in range(30):
        assert learning_rate(step, recipe, 30) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-6)
        optimizer.step()
        scheduler.step()


def test_a_warm_up_may_be_a_share_of_the_run_and_fits_into_it() -> None:
    share = Recipe(lr=1.0, warmup_share=0.1)
    assert [learning_rate(s, share, 40) for s in range(40)] == [
        learning_rate(s, Recipe(lr=1.0, warmup_steps=4), 40) for s in range(40)
    ]
    with pytest.raises(ConfigError, match=r"warmup_steps is 2 and recipe\.warmup_share is 0\.5"):
        Recipe(lr=1.0, warmup_steps=2, warmup_share=0.5)
    with pytest.raises(ConfigError, match=r"warmup_share is 10 steps, but the run has 10 steps"):
        learning_rate(0, Recipe(warmup_share=1.0), 10)
    with pytest.raises(ConfigError, match="fewer than 10"):
        learning_rate(0, Recipe(warmup_steps=10), 10)
