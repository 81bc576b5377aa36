"""Settling machine and places before a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.config.run import RunConfig
from penstock.errors import ConfigError
from penstock.train.prepare import machine_of, set_aside


def test_a_machine_of_the_other_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="h100 is a cuda machine, but the run is on cpu"):
        machine_of(RunConfig(machine="h100"), torch.device("cpu"))
    assert machine_of(RunConfig(machine="h100"), torch.device("cuda")).name == "h100"


def test_what_was_there_is_kept_under_a_free_name(tmp_path: Path) -> None:
    for content in ("first", "second"):
        (tmp_path / "metrics.jsonl").write_text(content)
        set_aside(tmp_path / "metrics.jsonl")
    set_aside(tmp_path / "absent")
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == {"metrics.before-1.jsonl": "first", "metrics.before-2.jsonl": "second"}
