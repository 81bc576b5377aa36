"""A terminal gets a live display, everything else whole lines."""

from __future__ import annotations

import io
import time
from typing import Any

import pytest
from rich.console import Console

from penstock.tasks import classification_loss
from penstock.train.display import LineDisplay, RichDisplay, describe, display_for, with_prefix

STEPS: dict[str, Any] = {
    "event": "steps", "step": 20, "epoch": 1.5, "loss": 1.25, "lr": 1e-3, "samples_per_second": 1234.0,
    "model_flops_per_second": 3.1e9, "mfu": 0.123, "data_wait_share": 0.3,
}  # fmt: skip
EVALUATION: dict[str, Any] = {
    "event": "evaluation", "step": 20, "samples": 359, "top1": 0.975, "top5": 0.999, "loss": 0.1, "ema": True,
}  # fmt: skip


def test_lines_say_what_matters() -> None:
    assert describe(STEPS, 40) == (
        "step 20/40  epoch 1.50  loss 1.2500  1,234 samples/s  3.1 GFLOP/s  MFU 12.3%  "
        "waiting for data 30%  lr 1.00e-03"
    )
    assert "  9,876 tokens/s  " in describe(STEPS | {"tokens_per_second": 9876.0}, 40)
    shown = describe(EVALUATION | {"sample": "one\ntwo"}, 40, classification_loss)
    assert shown.endswith("(EMA weights)\n    one\n    two")
    assert describe(EVALUATION, 40, classification_loss) == (
        "step 20/40  evaluation of 359 images: top-1 97.50%  top-5 99.90%  loss 0.1000  (EMA weights)"
    )
    words = dict.fromkeys(("plan", "model", "data", "unit", "device", "peak", "output"), "a")
    start = {"event": "start", "step": 0, "parameters": 1, "samples": 1, "batch": 1, **words}
    assert "fused   a in 2 places\n" in describe(start | {"fused": {"a": 2, "b": 0}}, 40) + "\n"
    assert "no operator was measured to pay" in describe(start | {"fused": {"a": 0}}, 40)
    assert describe({"event": "unheard-of", "step": 0}, 40) == ""
    assert "loss not finite" in describe(STEPS | {"loss": None}, 40)


def test_the_first_lines_name_plan_and_places() -> None:
    record = {
        "event": "resume", "step": 20, "plan": "precision=O1", "parameters": 5018, "model": "10 classes",
        "unit": "images", "data": "digits", "samples": 1442, "batch": 128, "device": "cpu",
        "peak": "desk bf16, measured", "output": "runs/a", "total": 40,
    }  # fmt: skip
    assert describe(record, 40).splitlines() == [
        "plan    precision=O1",
        "model   5,018 parameters, 10 classes",
        "data    digits, 1,442 images, 128 a step",
        "device  cpu; utilisation is of the peak of desk bf16, measured",
        "output  runs/a",
        "resumed after step 20 of 40",
    ]
    assert "resumed" not in describe(record | {"event": "start"}, 40)


def test_predicted_stands_beside_measured() -> None:
    predicted = {"iteration_seconds": 0.012, "memory_bytes": 3e6, "samples_per_second": 700.0}
    measured = {
        "step_seconds_median": 1.5, "step_seconds_p95": 2.5, "memory_bytes": 4e9, "memory_kind": "allocated",
    }  # fmt: skip
    record = {"event": "summary", "step": 40, "predicted": predicted, "measured": measured}
    assert describe(record, 40) == (
        "step 40/40  a step took 1.50 s (median; p95 2.50 s), predicted 12.0 ms; "
        "memory 4 GB (allocated), predicted 3 MB"
    )
    assert "12.0 ms a step" in describe({"event": "prediction", "step": 0} | predicted, 40)


def test_plain_lines_do_not_flood_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    display = LineDisplay(stream, seconds=10)
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    display.begin(total=60, step=0, task=classification_loss)
    display.show({"event": "checkpoint", "step": 0, "path": "x", "seconds": 1.0, "log_every": 25})
    for step in range(1, 61):
        now += 1
        display.show(STEPS | {"step": step})
    display.show(EVALUATION | {"step": 60})
    display.end()
    lines = stream.getvalue().splitlines()
    assert [line.split()[1].removesuffix("/60") for line in lines[1:]] == [
        "1", "11", "21", "25", "35", "45", "50", "60", "60",
    ], "those that log_every promises are never left out"  # fmt: skip
    assert [line.rpartition("ETA ")[2] for line in lines[1:3]] == ["0:00:59", "0:00:49"]
    assert "ETA" not in lines[-2]


def test_the_header_says_how_many_parameters_train() -> None:
    start = {
        "event": "start", "step": 0, "plan": "baseline", "model": "10 classes", "data": "digits", "samples": 9,
        "unit": "images", "batch": 3, "device": "cpu", "peak": "a CPU", "output": "run", "parameters": 1000,
    }  # fmt: skip
    words = describe(start | {"trained": 26}, 40)
    assert "1,000 parameters, " in words
    assert "; 26 of them train (2.60%)" in words
    assert "train (" not in describe(start | {"trained": 1000}, 40)


def test_a_terminal_gets_a_bar_and_lines_above_it() -> None:
    stream = io.StringIO()
    display = RichDisplay(Console(file=stream, force_terminal=True, width=200))
    display.begin(total=40, step=0, task=classification_loss)
    display.show(STEPS)
    display.show(EVALUATION)
    display.end()
    display.end()
    text = stream.getvalue()
    assert "20/40" in text
    assert "1,234 samples/s" in text
    assert "top-1 97.50%" in text


def test_what_is_no_terminal_gets_plain_lines() -> None:
    assert isinstance(display_for(io.StringIO()), LineDisplay)


@pytest.mark.parametrize(("value", "text"), [(12_300, "12.3 k"), (1.5e12, "1.5 T"), (7, "7 "), (2e15, "2 P")])
def test_prefixes(value: float, text: str) -> None:
    assert with_prefix(value) == text
