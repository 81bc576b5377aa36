"""The predicted climb: of the rungs of the ladder, for machines that nobody has here."""

from __future__ import annotations

import json
import math

import pytest

from penstock.cli import main
from penstock.config.machine import load_machine
from penstock.config.model import PRESETS
from penstock.errors import ConfigError, ExitCode, OutOfMemory
from penstock.ladder.predicted import predicted_climb
from penstock.ladder.rungs import all_rungs
from penstock.planner.prediction import predict


@pytest.mark.parametrize(
    ("model", "machine", "gpus", "first"),
    [("vit-s16", "a100-40g", 1, ""), ("gpt2", "h100", 4, "dp=4"), ("vit-s16", "tpu-v5p", 1, "precision=O1")],
)
def test_each_rung_builds_on_those_before_it_and_shares_add_up(
    model: str, machine: str, gpus: int, first: str
) -> None:
    """A TPU has no fp32 in its datasheet, so that its climb begins in bf16."""
    config, chip = PRESETS[model], load_machine(machine)
    rungs = predicted_climb(config, chip, gpus=gpus)
    path = [one for one in rungs if one.kept]
    choices = [next(rung.alternatives for rung in all_rungs() if rung.name == one.name) for one in path]
    every = list(dict.fromkeys(rung.alternatives for rung in all_rungs()))
    assert rungs[0].name == "baseline"
    assert {word for word in rungs[0].prediction.plan.line().split() if "micro" not in word} == set(
        first.split()
    )
    assert len(path) >= 2
    assert [every.index(choice) for choice in choices] == sorted({every.index(choice) for choice in choices})
    assert math.prod(one.to_previous for one in path) == pytest.approx(path[-1].to_baseline)
    assert sum(one.share for one in path) == pytest.approx(1.0)
    for one in path:
        assert one.to_previous >= 1.005
        assert one.prediction.fits
        assert one.prediction == predict(config, chip, one.prediction.plan)
    others = [one for one in rungs[1:] if not one.kept]
    assert {"batch-x2", "compress-depth"} <= {one.name for one in others}
    for one in others:
        ratio = one.to_baseline / path[-1].to_baseline
        assert one.name == "image" or one.to_previous == pytest.approx(ratio)


def test_a_batch_that_memory_does_not_hold_is_recomputed() -> None:
    climb = predicted_climb(PRESETS["gpt2-large"], load_machine("rtx-4090"))
    larger = {one.name: one for one in climb if one.name.startswith("batch-x2")}
    kept, again = larger["batch-x2"], larger["batch-x2-recomputed"]
    assert (kept.prediction.fits, again.prediction.fits) == (False, True)
    assert "recompute=elementwise" in again.change
    assert kept.to_previous > again.to_previous > 1.05


def test_a_climb_that_cannot_begin_says_why() -> None:
    with pytest.raises(OutOfMemory, match="does not fit with 1 samples a device"):
        predicted_climb(PRESETS["gpt-175b"], load_machine("h100"))
    with pytest.raises(ConfigError, match="9 samples a step cannot be shared evenly by 2"):
        predicted_climb(PRESETS["gpt2"], load_machine("h100"), gpus=2, global_batch=9)


def test_the_command_shows_the_climb_and_refuses_what_it_does_not_use(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["plan", "vit-s16", "--machine", "a100-40g", "--ladder"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "vit-s16 on 1 a100-40g" in out
    heads = out.splitlines()[1].split()
    assert heads[:3] == ["rung", "a", "step"]
    assert "share" in heads
    assert "all together: " in out
    assert main([*words, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["rungs"][0]["to_previous"] == 1
    assert sum(one["share"] for one in data["rungs"]) == pytest.approx(1)
    assert main([*words, "--tokens", "1e9"]) == ExitCode.CONFIG
    assert "--ladder was given with --tokens" in capsys.readouterr().err
