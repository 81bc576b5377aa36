"""Which task trains which model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.config.model import PRESETS
from penstock.config.tasks import TaskName, task_name
from penstock.errors import ConfigError
from penstock.tasks import ImageClassification, NextToken, task_of


def test_a_family_has_a_task_of_its_own() -> None:
    assert isinstance(task_of(PRESETS["vit-s16"]), ImageClassification)
    assert isinstance(task_of(PRESETS["gpt2"]), NextToken)


@pytest.mark.parametrize(
    ("task", "model"), [("images", "gpt2"), ("next_token", "t5-small"), ("pairs", "vit-s16")]
)
def test_a_task_of_another_family_is_refused(task: TaskName, model: str) -> None:
    with pytest.raises(ConfigError, match=rf"task is {task}, for models such as [\w-]+, but .* use task "):
        task_name(PRESETS[model], task)


def test_a_model_whose_experts_are_given_has_no_task() -> None:
    assert isinstance(task_of(PRESETS["mixtral-8x7b"]), NextToken)
    with pytest.raises(ConfigError, match=r"which only the tasks translation and denoise provide"):
        task_of(replace(PRESETS["gpt-tiny"], experts=2, router="given"))  # type: ignore[call-arg]
