"""Trackers get every number of a run at its step, and go on with a resumed run where they were.

wandb and MLflow are not installed in CI. Their stand-ins record the calls, whose arguments are theirs; where the real
packages are installed, both are also run, into a local folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.cli import main
from penstock.errors import ConfigError, EnvironmentProblem
from penstock.train.callbacks import TRACKERS, Callback, Record, call_method, trackers


def records(output: Path, *, resumed_at: int = 0) -> list[Record]:
    event = "resume" if resumed_at else "start"
    step = resumed_at + 2
    return [
        {"event": event, "step": resumed_at, "output": str(output), "plan": "baseline", "parameters": 7},
        {"event": "prediction", "step": resumed_at, "iteration_seconds": 1.0},
        {"event": "steps", "step": step, "loss": 0.5, "losses": [1, 2], "mfu": float("nan"), "flag": True},
        {"event": "evaluation", "step": step, "top1": 0.75, "samples": 10},
        {"event": "checkpoint", "step": step, "path": "x", "seconds": 1.0},
    ]


def follow(tracker: Callback, told: list[Record]) -> None:
    for record in told:
        call_method(tracker, record)
    tracker.on_end()


def test_tensorboard_forgets_what_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tensorboardX

    made: list[Any] = []
    real = tensorboardX.SummaryWriter

    def writer(*given: Any, **options: Any) -> Any:
        made.append(options)
        return real(*given, **options)

    monkeypatch.setattr(tensorboardX, "SummaryWriter", writer)
    follow(trackers("tensorboard")[0], records(tmp_path))
    follow(trackers("tensorboard")[0], records(tmp_path, resumed_at=7))
    assert [options["purge_step"] for options in made] == [None, 8]
    written = b"".join(file.read_bytes() for file in (tmp_path / "tensorboard").glob("events.out.tfevents.*"))
    assert b"steps/loss" in written
    assert b"evaluation/top1" in written
    assert b"mfu" not in written, "it is not a number here"


class StandIn:
    """wandb's `init`, and what it returns; MLflow's functions. Every call is kept."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.id = "abc123"
        self.info = SimpleNamespace(run_id=self.id)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "Settings":
            raise AttributeError(name)

        def call(*given: Any, **options: Any) -> StandIn:
            self.calls.append((name, given, options))
            return self

        return call


def test_wandb_gets_one_run_that_a_resumed_one_goes_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = StandIn()
    monkeypatch.setitem(sys.modules, "wandb", seen)
    follow(trackers("wandb")[0], records(tmp_path))
    assert [name for name, _, _ in seen.calls] == ["init", "log", "log", "finish"]
    started = seen.calls[0][2]
    assert (started["project"], started["name"], started["id"]) == ("penstock", tmp_path.name, None)
    assert started["config"] == {"output": str(tmp_path), "plan": "baseline", "parameters": 7}
    assert seen.calls[1][1:] == (({"steps/loss": 0.5},), {"step": 2})
    assert seen.calls[2][1:] == (({"evaluation/top1": 0.75, "evaluation/samples": 10},), {"step": 2})
    follow(trackers("wandb")[0], records(tmp_path, resumed_at=2))
    again = seen.calls[4][2]
    assert (again["id"], again["resume"]) == ("abc123", "allow")


def test_mlflow_gets_one_run_that_a_resumed_one_goes_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = StandIn()
    monkeypatch.setitem(sys.modules, "mlflow", seen)
    follow(trackers("mlflow")[0], records(tmp_path))
    assert [name for name, _, _ in seen.calls] == [
        "start_run", "log_params", "log_metrics", "log_metrics", "end_run",
    ]  # fmt: skip
    assert seen.calls[2][1:] == (({"steps/loss": 0.5},), {"step": 2})
    follow(trackers("mlflow")[0], records(tmp_path, resumed_at=2))
    assert [name for name, _, _ in seen.calls[5:]] == ["start_run", "log_metrics", "log_metrics", "end_run"]
    assert seen.calls[5][2]["run_id"] == "abc123"
    assert json.loads((tmp_path / "tracker.json").read_text()) == {"mlflow": "abc123"}


def test_an_mlflow_run_whose_parameters_are_refused_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next run of the same process could not begin."""
    seen = StandIn()
    vars(seen)["log_params"] = lambda facts: facts["unknown"]
    monkeypatch.setitem(sys.modules, "mlflow", seen)
    (tracker,) = trackers("mlflow")
    with pytest.raises(KeyError):
        call_method(tracker, records(tmp_path)[0])
    tracker.on_end()
    assert [name for name, _, _ in seen.calls] == ["start_run", "end_run"]


def test_wandb_itself_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    follow(trackers("wandb")[0], records(tmp_path))
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))


def test_mlflow_itself_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    follow(trackers("mlflow")[0], records(tmp_path))
    (file,) = (tmp_path / "mlruns").glob("*/*/metrics/steps/loss")
    assert file.read_text().split()[1:] == ["0.5", "2"]


@pytest.mark.parametrize("name", list(TRACKERS))
def test_a_missing_package_says_how_to_get_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, {"tensorboard": "tensorboardX"}.get(name, name), None)
    with pytest.raises(EnvironmentProblem, match=r"pip install 'penstock\[(track|wandb|mlflow)\]'"):
        trackers(name)


def test_names_are_checked_before_anything_is_built(capsys: pytest.CaptureFixture[str]) -> None:
    assert trackers("") == []
    with pytest.raises(ConfigError, match=r"no tracker 'wandbb'\. Did you mean 'wandb'"):
        trackers("tensorboard,wandbb")
    assert main(["train", "vit-digits", "--track", "neptune"]) == 2
    assert "There is no tracker 'neptune'" in capsys.readouterr().err
