"""Settling machine, classes and places before a run."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.config.model import PRESETS, ViTConfig
from penstock.config.run import RunConfig
from penstock.errors import ConfigError
from penstock.train.prepare import machine_of, open_sources, set_aside, with_classes


def test_a_machine_of_the_other_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="h100 is a cuda machine, but the run is on cpu"):
        machine_of(RunConfig(machine="h100"), torch.device("cpu"))
    assert machine_of(RunConfig(machine="h100"), torch.device("cuda")).name == "h100"


def test_a_default_number_of_classes_follows_the_data_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    config = RunConfig(model=ViTConfig(image_size=16))
    train, val = open_sources(config)
    assert len(train) + len(val) == 1797
    with caplog.at_level(logging.WARNING):
        assert with_classes(config, train).model == replace(config.model, classes=10)
    assert "model.classes is set to 10" in caplog.text


def test_a_chosen_number_of_classes_must_be_the_datas() -> None:
    config = RunConfig(model=replace(PRESETS["vit-digits"], classes=12))
    with pytest.raises(ConfigError, match=r"Set model\.classes to 10"):
        with_classes(config, open_sources(config)[0])


def test_what_was_there_is_kept_under_a_free_name(tmp_path: Path) -> None:
    for content in ("first", "second"):
        (tmp_path / "metrics.jsonl").write_text(content)
        set_aside(tmp_path / "metrics.jsonl")
    set_aside(tmp_path / "absent")
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == {"metrics.before-1.jsonl": "first", "metrics.before-2.jsonl": "second"}
