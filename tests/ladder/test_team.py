"""Rungs of several processes, with real ones: measured beside a single process, and held to its results."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.toy import toy_machine
from penstock.cli import main
from penstock.config.model import ViTConfig
from penstock.config.plan import Plan
from penstock.errors import ConfigError, EnvironmentProblem, OutOfMemory
from penstock.ladder import LadderReport, RungResult, ladder
from penstock.ladder.measure import ModelContender
from penstock.ladder.own import path_of, redrawn
from penstock.ladder.rung import Setting
from penstock.ladder.settings import LadderConfig
from penstock.ladder.subject import Configured
from penstock.ladder.team import RankFailure, Team

SHORT: dict[str, Any] = {"rounds": 2, "round_seconds": 0.01, "loss_steps": 0, "device": "cpu", "procs": 2}
TINY = ["--model.width", "48", "--model.depth", "2", "--model.heads", "2", "--model.mlp_width", "96"]


@pytest.fixture
def machine(tmp_path: Path) -> str:
    """A Machine file, so that nothing is probed."""
    return toy_machine(tmp_path)


def _rungs(report: LadderReport) -> dict[str, RungResult]:
    return {rung.name: rung for rung in report.rungs}


@pytest.mark.slow
def test_replicas_and_shards_really_run_and_equal_one_process(
    machine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "ladder"
    words = ["ladder", "vit-digits", *TINY, "--procs", "2", "--rungs", "parallel", "--quick"]
    words += ["--batch", "4", "--loss_steps", "0", "--round_seconds", "0.01", "--device", "cpu"]
    words += ["--machine", machine, "--output", str(out)]
    assert main(words) == 0
    found = json.loads((out / "ladder.json").read_text(encoding="utf-8"))
    rungs = {rung["name"]: rung for rung in found["rungs"]}
    assert found["procs"] == 2
    for name in ("parallel-pipeline", "parallel-tensor", "parallel-context", "parallel-ddp", "parallel-fsdp"):
        rung = rungs[name]
        assert rung["status"] in ("offered", "not kept"), rung["reason"]
        assert rung["equality"]["steps"] == 6
        assert rung["equality"]["loss"] < 1e-6
        assert rung["equality"]["norm"] < 1e-5
        assert rung["interleaved"]
        assert rung["forecast"]["to_baseline"] > 0
        assert len(rung["memory_by_rank"]) == 2
        # Predicted from shapes, measured by the profiler: of a model this small, all but a few buffers, whose number
        # depends on which rank waits for the other.
        assert rung["forecast"]["memory_bytes"] == pytest.approx(rung["memory_bytes"], rel=0.2)
    # Of two blocks one is gathered while the other still is: little is left to spare beside one process.
    assert rungs["parallel-fsdp"]["memory_bytes"] < rungs["parallel-ddp"]["memory_bytes"]
    assert rungs["parallel-ddp"]["memory_bytes"] > rungs["baseline"]["memory_bytes"]
    assert "--procs 4" in rungs["parallel-hsdp"]["reason"]

    told = capsys.readouterr().out
    assert "replicas (DDP): equal to one process on the same samples: losses of 6 steps within" in told
    assert "one process computes with" in told
    html = (out / "ladder.html").read_text(encoding="utf-8")
    assert "Several processes" in html
    assert html.count("equal to one process on the same samples") == 5
    assert found["command"].endswith(f"--rungs parallel --procs 2 --quick --device cpu --machine {machine}")


OWN = '''
import os

import torch
from torch import nn


def _made():
    model = nn.Sequential(nn.Linear(8, 16), nn.Sequential(*[nn.Linear(16, 16) for _ in range(2)]), nn.Linear(16, 4))
    return model, (torch.randn(8, 8), torch.arange(8) % 4)


def same():
    return *_made(), lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])


def other():
    """Ranks that do not compute what one process does."""
    scale = 1.0 + float(os.environ.get("RANK", "0"))
    return *_made(), lambda model, batch: scale * nn.functional.cross_entropy(model(batch[0]), batch[1])


def broken():
    if os.environ.get("RANK") == "1":
        raise ValueError("no such file as mine")
    return same()
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "team_of_mine.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    return "team_of_mine"


@pytest.mark.sweep
def test_a_model_of_ones_own_is_held_to_one_process_on_other_samples_per_rank(own: str, machine: str) -> None:
    report = ladder(factory=f"{own}:same", rungs=("parallel-fsdp",), machine=machine, **SHORT)
    fsdp = _rungs(report)["parallel-fsdp"]
    assert fsdp.equality is not None, fsdp.reason
    assert fsdp.equality.loss < 1e-6
    assert "dp=2 sharding=fsdp" in fsdp.plan


@pytest.mark.slow
def test_ranks_that_compute_something_else_are_found_out(own: str, machine: str) -> None:
    report = ladder(factory=f"{own}:other", rungs=("parallel-ddp",), machine=machine, **SHORT)
    ddp = _rungs(report)["parallel-ddp"]
    assert ddp.equality is not None
    assert not ddp.equality.holds
    assert (ddp.status, ddp.reason) == ("not kept", "its results differ from those of one process")
    assert report.plan == "baseline"


@pytest.mark.slow
def test_a_rank_that_fails_is_named_and_climbed_past(own: str, machine: str) -> None:
    report = ladder(factory=f"{own}:broken", rungs=("parallel-ddp",), machine=machine, **SHORT)
    ddp = _rungs(report)["parallel-ddp"]
    assert ddp.status == "failed"
    assert ddp.reason == "RuntimeError: rank 1: ValueError: no such file as mine"


def test_a_function_that_no_other_process_finds_is_said(machine: str) -> None:
    def factory() -> tuple[nn.Module, Any, Any]:
        return nn.Linear(4, 2), torch.ones(2, 4), lambda model, batch: model(batch).mean()

    report = ladder(factory=factory, rungs=("parallel-ddp",), machine=machine, **SHORT)
    ddp = _rungs(report)["parallel-ddp"]
    assert ddp.status == "unsupported"
    assert "package.module:function" in ddp.reason
    assert path_of(json.dumps) == "json:dumps"  # type: ignore[arg-type]


@pytest.mark.sweep
def test_processes_that_are_killed_are_told_and_started_again() -> None:
    model = ViTConfig(
        image_size=8, patch_size=4, channels=1, width=16, depth=1, heads=2, mlp_width=16, classes=10
    )
    config = LadderConfig(model=model, batch=2, procs=2, device="cpu")
    subject = Configured(config, torch.device("cpu"))
    team = Team(subject, config)
    setting = Setting(model=model, plan=Plan(micro_batch=2, dp=2))
    try:
        first = ModelContender(team, setting, 0)
        assert first.timed(1e-6).wall > 0
        pids = [member._process.pid for member in team._members]
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(RuntimeError, match=r"rank 1: .* killed by signal 9"):
            first.timed(1e-6)
        assert not first.alive
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        assert ModelContender(team, setting, 0).timed(1e-6).wall > 0
    finally:
        team.end()
    assert team._members == []


def test_errors_of_ranks_keep_their_kind() -> None:
    def told(error: Exception) -> Exception:
        return RankFailure.of(error).as_error(1, "said")

    assert isinstance(told(torch.OutOfMemoryError("CUDA out of memory.")), OutOfMemory)
    assert isinstance(told(RuntimeError("DefaultCPUAllocator: can't allocate memory")), OutOfMemory)
    assert isinstance(told(ConfigError("This cannot be.")), ConfigError)
    error = told(ValueError("a\nb"))
    assert str(error) == "rank 1: ValueError: a"
    assert error.__notes__ == ["ValueError: a\nb\n", "said"]


def test_too_few_gpus_are_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    monkeypatch.setattr("penstock.ladder.climb.resolve_device", lambda device: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(EnvironmentProblem, match=r"this machine has 2\. Give --procs 2, or --device cpu"):
        ladder("vit-digits", procs=4, machine=machine)
    with pytest.raises(ConfigError, match=r"each process takes one of its own; write cuda\."):
        LadderConfig(procs=2, device="cuda:1")
    with pytest.raises(ConfigError, match=r"procs is 0, but must be at least 1"):
        LadderConfig(procs=0)


def test_samples_are_redrawn_for_other_ranks() -> None:
    batch = {"x": torch.arange(6.0)[:, None], "note": "kept", "scale": torch.tensor(2.0)}
    assert redrawn(batch, 6, 0) is batch
    one, again, two = (redrawn(batch, 6, place) for place in (1, 1, 2))
    assert torch.equal(one["x"], again["x"])
    assert not torch.equal(one["x"], two["x"])
    assert set(one["x"].ravel().tolist()) <= set(range(6))
    ragged = {"x": torch.ones(6, 1), "y": torch.ones(3)}
    assert redrawn(ragged, 6, 1) is ragged


@pytest.mark.sweep
def test_four_processes_share_out_in_groups(machine: str) -> None:
    report = ladder("vit-digits", rungs=("parallel-hsdp",), machine=machine, **{**SHORT, "procs": 4}, batch=2)
    hsdp = _rungs(report)["parallel-hsdp"]
    assert hsdp.plan == "micro_batch=2 dp=4 sharding=hsdp shard=2"
    assert hsdp.equality is not None, hsdp.reason
    assert hsdp.equality.holds
    assert len(hsdp.memory_by_rank) == 4


@pytest.mark.gpu
def test_on_gpus_each_process_has_one(tmp_path: Path) -> None:
    procs = torch.cuda.device_count()
    report = ladder(
        "vit-digits", rungs=("parallel-ddp", "parallel-fsdp"), rounds=2, loss_steps=0, procs=procs
    )
    for name in ("parallel-ddp", "parallel-fsdp"):
        rung = _rungs(report)[name]
        if procs == 1:
            assert rung.status == "unsupported"
            assert "--procs 2" in rung.reason
        else:
            assert rung.equality is not None, rung.reason
            assert rung.equality.holds
            assert len(rung.memory_by_rank) == procs
