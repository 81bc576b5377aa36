"""Numbers a run says about itself are right, and the file they are kept in survives kills."""

from __future__ import annotations

import errno
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
from penstock.planner import predict
from penstock.planner.describe import totals
from penstock.tasks.task import Fullness
from penstock.train.callbacks import Callback
from penstock.train.meters import Speedometer, peak_memory
from penstock.train.metrics import Records, read_metrics

MACHINE = Machine(
    name="desk", device="cpu", source="measured", peak_flops={"fp32": 2e11, "bf16": 1e12}, memory_bytes=8e9,
    memory_bytes_per_second=2e10, launch_seconds=4e-6,
)  # fmt: skip


def speedometer(plan: Plan, device: str = "cpu", model: str = "vit-digits") -> Speedometer:
    prediction, full = predict(PRESETS[model], MACHINE, plan), Fullness(PRESETS[model])
    return Speedometer(prediction, MACHINE, torch.device(device), lambda: 0.0, full)


def test_utilisation_is_the_planners_flops_over_the_named_peak() -> None:
    meter = speedometer(Plan(micro_batch=4, accumulate=2))
    assert meter.peak == "desk fp32, measured"
    speed = meter.speed([0.1, 0.3, 0.2], wait_seconds=0.06)
    assert speed["samples_per_second"] == pytest.approx(3 * 8 / 0.6)
    assert speed["step_seconds_median"] == 0.2
    assert speed["step_seconds_p95"] == 0.3
    assert speed["data_wait_share"] == pytest.approx(0.1)
    flops = 3 * 8 / 0.6 * totals(PRESETS["vit-digits"]).model_flops
    assert speed["model_flops_per_second"] == pytest.approx(flops)
    assert speed["mfu"] == pytest.approx(flops / 2e11)
    assert speed["hfu"] >= speed["mfu"]
    assert meter.speed(list(range(20, 0, -1)), 0.0)["step_seconds_p95"] == 19


def test_text_is_counted_by_its_tokens() -> None:
    """Half of a batch is padding: half the FLOPs are the model's."""
    meter = speedometer(Plan(micro_batch=4, accumulate=2), model="gpt-tiny")
    full, half = meter.speed([0.1, 0.1], 0.0, [1024, 1024]), meter.speed([0.1, 0.1], 0.0, [1024, 0])
    assert full["tokens_per_second"] == pytest.approx(2 * 1024 / 0.2)
    assert full["model_flops_per_second"] == pytest.approx(80 * totals(PRESETS["gpt-tiny"]).model_flops)
    assert (half["mfu"], half["tokens_per_second"]) == pytest.approx(
        (full["mfu"] / 2, full["tokens_per_second"] / 2)
    )
    assert "tokens_per_second" not in meter.speed([0.1], 0.0)


def test_half_precision_is_held_against_its_own_peak() -> None:
    plain, half = (speedometer(Plan(precision=level)).speed([0.1], 0.0) for level in ("O0", "O1"))  # type: ignore[arg-type]
    assert half["mfu"] == pytest.approx(plain["mfu"] * 2e11 / 1e12)


def test_no_steps_give_no_numbers() -> None:
    meter = speedometer(Plan())
    assert meter.speed([], 0.0) == meter.whole_run() == {}


def test_time_between_windows_belongs_to_no_step() -> None:
    meter = speedometer(Plan())
    meter.start()
    for _ in range(3):
        time.sleep(0.01)
        meter.lap()
    assert meter.read()["step_seconds_median"] >= 0.01
    time.sleep(0.2)
    meter.start()
    meter.lap()
    meter.read()
    assert len(meter.times) == 4
    assert all(seconds >= 0.01 for seconds in meter.times[:3])
    assert sum(meter.times) < 0.2
    assert meter.read() == {}


@pytest.mark.gpu
def test_device_time_is_measured_by_events() -> None:
    device = torch.device("cuda")
    x = torch.randn(4096, 4096, device=device)
    meter = speedometer(Plan(), "cuda")
    meter.start()
    before = time.perf_counter()
    for _ in range(3):
        for _ in range(20):
            x @ x
        meter.lap()
    issued = time.perf_counter() - before
    meter.read()
    assert len(meter.times) == 3
    assert sum(meter.times) > issued / 2
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
    metrics = Records(tmp_path)
    metrics.write("start", 0)
    for step in (10, 20, 30):
        metrics.write("steps", step)
        metrics.write("checkpoint", step)
    metrics.close()
    with path.open("a") as file:
        file.write('{"event": "steps", "st')
    assert len(read_metrics(path)) == 7
    metrics.rewind(20)
    metrics.write("resume", 20)
    metrics.write("steps", 30)
    expected = [("start", 0), ("steps", 10), ("checkpoint", 10), ("steps", 20), ("checkpoint", 20)]
    assert records(path) == [*expected, ("resume", 20), ("steps", 30)]
    metrics.close()
    metrics.rewind(20, again={"resume"})
    assert records(path) == expected
    metrics.rewind(-1)
    assert records(path) == []


def test_each_record_is_on_its_way_to_the_disk_at_once(tmp_path: Path) -> None:
    metrics = Records(tmp_path)
    metrics.write("steps", 1)
    assert records(tmp_path / "metrics.jsonl") == [("steps", 1)]
    metrics.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_told_once_and_the_file_is_closed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.train.metrics.own_file", lambda folder, name: folder / name)
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    records = Records(tmp_path)
    with pytest.raises(OSError, match=r"metrics\.jsonl") as caught:
        records.write("steps", 1)
    assert caught.value.errno == errno.ENOSPC
    records.close()


def test_every_callback_is_ended_even_if_another_fails(tmp_path: Path) -> None:
    callbacks, ended = [Callback(), Callback()], list[str]()
    for callback, end in zip(callbacks, (lambda: 1 // 0, lambda: ended.append("second"))):
        vars(callback)["on_end"] = end
    with pytest.raises(ZeroDivisionError):
        Records(tmp_path, callbacks).close()
    assert ended == ["second"]


def test_what_is_not_finite_is_null_and_the_file_stays_json(tmp_path: Path) -> None:
    metrics = Records(tmp_path)
    metrics.write("steps", 1, loss=math.nan, losses=[1.0, math.inf], more={"x": -math.inf})
    metrics.close()

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is no JSON")

    record = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert (record["loss"], record["losses"], record["more"]) == (None, [1.0, None], {"x": None})
