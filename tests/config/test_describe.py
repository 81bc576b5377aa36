"""Settings are found in the dataclasses with their words, types and defaults."""

from __future__ import annotations

import pytest

from penstock.config.compress import CompressConfig
from penstock.config.describe import default_word, settings, type_word
from penstock.config.run import RunConfig


def test_every_leaf_is_found_once() -> None:
    keys = [setting.key for setting in settings(RunConfig)]
    assert len(keys) == len(set(keys))
    assert {"seed", "plan", "plan.optimizer", "recipe.augment.flip", "data", "model", "model.width"} <= set(
        keys
    )
    assert "recipe" not in keys, "a part without a short form cannot be given whole"


def test_words() -> None:
    found = {setting.key: setting for setting in settings(RunConfig)}
    assert type_word(found["recipe.clip_norm"].kind) == "FLOAT|none"
    assert type_word(found["data.bad_images"].kind) == "fail|skip"
    assert type_word(found["model.qk_norm"].kind) == "true|false"
    assert default_word(found["model"].default) == "vit-digits"
    assert default_word(found["data"].default) == "auto"
    assert default_word(found["plan"].default) == "baseline"
    assert default_word(found["machine"].default) == "none"
    assert default_word(found["data.columns"].default) == "()"
    assert found["plan.precision"].help.startswith("O0: fp32 throughout.")


@pytest.mark.parametrize("config", [RunConfig, CompressConfig])
def test_every_setting_has_a_description(config: type) -> None:
    assert [setting.key for setting in settings(config) if not setting.help and "." in setting.key] == []
