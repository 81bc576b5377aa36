"""A terminal gets a live display, everything else whole lines."""

from __future__ import annotations

import io
import time
from typing import Any

import pytest
from rich.console import Console

from penstock.tasks import classification_loss
from penstock.train.callbacks import call_method
from penstock.train.display import LineDisplay, RichDisplay, describe, display_for, with_prefix

TASK = classification_loss
START: dict[str, Any] = {
    "event": "start", "step": 0, "plan": "precision=O1", "parameters": 5018, "trained": 5018, "model": "10 classes",
    "unit": "images", "data": "digits", "samples": 1442, "batch": 128, "device": "cpu",
    "peak": "desk bf16, measured", "output": "runs/a", "total": 40, "log_every": 10,
}  # fmt: skip
STEPS: dict[str, Any] = {
    "event": "steps", "step": 20, "epoch": 1.5, "loss": 1.25, "lr": 1e-3, "samples_per_second": 1234.0,
    "model_flops_per_second": 3.1e9, "mfu": 0.123, "data_wait_share": 0.3,
}  # fmt: skip
EVALUATION: dict[str, Any] = {
    "event": "evaluation", "step": 20, "samples": 359, "top1": 0.975, "top5": 0.999, "loss": 0.1, "ema": True,
}  # fmt: skip


def said(record: dict[str, Any]) -> str:
    return describe(record, 40, TASK)


def test_lines_say_what_matters() -> None:
    assert said(STEPS) == (
        "step 20/40  epoch 1.50  loss 1.2500  1,234 samples/s  3.1 GFLOP/s  MFU 12.3%  "
        "waiting for data 30%  lr 1.00e-03"
    )
    assert "  9,876 tokens/s  " in said(STEPS | {"tokens_per_second": 9876.0})
    assert said(EVALUATION | {"sample": "one\ntwo"}).endswith("(EMA weights)\n    one\n    two")
    assert said(EVALUATION) == (
        "step 20/40  evaluation of 359 images: top-1 97.50%  top-5 99.90%  loss 0.1000  (EMA weights)"
    )
    assert said({"event": "unheard-of", "step": 0}) == ""
    assert "loss not finite" in said(STEPS | {"loss": None})
    heads = {"words": {"loss": 0.5, "gradient": 0.25}, "classes": {"loss": 2.0, "gradient": 0.75}}
    assert "words 0.500 (25% of gradients), classes 2.000 (75% of gradients)" in said(
        STEPS | {"heads": heads}
    )


def test_the_first_lines_name_plan_and_places() -> None:
    lines = [
        "plan    precision=O1",
        "model   5,018 parameters, 10 classes",
        "data    digits, 1,442 images, 128 a step",
        "device  cpu; utilisation is of the peak of desk bf16, measured",
        "output  runs/a",
    ]
    assert said(START).splitlines() == lines
    resumed = said(START | {"event": "resume", "step": 20})
    assert resumed.splitlines() == [*lines, "resumed after step 20 of 40"]
    assert "model   5,018 parameters, 10 classes; 26 of them train (0.52%)" in said(START | {"trained": 26})
    assert said(START | {"fused": {"a": 2, "b": 0}}).endswith("fused   a in 2 places")
    assert "no operator was measured to pay" in said(START | {"fused": {"a": 0}})


def test_predicted_stands_beside_measured() -> None:
    predicted = {"iteration_seconds": 0.012, "memory_bytes": 3e6, "samples_per_second": 700.0}
    measured = {
        "step_seconds_median": 1.5, "step_seconds_p95": 2.5, "memory_bytes": 4e9, "memory_kind": "allocated",
    }  # fmt: skip
    record = {"event": "summary", "step": 40, "predicted": predicted, "measured": measured}
    assert said(record) == (
        "step 40/40  a step took 1.50 s (median; p95 2.50 s), predicted 12.0 ms; "
        "memory 4 GB (allocated), predicted 3 MB"
    )
    assert "12.0 ms a step" in said({"event": "prediction", "step": 0} | predicted)


def test_plain_lines_do_not_flood_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    display = LineDisplay(stream, TASK, seconds=10)
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    call_method(display, START | {"total": 60, "log_every": 25})
    for step in range(1, 61):
        now += 1
        call_method(display, STEPS | {"step": step})
    call_method(display, EVALUATION | {"step": 60})
    display.on_end()
    lines = [line for line in stream.getvalue().splitlines() if line.startswith("step")]
    assert [line.split()[1].removesuffix("/60") for line in lines] == [
        "1", "11", "21", "25", "35", "45", "50", "60", "60",
    ], "those that log_every promises are never left out"  # fmt: skip
    assert [line.rpartition("ETA ")[2] for line in lines[:2]] == ["0:00:59", "0:00:49"]
    assert "ETA" not in lines[-2]


def test_a_terminal_gets_a_bar_and_lines_above_it() -> None:
    stream = io.StringIO()
    display = RichDisplay(Console(file=stream, force_terminal=True, width=200), TASK)
    for record in (START, STEPS, EVALUATION):
        call_method(display, record)
    display.on_end()
    display.on_end()
    text = stream.getvalue()
    assert "20/40" in text
    assert "1,234 samples/s" in text
    assert "top-1 97.50%" in text


def test_what_is_no_terminal_gets_plain_lines() -> None:
    assert isinstance(display_for(io.StringIO(), TASK), LineDisplay)


@pytest.mark.parametrize(("value", "text"), [(12_300, "12.3 k"), (1.5e12, "1.5 T"), (7, "7 "), (2e15, "2 P")])
def test_prefixes(value: float, text: str) -> None:
    assert with_prefix(value) == text
