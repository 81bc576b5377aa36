"""A whole climb on real images, from the command line to the page; and with models of one's own."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.toy import toy_machine
from penstock.cli import main
from penstock.config.plan import Plan
from penstock.ladder import LadderReport, ladder

MODEL = ["--model.width", "48", "--model.depth", "2", "--model.heads", "2", "--model.mlp_width", "96"]
SHORT: dict[str, Any] = {"rounds": 2, "round_seconds": 0.01, "loss_steps": 4, "device": "cpu"}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A Machine file, so that nothing is probed; and races that end undecided."""
    monkeypatch.setattr("penstock.ladder.measure.Models.most_rounds", 2)
    return toy_machine(tmp_path)


@pytest.mark.sweep
def test_the_ladder_of_a_tiny_vision_transformer(
    machine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "ladder"
    options = [
        "--rounds", "2", "--round_seconds", "0.01", "--loss_steps", "4", "--batch", "16", "--device", "cpu",
    ]  # fmt: skip
    words = ["ladder", "vit-digits", "--model.classifier", "token", *MODEL, *options, "--machine", machine]
    assert main([*words, "--skip", "compile", "--output", str(out)]) == 0

    found = json.loads((out / "ladder.json").read_text(encoding="utf-8"))
    rungs = {rung["name"]: rung for rung in found["rungs"]}
    measured = {name for name, rung in rungs.items() if rung["to_baseline"] is not None}
    assert measured >= {
        "baseline", "optimizer-fused", "classifier", "batch-x2", "batch-x4", "image", "whole-half",
    }  # fmt: skip
    assert {rungs[name]["status"] for name in rungs.keys() - measured} <= {"unsupported", "not run"}
    for name in measured:
        rung = rungs[name]
        assert rung["samples_per_second"]["value"] > 0
        assert name == "baseline" or rung["forecast"]["to_previous"] > 0
    for name in ("baseline", *found["same"]["rungs"], "classifier", "batch-x2"):
        assert rungs[name]["memory_bytes"] > 100_000
    steps = [rungs[name]["to_previous"]["value"] for name in found["same"]["rungs"]]
    assert math.prod(steps) == pytest.approx(found["speedup"])
    control = found["control"]["ratio"]  # the baseline against itself
    assert 0 < control["low"] <= control["value"] <= control["high"]
    assert found["candidates"] > 100
    assert found["noise"]["deviation"] > 0
    assert len(found["noise"]["seeds"]) == 3
    assert Plan.parse(found["plan"]).line() == found["plan"]

    html = (out / "ladder.html").read_text(encoding="utf-8")
    assert html.count("<svg") == 8  # each for a screen and a telephone
    told = capsys.readouterr().out.splitlines()
    assert found["train_command"] in told
    assert found["train_command"].startswith("penstock train vit-digits")
    assert f'--plan "{found["plan"]}"' in found["train_command"]
    assert found["fastest"] is None or found["fastest"]["train_command"] in told


def _perceptron() -> tuple[nn.Module, Any, Any]:
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
    batch = (torch.randn(8, 16), torch.arange(8) % 4)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]).float(), batch[1])

    return model, batch, loss


def test_the_ladder_of_a_perceptron(machine: str) -> None:
    rungs = ("matmul", "optimizer-fused", "optimizer-contiguous", "classifier", "token-order", "attention-plain",
             "batch-x2", "image")  # fmt: skip
    report = ladder(factory=_perceptron, rungs=rungs, machine=machine, **SHORT)
    status = _status(report)
    assert {status[name] for name in ("classifier", "token-order", "attention-plain", "image")} == {
        "unsupported"
    }
    for name in ("matmul", "optimizer-fused", "optimizer-contiguous", "batch-x2"):
        rung = next(rung for rung in report.rungs if rung.name == name)
        assert rung.measured, rung.reason
        assert rung.forecast is not None
    assert next(rung for rung in report.rungs if rung.name == "batch-x2").loss_difference is not None
    assert report.unit == "samples"
    assert "penstock.build" in report.train_command


def test_a_factory_may_be_given_as_the_model(
    machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "given_as_model.py").write_text(
        "from torch import nn, ones\n"
        "def factory():\n"
        "    return nn.Linear(4, 1), ones(2, 4), lambda model, batch: model(batch).square().mean()\n"
    )
    monkeypatch.chdir(tmp_path)
    words = [
        "ladder", "--model", "given_as_model:factory", "--rungs", "matmul", "--loss_steps", "0", "--rounds",
        "2",
    ]  # fmt: skip
    assert main([*words, "--round_seconds", "0.001", "--machine", machine, "--device", "cpu"]) == 0
    found = json.loads(Path("runs/ladder/ladder.json").read_text(encoding="utf-8"))
    assert found["title"] == "given_as_model:factory"
    assert found["command"].startswith("penstock ladder --model given_as_model:factory")
    assert found["noise"] is None


def test_a_rung_that_does_not_exist_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ladder", "vit-digits", "--rungs", "matmull"]) == 2
    assert "Did you mean 'matmul'?" in capsys.readouterr().err


def _status(report: LadderReport) -> dict[str, str]:
    return {rung.name: rung.status for rung in report.rungs}
