"""`penstock probe` shows what was measured and stores it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import penstock.probe
from penstock.cli import main
from penstock.config.machine import GemmSample, Machine, cached_machine, load_machine

MACHINE = Machine(
    name="a cpu", device="cpu", source="measured", peak_flops={"fp32": 1e11}, memory_bytes_per_second=2e10,
    collective_bytes_per_second=3e9, notes=("a [note]",),
    gemm=tuple(
        GemmSample(dtype=dtype, m=m, n=8, k=8, flops_per_second=rate)
        for dtype, m, rate in (("fp32", 8, 1e11), ("bf16", 9, 2e12))
    ),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock.probe, "probe", lambda device, *, quick: MACHINE)


def test_tables_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "m.toml"
    assert main(["probe", "--quick", "--output", str(output)]) == 0
    told = capsys.readouterr().out
    for part in ("a cpu", "20.0 GB/s", "3.00 GB/s", "8 × 8 × 8", "2,000", "–", "a [note]", str(output)):
        assert part in told
    assert load_machine(output) == MACHINE
    assert cached_machine("a cpu") == MACHINE


def test_a_file_that_no_machine_can_be_stored_in_is_refused_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(penstock.probe, "probe", lambda device, *, quick: pytest.fail("measured"))
    assert main(["probe", "--output", "machine.txt"]) == 2
    assert "must end in one of them" in capsys.readouterr().err


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["peak_flops"] == {"fp32": 1e11}
