"""Losses wait on the device for the log, and one that is not finite is found there with its step."""

from __future__ import annotations

import math

import pytest
import torch

from penstock.errors import NumericError
from penstock.train.loss_monitor import PendingSteps


def test_every_loss_comes_back_exactly_and_once() -> None:
    pending = PendingSteps(4, torch.device("cpu"))
    losses = torch.rand(3)
    for loss in losses:
        pending.add(loss, loss * 2)
    assert len(pending) == 3
    read = pending.read(step=3)
    assert torch.equal(torch.tensor(read.losses), losses)
    assert read.grad_norm == float(losses[2] * 2)
    assert len(pending) == 0
    pending.add(torch.tensor(1.0), None)
    assert pending.read(step=4).losses == [1.0]
    assert pending.read(step=4).losses == []


def test_half_precision_losses_are_kept_in_full() -> None:
    pending = PendingSteps(1, torch.device("cpu"))
    pending.add(torch.tensor(1.5, dtype=torch.bfloat16), None)
    read = pending.read(step=1)
    assert (read.losses, read.grad_norm) == ([1.5], None)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_first_step_that_is_not_finite_is_named(bad: float) -> None:
    pending = PendingSteps(10, torch.device("cpu"))
    for loss in (1.0, 2.0, bad, 3.0, math.nan):
        pending.add(torch.tensor(loss), None)
    with pytest.raises(NumericError, match=f"became {bad} at step 18 .*steps 16 to 20") as caught:
        pending.read(step=20)
    assert caught.value.exit_code == 6
    assert "lower recipe.lr" in str(caught.value)
