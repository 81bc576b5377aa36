"""Numbers a run says about itself are right, and the file they are kept in survives kills."""

from __future__ import annotations

import builtins
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config.machine import Machine
from penstock.config.model import PRESETS
from penstock.config.plan import Plan
from penstock.errors import EnvironmentProblem
from penstock.planner import predict
from penstock.planner.describe import totals
from penstock.train.metrics import (
    Meter,
    MetricsFile,
    StepTimer,
    TensorBoard,
    peak_memory,
    percentile,
    read_metrics,
)

MACHINE = Machine(
    name="desk",
    device="cpu",
    source="measured",
    peak_flops={"fp32": 2e11, "bf16": 1e12},
    memory_bytes=8e9,
    memory_bytes_per_second=2e10,
    launch_seconds=4e-6,
)


def test_utilisation_is_the_planners_flops_over_the_named_peak() -> None:
    model = PRESETS["vit-digits"]
    plan = Plan(micro_batch=4, accumulate=2)
    meter = Meter.of(predict(model, MACHINE, plan), MACHINE)
    assert meter.peak == "desk fp32, measured"
    speed = meter.speed([0.1, 0.3, 0.2], wait_seconds=0.06)
    assert speed["samples_per_second"] == pytest.approx(3 * 8 / 0.6)
    assert speed["step_seconds_median"] == 0.2
    assert speed["step_seconds_p95"] == 0.3
    assert speed["data_wait_share"] == pytest.approx(0.1)
    flops = 3 * 8 / 0.6 * totals(model).model_flops
    assert speed["model_flops_per_second"] == pytest.approx(flops)
    assert speed["mfu"] == pytest.approx(flops / 2e11)
    assert speed["hfu"] >= speed["mfu"]


def test_half_precision_is_held_against_its_own_peak() -> None:
    plan = Plan(precision="O1")
    assert Meter.of(predict(PRESETS["vit-digits"], MACHINE, plan), MACHINE).peak_flops == 1e12


def test_no_steps_give_no_numbers() -> None:
    assert Meter.of(predict(PRESETS["vit-digits"], MACHINE, Plan()), MACHINE).speed([], 0.0) == {}


@pytest.mark.parametrize(("share", "expected"), [(0.5, 10), (0.95, 19), (1.0, 20), (0.0, 1)])
def test_percentiles_are_of_the_nearest_rank(share: float, expected: int) -> None:
    assert percentile(list(range(20, 0, -1)), share) == expected


def test_time_between_windows_belongs_to_no_step() -> None:
    timer = StepTimer(torch.device("cpu"))
    timer.start()
    for _ in range(3):
        time.sleep(0.01)
        timer.lap()
    steps = timer.read()
    time.sleep(0.2)
    timer.start()
    timer.lap()
    steps += timer.read()
    assert len(steps) == 4
    assert all(step >= 0.01 for step in steps[:3])
    assert sum(steps) < 0.2
    assert timer.read() == []


@pytest.mark.gpu
def test_device_time_is_measured_by_events() -> None:
    device = torch.device("cuda")
    x = torch.randn(4096, 4096, device=device)
    timer = StepTimer(device)
    timer.start()
    before = time.perf_counter()
    for _ in range(3):
        for _ in range(20):
            x @ x
        timer.lap()
    issued = time.perf_counter() - before
    steps = timer.read()
    assert len(steps) == 3
    assert sum(steps) > issued / 2
    assert peak_memory(device) >= x.numel() * 4


def test_peak_memory_of_a_process_counts_bytes() -> None:
    before = peak_memory(torch.device("cpu"))
    block = torch.ones(2**25)  # 128 MiB, touched
    assert 20e6 < before < 60e9
    assert peak_memory(torch.device("cpu")) >= before
    assert block.sum() > 0


def records(path: Path) -> list[tuple[str, int]]:
    return [(record["event"], record["step"]) for record in read_metrics(path)]


def test_a_torn_line_and_steps_that_will_be_repeated_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics.write({"event": "start", "step": 0})
    for step in (10, 20, 30):
        metrics.write({"event": "steps", "step": step})
        metrics.write({"event": "checkpoint", "step": step})
    metrics.close()
    with path.open("a") as file:
        file.write('{"event": "steps", "st')
    assert len(read_metrics(path)) == 7
    metrics.rewind(20)
    metrics.write({"event": "resume", "step": 20})
    metrics.write({"event": "steps", "step": 30})
    expected = [("start", 0), ("steps", 10), ("checkpoint", 10), ("steps", 20), ("checkpoint", 20)]
    assert records(path) == [*expected, ("resume", 20), ("steps", 30)]
    metrics.close()
    metrics.rewind(20, again={"resume"})
    assert records(path) == expected
    metrics.rewind(-1)
    assert records(path) == []


def test_each_record_is_on_its_way_to_the_disk_at_once(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.write({"event": "steps", "step": 1})
    assert records(tmp_path / "metrics.jsonl") == [("steps", 1)]
    metrics.close()


def test_what_is_not_finite_is_null_and_the_file_stays_json(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.write(
        {"event": "steps", "step": 1, "loss": math.nan, "losses": [1.0, math.inf], "more": {"x": -math.inf}}
    )
    metrics.close()

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is no JSON")

    record = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert (record["loss"], record["losses"], record["more"]) == (None, [1.0, None], {"x": None})


def test_tensorboard_gets_every_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[str, float, int]] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int | None) -> None:
            assert (folder, purge_step) == (str(tmp_path), 8)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

        def flush(self) -> None:
            pass

        close = flush

    import tensorboardX

    monkeypatch.setattr(tensorboardX, "SummaryWriter", Writer)
    board = TensorBoard(tmp_path, resumed_at=7)
    board.write({"event": "steps", "step": 9, "loss": 0.5, "losses": [1, 2], "peak": "desk", "flag": True})
    board.close()
    assert written == [("steps/loss", 0.5, 9)]


def test_tensorboard_writes_real_event_files(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path, resumed_at=0)
    board.write({"event": "steps", "step": 1, "loss": 0.5})
    board.close()
    (file,) = tmp_path.glob("events.out.tfevents.*")
    assert b"steps/loss" in file.read_bytes()


def test_missing_tensorboard_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "tensorboardX":
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(EnvironmentProblem, match=r"penstock\[track\]"):
        TensorBoard(tmp_path, resumed_at=0)
