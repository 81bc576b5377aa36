"""The learning-rate curve."""

from __future__ import annotations

import itertools

import pytest
import torch

from penstock.config.run import Recipe
from penstock.errors import ConfigError
from penstock.optim import learning_rate, set_learning_rate


def test_warms_up_and_comes_down() -> None:
    recipe = Recipe(lr=1.0, min_lr=0.1, warmup_steps=4)
    curve = [learning_rate(step, recipe, 24) for step in range(26)]
    assert curve[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert curve[14] == pytest.approx(0.55)  # half-way down
    assert all(a >= b for a, b in itertools.pairwise(curve[4:]))
    assert curve[23] == pytest.approx(0.1, abs=0.01)
    assert curve[24] == curve[25] == pytest.approx(0.1)


def test_equals_torchs_cosine() -> None:
    recipe = Recipe(lr=0.3, warmup_steps=0)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)
    for step in range(30):
        assert learning_rate(step, recipe, 30) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-6)
        optimizer.step()
        scheduler.step()


def test_a_warm_up_longer_than_the_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="fewer than 10"):
        learning_rate(0, Recipe(warmup_steps=10), 10)


def test_a_warm_up_may_be_a_share_of_the_run() -> None:
    share = Recipe(lr=1.0, warmup_share=0.1)
    assert [learning_rate(s, share, 40) for s in range(40)] == [
        learning_rate(s, Recipe(lr=1.0, warmup_steps=4), 40) for s in range(40)
    ]
    with pytest.raises(ConfigError, match=r"warmup_steps is 2 and recipe\.warmup_share is 0\.5"):
        Recipe(lr=1.0, warmup_steps=2, warmup_share=0.5)
    with pytest.raises(ConfigError, match=r"warmup_share is 10 steps, but the run has 10 steps"):
        learning_rate(0, Recipe(warmup_share=1.0), 10)


def test_groups_keep_their_scale() -> None:
    groups = [{"params": [torch.zeros(1)]}, {"params": [torch.zeros(1)], "lr_scale": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    set_learning_rate(optimizer, 0.2)
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.1]
