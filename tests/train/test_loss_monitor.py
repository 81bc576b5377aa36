"""What a run does about losses that are not finite or jump up: skip, go back, or end."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import checkpoint
from penstock.config.machine import Machine, save_machine
from penstock.config.model import ViTConfig
from penstock.config.plan import Plan
from penstock.config.run import Recipe, RunConfig
from penstock.errors import NumericError
from penstock.train import loop, train


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """80 quick steps; a spike can be told from step 51 on."""
    machine = Machine(
        name="desk", device="cpu", source="measured", peak_flops={"fp32": 1e11}, launch_seconds=1e-6
    )  # fmt: skip
    model = ViTConfig(
        image_size=8, patch_size=4, channels=1, width=8, depth=1, heads=1, mlp_width=16, classes=10
    )  # fmt: skip
    return RunConfig(
        model=model, recipe=Recipe(steps=80, lr=1e-3, eval_every_epochs=1000.0), plan=Plan(micro_batch=8),
        machine=str(save_machine(machine, tmp_path / "machine.json")), output=str(tmp_path / "run"),
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


def records(config: RunConfig, event: str) -> list[dict[str, Any]]:
    lines = (Path(config.output) / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == event]


@pytest.mark.parametrize("optimizer", ["loop", "fused", "contiguous"])
def test_a_step_that_is_not_finite_is_skipped(config: RunConfig, disturbed: Any, optimizer: Any) -> None:
    weights = disturbed(lambda step: float("nan") if step == 6 else 1.0)
    plan = replace(config.plan, optimizer=optimizer)
    train(replace(config, plan=plan, recipe=replace(config.recipe, steps=12)))
    assert weights[4] == weights[5] != weights[6]
    losses = [loss for record in records(config, "steps") for loss in record["losses"]]
    assert [step for step, loss in enumerate(losses, start=1) if loss is None] == [6]
    assert [record.get("skipped") for record in records(config, "steps")] == [None, 1, None]


def test_a_spike_is_logged_and_taken(
    config: RunConfig, disturbed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    weights = disturbed(lambda step: 50.0 if step == 62 else 1.0)
    train(config)
    assert weights[60] != weights[61]
    assert [record["spikes"] for record in records(config, "steps") if "spikes" in record] == [[62]]
    assert "The loss had spikes at steps 62." in caplog.text


def test_a_spike_is_skipped_if_wished(config: RunConfig, disturbed: Any) -> None:
    weights = disturbed(lambda step: 50.0 if step == 62 else 1.0)
    train(replace(config, recipe=replace(config.recipe, spikes="skip")))
    assert weights[60] == weights[61] != weights[62]
    assert [r["skipped"] for r in records(config, "steps") if "skipped" in r] == [1]


def test_a_spike_sends_the_run_back_and_on_with_later_samples(config: RunConfig, disturbed: Any) -> None:
    spikes = iter([50.0])
    weights = disturbed(lambda step: next(spikes, 1.0) if step == 62 else 1.0)
    rewinding = replace(config, recipe=replace(config.recipe, spikes="rewind"))
    result = train(rewinding)
    assert result.steps == 80
    (rewind,) = records(config, "rewind")
    assert (rewind["step"], rewind["spikes"], rewind["number"]) == (60, [62], 1)
    assert len(weights) == 84, "steps 61 to 64 were taken twice"
    assert weights[64] != weights[60], "on other samples"
    windows = records(config, "steps")
    assert [record["step"] for record in windows] == sorted({record["step"] for record in windows})
    state = checkpoint.find(Path(config.output) / "checkpoints")
    assert state is not None
    assert state.load().state["watch"]["rewinds"] == 1


def test_a_run_does_not_go_back_for_ever(config: RunConfig, disturbed: Any) -> None:
    disturbed(lambda step: 50.0 if step == 62 else 1.0)
    with pytest.raises(NumericError, match=r"had a spike at step 62 after the run had gone back .* 3 times"):
        train(replace(config, recipe=replace(config.recipe, spikes="rewind")))
