"""Steps that are not finite are skipped, three in a row lose the run, and spikes of the loss are seen."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from penstock.errors import NumericError
from penstock.train.loss_monitor import HISTORY, PATIENCE, SpikeDetector, StepSkipper

ONE = torch.tensor(1.0)


def judged(skipper: StepSkipper, *losses: float, norm: Tensor | None = ONE) -> list[int]:
    return [int(skipper(torch.tensor(loss), norm)) for loss in losses]


def noisy(count: int, seed: int = 0) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    found: list[float] = (2.0 + 0.1 * torch.randn(count, generator=generator)).tolist()
    return found


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_or_norm_that_is_not_finite_is_skipped_once(bad: float) -> None:
    skipper = StepSkipper("cpu")
    assert judged(skipper, 1.0, bad, 1.0) == [0, 1, 0]
    assert int(skipper(ONE, torch.tensor(bad))) == 1
    assert judged(skipper, 1.0) == [0]
    assert skipper.require_finite(5) == 2


def test_a_norm_is_left_to_who_scales_the_loss() -> None:
    assert judged(StepSkipper("cpu"), 1.0, norm=None) == [0]


def test_after_three_in_a_row_nothing_more_is_learned() -> None:
    skipper = StepSkipper("cpu")
    assert judged(skipper, *[math.nan] * (PATIENCE - 1), 1.0) == [1] * (PATIENCE - 1) + [0]
    skipper.require_finite(3)
    assert judged(skipper, *[math.nan] * PATIENCE, 1.0, 1.0) == [1] * (PATIENCE + 2)
    with pytest.raises(NumericError, match="By step 8, 3 steps in a row") as caught:
        skipper.require_finite(8)
    assert caught.value.exit_code == 6


def test_a_loss_above_the_limit_is_skipped_and_loses_nothing() -> None:
    skipper = StepSkipper("cpu")
    assert judged(skipper, 9.0) == [0]
    skipper.skip_above(3.0)
    assert judged(skipper, *[9.0] * 5, 3.0, 2.0) == [1] * 5 + [0] * 2
    assert skipper.require_finite(8) == 5


def test_what_is_judged_goes_on_after_a_resume() -> None:
    skipper, resumed = StepSkipper("cpu"), StepSkipper("cpu")
    skipper.skip_above(3.0)
    judged(skipper, math.nan, math.nan)
    resumed.load_state_dict(skipper.state_dict())
    assert judged(resumed, 4.0, math.nan) == [1, 1]
    fresh = StepSkipper("cpu")
    fresh.load_state_dict(StepSkipper("cpu").state_dict())
    assert judged(fresh, 1e30) == [0]


def test_ranks_judge_what_they_share() -> None:
    skipper = StepSkipper("cpu", average=lambda value: (value + math.nan) / 2)  # the other rank's loss
    assert judged(skipper, 1.0) == [1]


@pytest.mark.parametrize("norm", [ONE, None])
def test_the_caller_keeps_its_loss(norm: Tensor | None) -> None:
    loss = torch.tensor(1.0)
    StepSkipper("cpu", average=lambda value: value.mul_(5))(loss, norm)
    assert loss == 1.0


def test_a_spike_is_told_from_noise_and_from_the_first_steps() -> None:
    spikes = SpikeDetector(6.0)
    assert spikes.limit == math.inf
    assert spikes.observe([100.0, *noisy(HISTORY)]) == []
    assert 2.4 < spikes.limit < 2.9
    assert spikes.observe([2.2, 4.0, math.nan, 2.0]) == [1]
    falling = SpikeDetector(6.0)
    for step, loss in enumerate(noisy(400)):
        assert falling.observe([loss + 5.0 * 0.99**step]) == []


def test_losses_without_noise_are_no_reason_to_see_a_spike_in_a_hair() -> None:
    spikes = SpikeDetector(6.0)
    spikes.observe([1.0] * HISTORY)
    assert spikes.observe([1.0005]) == []
    assert spikes.observe([1.1]) == [0]


def test_one_spike_widens_nothing_but_a_new_level_becomes_normal() -> None:
    spikes = SpikeDetector(6.0)
    spikes.observe(noisy(HISTORY))
    before = spikes.limit
    spikes.observe([1000.0])
    assert spikes.limit < 1.5 * before
    for _ in range(300):
        found = spikes.observe([4.0])
    assert found == []


def test_spikes_go_on_after_a_resume() -> None:
    one, other = SpikeDetector(6.0), SpikeDetector(6.0)
    one.observe(noisy(80))
    other.load_state_dict(one.state_dict())
    assert other.limit == one.limit
    one.observe([3.0])
    assert other.limit != one.limit


@pytest.mark.gpu
def test_judging_waits_for_no_device() -> None:
    skipper = StepSkipper("cuda")
    loss = torch.tensor(1.0, device="cuda")
    skipper(loss, loss)
    skipper.skip_above(1.0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        skipper(loss, loss)
        skipper.skip_above(3.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
