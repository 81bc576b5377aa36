"""What takes longer than its time is stopped, and the block's own failures and results are its own."""

from __future__ import annotations

import math
import signal
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock.config.machine import load_machine
from penstock.config.model import PRESETS
from penstock.ladder import measure
from penstock.ladder.arena import Arena, OutOfTime, failure, stopped_at
from penstock.ladder.measure import Models
from penstock.ladder.own import subject_of
from penstock.ladder.settings import LadderConfig


def _swallows_failures() -> None:
    while True:
        try:
            time.sleep(60)
        except Exception:
            continue


def test_a_block_is_stopped_however_it_waits() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    with pytest.raises(OutOfTime, match="too long"), stopped_at(time.perf_counter() + 0.05, "too long"):
        threading.Event().wait(60)
    with pytest.raises(OutOfTime), stopped_at(time.perf_counter() + 0.05, "too long"):
        _swallows_failures()
    assert signal.getsignal(signal.SIGUSR2) is before


def test_a_block_in_time_keeps_its_result_and_its_failures() -> None:
    with stopped_at(time.perf_counter() + 60, "too long"):
        made = 1
    assert made == 1
    with pytest.raises(ValueError, match="own"), stopped_at(math.inf, "too long"):
        raise ValueError("own")


def test_a_compilation_that_outlasts_its_time_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        def __init__(self, *_: Any) -> None:
            time.sleep(60)

    config = LadderConfig(model=PRESETS["vit-digits"], device="cpu", batch=2)
    subject = subject_of(config, None, torch.device("cpu"))
    races = Arena(Models(subject, load_machine("h100"), config), 7, 0.01, lambda *said: None)
    monkeypatch.setattr(measure, "ModelContender", Slow)
    races.compile_until = lambda: time.perf_counter() + 0.05
    compiled = replace(subject.first, plan=replace(subject.first.plan, compile="whole"))
    with pytest.raises(OutOfTime) as stopped:
        races.build(compiled)
    status, reason = failure(stopped.value)
    assert status == "not run"
    assert "compiling was stopped" in reason
