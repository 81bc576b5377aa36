"""Settling the machine before a run."""

from __future__ import annotations

import pytest
import torch

from penstock.config.run import RunConfig
from penstock.errors import ConfigError
from penstock.train.prepare import machine_of


def test_a_machine_of_the_other_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="h100 is a cuda machine, but the run is on cpu"):
        machine_of(RunConfig(machine="h100"), torch.device("cpu"))
    assert machine_of(RunConfig(machine="h100"), torch.device("cuda")).name == "h100"
