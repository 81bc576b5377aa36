"""`penstock tune-kernels` stores what was measured, and `auto` reads it."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

import penstock.probe.kernels
from penstock.cli import main
from penstock.config.gains import stored_path, variants_that_pay
from penstock.cpu import kind_of
from penstock.probe.kernels import KernelTime


def _time(rows: int, eager: float) -> KernelTime:
    return KernelTime(
        operator="residual_norm", variant="rms_norm", rows=rows, features=8, dtype="float32",
        milliseconds={"eager": 1.0, "fused": 1.0}, gains={"eager": eager, "compiled": 0.5},
    )  # fmt: skip


def test_what_was_measured_is_stored_and_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(rounds: int, report: Callable[[KernelTime], None]) -> list[KernelTime]:
        times = [_time(8, 1.0), _time(16, 4.0)]
        for time in times:
            report(time)
        return times

    monkeypatch.setattr(penstock.probe.kernels, "measure_all", measured)
    assert main(["tune-kernels", "--json"]) == 0
    said = capsys.readouterr()
    table = json.loads(said.out)
    shown = said.err.splitlines()
    assert shown[0].startswith("Measuring 28 operators")
    assert shown[2] == "2 of 28: residual_norm rms_norm, 16 × 8 in float32: 4.00 times as fast as eager"
    expected = {"residual_norm": {"rms_norm": {"float32": {"eager": 2.0, "compiled": 0.5}}}}
    assert table == {kind_of("cpu"): expected} == json.loads(stored_path().read_text())
    assert main(["tune-kernels", "--rounds", "1"]) == 0
    assert "2.00" in capsys.readouterr().out
    for compiled, pays in ((False, {"rms_norm"}), (True, set())):
        assert variants_that_pay("residual_norm", kind_of("cpu"), "float32", compiled=compiled) == pays
    assert main(["tune-kernels", "--rounds", "0"]) == 2


def test_an_operator_is_measured_in_all_its_forms() -> None:
    case = penstock.probe.kernels.cases((4,))[0]
    one = penstock.probe.kernels.measure(case, torch.float32, 2)
    assert one.milliseconds.keys() == {"eager", "compiled", "fused", "fused_compiled"}
    assert all(value > 0 for value in one.milliseconds.values())
    assert one.gains.keys() == {"eager", "compiled"}
