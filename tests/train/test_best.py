"""The step that evaluates best is kept and exported, patience ends a run, and a run goes on for longer than planned."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from helpers.runs import events_of
from helpers.toy import desk
from penstock import checkpoint
from penstock.checkpoint.reader import open_verified
from penstock.config.model import ViTConfig
from penstock.config.plan import Plan
from penstock.config.run import Augment, Recipe, RunConfig
from penstock.errors import ConfigError
from penstock.optim import learning_rate
from penstock.tasks import ImageClassification
from penstock.train import train
from penstock.train.metrics import read_metrics

SCORES = (0.1, 0.5, 0.3, 0.2)
MODEL = ViTConfig(
    image_size=8, patch_size=4, channels=1, width=8, depth=1, heads=2, mlp_width=16, classes=10,
    classifier="pooled",
)  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """Eight steps of 32 digits."""
    return RunConfig(
        model=MODEL, plan=Plan(micro_batch=32), machine=desk(tmp_path), output=str(tmp_path / "run"),
        device="cpu", checkpoint_every=100, log_every=2,
        recipe=Recipe(steps=8, lr=3e-3, warmup_steps=2, ema_decay=0.9, augment=Augment(flip=0.0)),
    )  # fmt: skip


@pytest.fixture
def scored(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """Evaluations after every second step, with `SCORES` in their order."""
    score_evaluations(monkeypatch, SCORES)
    every_second = 2 * 32 / 1442
    return replace(
        config, checkpoint_every=100, recipe=replace(config.recipe, eval_every_epochs=every_second)
    )


def score_evaluations(monkeypatch: pytest.MonkeyPatch, scores: Sequence[float]) -> None:
    left, original = itertools.cycle(scores), ImageClassification.metrics

    def metrics(task: Any, samples: int, sums: Sequence[float]) -> dict[str, float]:
        return original(task, samples, sums) | {"top1": next(left)}

    monkeypatch.setattr(ImageClassification, "metrics", metrics)


def exported(result: Any) -> Any:
    return load_file(result.export / "model.safetensors")


def kept(config: RunConfig) -> list[int]:
    return checkpoint.steps(Path(config.output) / "checkpoints")


def test_the_best_is_kept_beside_the_last_two_and_exported(scored: RunConfig) -> None:
    every_step = replace(scored, checkpoint_every=1)
    result = train(every_step)
    assert (result.exported, result.steps, result.evaluation.top1) == (4, 8, 0.5)
    assert kept(every_step) == [4, 7, 8]
    averages = open_verified(Path(every_step.output) / "checkpoints" / "step-4").load().weights["ema"]
    head = next(name for name in exported(result) if name.endswith(("classifier.bias", "head.bias")))
    assert exported(result)[head].equal(averages["head.bias"])


def test_the_best_is_saved_where_no_checkpoint_was_due(scored: RunConfig) -> None:
    result = train(scored)
    assert (result.exported, kept(scored)) == (4, [4, 8])
    last = train(replace(scored, export_best=False, output=scored.output + "-last"), callbacks=())
    assert last.exported == last.steps == 8


def test_a_best_step_within_seconds_of_a_checkpoint_waits_in_memory(scored: RunConfig) -> None:
    unasked = replace(scored, checkpoint_every=0)
    result = train(unasked)
    assert (result.exported, kept(unasked)) == (4, [4, 8])
    saved = [record["step"] for record in read_metrics(result.metrics) if record["event"] == "checkpoint"]
    assert saved == [8], "the run takes less than ten seconds"


def test_patience_ends_a_run_and_the_same_command_adds_nothing(
    scored: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient = replace(scored, recipe=replace(scored.recipe, patience=1))
    result = train(patient)
    assert (result.steps, result.exported, result.evaluation.top1) == (6, 4, 0.5)
    assert ("patience", 6) in events_of(patient.output)
    again = train(patient)
    assert (again.resumed_at, again.steps, again.exported) == (6, 6, 4)
    score_evaluations(monkeypatch, (0.9,))
    on = train(replace(patient, recipe=replace(patient.recipe, patience=0)))
    assert (on.resumed_at, on.steps, on.exported) == (6, 8, 8)


@pytest.mark.parametrize("longer", ["stretch", "restart"])
def test_a_finished_run_goes_on_with_a_schedule_that_is_asked_for(config: RunConfig, longer: Any) -> None:
    train(config)
    with pytest.raises(ConfigError, match=r"(?s)recipe\.steps is 12, .* --recipe\.longer stretch, or"):
        train(replace(config, recipe=replace(config.recipe, steps=12)))
    planned = replace(config, recipe=replace(config.recipe, steps=12, longer=longer))
    result = train(planned)
    assert (result.resumed_at, result.steps) == (8, 12)
    rates = {r["step"]: r["lr"] for r in read_metrics(result.metrics) if r["event"] == "steps"}
    assert rates[10] == pytest.approx(learning_rate(9, planned.recipe, 12, 8 if longer == "restart" else 0))
    assert rates[10] > rates[8]
    assert train(planned).resumed_at == 12, "it is finished"
    with pytest.raises(ConfigError, match="has done 12 steps already"):
        train(replace(planned, recipe=replace(planned.recipe, steps=9)))
