"""Settling the machine before a run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from penstock.config.plan import Plan
from penstock.config.run import Recipe, RunConfig
from penstock.errors import ConfigError
from penstock.train.prepare import Calendar, machine_of


def test_a_machine_of_the_other_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="h100 is a cuda machine, but the run is on cpu"):
        machine_of(RunConfig(machine="h100"), torch.device("cpu"))
    assert machine_of(RunConfig(machine="h100"), torch.device("cuda")).name == "h100"


# When a run evaluates, saves and logs.


def schedule(samples: int = 100, **changes: object) -> Calendar:
    recipe = Recipe(epochs=3, eval_every_epochs=1.5)
    config = RunConfig(recipe=recipe, plan=Plan(micro_batch=4, accumulate=2), log_every=5)
    return Calendar(replace(config, **changes), samples)  # type: ignore[arg-type]


def steps(test: object, total: int) -> list[int]:
    return [step for step in range(1, total + 1) if test(step)]  # type: ignore[operator]


def test_epochs_end_where_their_last_sample_is_used() -> None:
    plan = schedule()
    assert plan.total == 38  # 300 samples at 8 a step is 37.5
    assert steps(plan.saves, 38) == [13, 25, 38]
    assert steps(plan.evaluates, 38) == [19, 38]
    assert steps(plan.logs, 38) == [5, 10, 13, 15, 19, 20, 25, 30, 35, 38]
    assert plan.epoch(25) == 2.0


def test_steps_override_epochs_and_intervals_count_steps() -> None:
    plan = schedule(recipe=Recipe(steps=20, eval_every_epochs=9), checkpoint_every=8)
    assert plan.total == 20
    assert steps(plan.saves, 20) == [8, 16, 20]
    assert steps(plan.evaluates, 20) == [20]


def test_an_epoch_shorter_than_a_step_saves_every_step() -> None:
    plan = schedule(samples=3)
    assert steps(plan.saves, plan.total) == list(range(1, plan.total + 1))


def test_a_run_without_steps_says_what_to_change() -> None:
    with pytest.raises(ConfigError, match=r"no steps: recipe\.epochs 0\.001 of 100 samples at 8 a step"):
        schedule(recipe=Recipe(epochs=0.001))
