"""What a run does about losses that are not finite or jump up: skip, go back, or end."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.runs import cut_in_step, events_of, records_of
from helpers.toy import desk
from penstock import checkpoint
from penstock.config.model import ViTConfig
from penstock.config.plan import Plan
from penstock.config.run import Recipe, RunConfig
from penstock.errors import NumericError
from penstock.train import loop, train
from penstock.train.loss_monitor import HISTORY, PATIENCE, PendingSteps, SpikeDetector, StepSkipper


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """80 quick steps; a spike can be told from step 51 on."""
    model = ViTConfig(
        image_size=8, patch_size=4, channels=1, width=8, depth=1, heads=1, mlp_width=16, classes=10
    )  # fmt: skip
    return RunConfig(
        model=model, recipe=Recipe(steps=80, lr=1e-3, eval_every_epochs=1000.0), plan=Plan(micro_batch=8),
        machine=desk(tmp_path), output=str(tmp_path / "run"),
        device="cpu", checkpoint_every=20, log_every=4,
    )  # fmt: skip


@pytest.fixture
def disturbed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], float]], list[list[float]]]:
    """Multiplies the loss of each step by what a function of the step says; returns the weights after each step."""

    def disturb(factor: Callable[[int], float]) -> list[list[float]]:
        original, weights = loop._Run._train_step, []

        def step(run: Any) -> None:
            runner = run.built.step.runner
            by, plain = factor(run.step + 1), runner.loss
            runner.loss = lambda model, batch: plain(model, batch) * by
            original(run)
            runner.loss = plain
            flat = torch.cat([p.detach().flatten() for p in run.built.model.parameters()])
            weights.append(flat.tolist())

        monkeypatch.setattr(loop._Run, "_train_step", step)
        return weights

    return disturb


@pytest.mark.parametrize("optimizer", ["loop", "fused", "contiguous"])
def test_a_step_that_is_not_finite_is_skipped(config: RunConfig, disturbed: Any, optimizer: Any) -> None:
    weights = disturbed(lambda step: float("nan") if step == 6 else 1.0)
    plan = replace(config.plan, optimizer=optimizer)
    train(replace(config, plan=plan, recipe=replace(config.recipe, steps=12)))
    assert weights[4] == weights[5] != weights[6]
    losses = [loss for record in records_of(config.output, "steps") for loss in record["losses"]]
    assert [step for step, loss in enumerate(losses, start=1) if loss is None] == [6]
    assert [record.get("skipped") for record in records_of(config.output, "steps")] == [None, 1, None]


def test_a_spike_is_logged_and_taken(
    config: RunConfig, disturbed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    weights = disturbed(lambda step: 50.0 if step == 62 else 1.0)
    train(config)
    assert weights[60] != weights[61]
    assert [record["spikes"] for record in records_of(config.output, "steps") if "spikes" in record] == [[62]]
    assert "The loss had spikes at steps 62." in caplog.text


def test_a_spike_is_skipped_if_wished(config: RunConfig, disturbed: Any) -> None:
    weights = disturbed(lambda step: 50.0 if step == 62 else 1.0)
    train(replace(config, recipe=replace(config.recipe, spikes="skip")))
    assert weights[60] == weights[61] != weights[62]
    assert [r["skipped"] for r in records_of(config.output, "steps") if "skipped" in r] == [1]


def test_a_spike_sends_the_run_back_and_on_with_later_samples(config: RunConfig, disturbed: Any) -> None:
    spikes = iter([50.0])
    weights = disturbed(lambda step: next(spikes, 1.0) if step == 62 else 1.0)
    rewinding = replace(config, recipe=replace(config.recipe, spikes="rewind"))
    result = train(rewinding)
    assert result.steps == 80
    (rewind,) = records_of(config.output, "rewind")
    assert (rewind["step"], rewind["spikes"], rewind["number"]) == (60, [62], 1)
    assert len(weights) == 84, "steps 61 to 64 were taken twice"
    assert weights[64] != weights[60], "on other samples"
    windows = records_of(config.output, "steps")
    assert [record["step"] for record in windows] == sorted({record["step"] for record in windows})
    state = checkpoint.find(Path(config.output) / "checkpoints")
    assert state is not None
    assert state.load().state["watch"]["rewinds"] == 1


def test_a_run_that_goes_back_to_where_it_resumed_has_recorded_that(
    config: RunConfig, disturbed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    spikes = iter([50.0, 50.0])
    disturbed(lambda step: next(spikes, 1.0) if step == 62 else 1.0)
    rewinding = replace(config, recipe=replace(config.recipe, spikes="rewind"))
    with cut_in_step(monkeypatch, 63), pytest.raises(KeyboardInterrupt):
        train(rewinding)
    train(rewinding)
    assert {("resume", 60), ("prediction", 60), ("rewind", 60)} <= {*events_of(config.output)}


def test_a_run_does_not_go_back_for_ever(config: RunConfig, disturbed: Any) -> None:
    disturbed(lambda step: 50.0 if step == 62 else 1.0)
    with pytest.raises(NumericError, match=r"had a spike at step 62 after the run had gone back .* 3 times"):
        train(replace(config, recipe=replace(config.recipe, spikes="rewind")))


# Losses wait on the device for the log, and one that is not finite is found there with its step.


def test_every_loss_comes_back_exactly_and_once() -> None:
    pending = PendingSteps(4, torch.device("cpu"))
    losses = torch.rand(3)
    for loss in losses:
        pending.add(loss, loss * 2)
    assert len(pending) == 3
    read, grad_norm = pending.read(step=3)
    assert torch.equal(torch.tensor(read), losses)
    assert grad_norm == float(losses[2] * 2)
    assert len(pending) == 0
    pending.add(torch.tensor(1.0), None)
    assert pending.read(step=4) == ([1.0], None)
    assert pending.read(step=4) == ([], None)


def test_half_precision_losses_are_kept_in_full() -> None:
    pending = PendingSteps(1, torch.device("cpu"))
    pending.add(torch.tensor(1.5, dtype=torch.bfloat16), None)
    assert pending.read(step=1) == ([1.5], None)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_first_step_that_is_not_finite_is_named(bad: float) -> None:
    pending = PendingSteps(10, torch.device("cpu"))
    for loss in (1.0, 2.0, bad, 3.0, math.nan):
        pending.add(torch.tensor(loss), None)
    with pytest.raises(NumericError, match=f"became {bad} at step 18 .*steps 16 to 20") as caught:
        pending.read(step=20)
    assert caught.value.exit_code == 6
    assert "lower recipe.lr" in str(caught.value)


# Steps that are not finite are skipped, three in a row lose the run, and spikes of the loss are seen.


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
