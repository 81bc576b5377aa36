"""A run that another version of Penstock began goes on as it would have there."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.runs import losses_of, records_of
from helpers.toy import desk
from penstock.checkpoint.tree import pack, unpack
from penstock.config.load import load
from penstock.config.run import RunConfig
from penstock.errors import ConfigError
from penstock.train import train
from penstock.train.run_state import random_state, set_random_state

# Stopped at step 4 of 8 by SIGTERM under version 0.1.0 (commit b2c6164), as were the numbers below taken there.
OLD = Path(__file__).parent / "run-0.1"
LOSSES = [2.292548418045044, 2.281602621078491, 2.3146886825561523, 2.2687015533447266]
TOP1, LOSS = 0.10985915492957747, 2.3061974229946944


def test_a_run_of_the_version_before_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("dropout", "attention"):  # that version drew dropout as torch does
        monkeypatch.setattr(f"penstock.kernels.{module}.dropout", torch.nn.functional.dropout)
    output = tmp_path / "run"
    shutil.copytree(OLD, output)
    settings = output / "run.toml"  # which had both steps and epochs, when steps counted
    with pytest.raises(ConfigError, match=r"recipe\.steps is 8 and recipe\.epochs is 10\.0, .* keep one"):
        load(RunConfig, file=settings)
    settings.write_text(settings.read_text().replace("epochs = 10.0\n", "", 1))
    config = load(RunConfig, file=settings)
    stored = desk(tmp_path)
    torch.set_num_threads(1)
    result = train(replace(config, output=str(output), machine=str(stored)))
    assert result.resumed_at == 4
    losses = losses_of(output)
    assert len(losses) == 8
    assert losses[4:] == pytest.approx(LOSSES, rel=1e-5)  # bit for bit on the machine where they were taken
    evaluations = [(one["step"], one["samples"]) for one in records_of(output, "evaluation")]
    assert evaluations == [(2, 355), (4, 355), (6, 355), (8, 355)]
    assert result.evaluation.top1 == pytest.approx(TOP1, abs=0.003)
    assert result.evaluation.loss == pytest.approx(LOSS, rel=1e-5)


# Random generators go back exactly.


def draw(device: str = "cpu") -> tuple[object, ...]:
    torch_numbers = torch.rand(3).tolist() + torch.rand(3, device=device).tolist()
    return (*torch_numbers, *np.random.rand(3), np.random.randn(), random.random(), random.gauss(0, 1))


def test_all_generators_continue_where_they_were() -> None:
    draw()  # leaves half-used pairs of Gaussians behind
    state = random_state(torch.device("cpu"))
    expected = draw()
    assert draw() != expected
    set_random_state(unpack(*pack(state)), torch.device("cpu"))
    assert draw() == expected


@pytest.mark.gpu
def test_the_devices_generator_continues_too() -> None:
    state = random_state(torch.device("cuda"))
    expected = draw("cuda")
    set_random_state(unpack(*pack(state)), torch.device("cuda"))
    assert draw("cuda") == expected
