"""The report of a climb as table, page and JSON."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from penstock.ladder.page import to_html
from penstock.ladder.result import (
    Chosen,
    Control,
    Estimate,
    Forecast,
    LadderReport,
    Noise,
    RungResult,
    Status,
)
from penstock.ladder.show import remarks, table, write


def _rung(name: str, status: Status, ratio: float, total: float, *, difference: float = 0.0) -> RungResult:
    return RungResult(
        name=name,
        title=f"{name} rung",
        why=f"Why {name}.",
        status=status,
        plan="precision=O1",
        forecast=Forecast(
            samples_per_second=20.0, to_previous=1.5, to_baseline=2.5, corrected=2.4, memory_bytes=300 * 2**20, mfu=0.4,
            seconds={"gemm": 0.1},
        ),
        samples_per_second=Estimate(value=8 * total, low=7.9 * total, high=8.1 * total),
        model_flops_per_second=Estimate(value=1e11 * total, low=9e10 * total, high=1.1e11 * total),
        to_previous=Estimate(value=ratio, low=ratio - 0.01, high=ratio + 0.01),
        to_baseline=Estimate(value=total, low=total - 0.01, high=total + 0.01),
        memory_bytes=350 * 2**20,
        compile_seconds=12.5 if "compile" in name else None,
        losses=(2.0, 1.5 + difference),
        loss=1.5 + difference,
        loss_difference=difference,
    )  # fmt: skip


REPORT = LadderReport(
    title="vit-s16",
    unit="images",
    rungs=(
        _rung("baseline", "baseline", 1.0, 1.0),
        _rung("half", "kept", 2.0, 2.0, difference=0.02),
        replace(_rung("order", "not kept", 0.97, 1.94), reason="slower"),
        _rung("compile", "kept", 1.25, 2.5, difference=0.5),
        replace(_rung("image", "reported", 1.1, 2.75), compared_by="flops"),
        RungResult(name="flash", title="flash rung", why="Why flash.", status="unsupported", reason="no <kernel> here"),
        RungResult(name="batch", title="batch rung", why="Why batch.", status="out of memory", reason="tried 9 GiB"),
    ),
    noise=Noise(seeds=(0, 1, 2), losses=(1.5, 1.6, 1.4), curves=((2.0, 1.5), (2.1, 1.6), (1.9, 1.4)), deviation=0.1),
    same=Chosen(
        plan="precision=O1 compile=blocks",
        model={"classifier": "pooled"},
        rungs=("half", "compile"),
        train_command='penstock train vit-s16 --model.classifier pooled --plan "precision=O1 compile=blocks"',
        speedup=Estimate(value=2.5, low=2.49, high=2.51, rounds=9),
        samples_per_second=Estimate(value=20.0, low=19.0, high=21.0, rounds=9),
        predicted=2.4,
        memory_bytes=350 * 2**20,
        loss_difference=0.5,
        within_noise=False,
    ),
    fastest=None,
    control=Control(
        ratio=Estimate(value=1.001, low=0.997, high=1.005, rounds=12), processor_ratio=None, floor=0.01
    ),
    tried=(),
    candidates=96,
    batch=8,
    rounds=7,
    loss_steps=2,
    machine={"name": "toy", "device": "cpu", "source": "measured", "peak_flops": {"fp32": 2e11},
             "memory_bytes_per_second": 4e10},
    environment={"machine": {"processor": "Toy", "cores": 2, "threads": 2, "gpus": [], "system": "Linux"},
                 "versions": {"torch": "2.13"}, "commit": "abc", "time": "2026-11-21"},
    command="penstock ladder vit-s16",
    wall_seconds=100.0,
    notes=("A note.",),
)  # fmt: skip


def test_the_best_is_the_last_rung_kept() -> None:
    assert REPORT.best.name == "compile"
    assert REPORT.speedup == 2.5


def test_the_table_tells_every_rung_with_its_verdict() -> None:
    out = io.StringIO()
    Console(file=out, width=120).print(table(REPORT))
    rows = {line[:14].strip(): line for line in out.getvalue().splitlines()}
    assert "2.00×" in rows["half rung"]
    assert "1.50×" in rows["half rung"]  # predicted
    assert "+0.0200" in rows["half rung"]
    assert "12.5" in rows["compile rung"]
    assert rows["order rung"].rstrip().endswith("not kept")
    assert "batch rung" not in rows, "what was not measured is in the remarks"


def test_a_narrow_terminal_gets_fewer_columns_and_no_cut_words() -> None:
    out = io.StringIO()
    Console(file=out, width=80).print(table(REPORT, 80))
    told = out.getvalue()
    assert "…" not in told
    assert "measured" in told
    assert "verdict" in told
    assert "GFLOP/s" not in told


def test_remarks_say_why_once_for_all_it_holds_for() -> None:
    twice = replace(REPORT, rungs=(*REPORT.rungs, replace(REPORT.rungs[5], title="other rung")))
    said = remarks(twice)
    assert "flash rung, other rung: unsupported: no <kernel> here" in said
    assert "batch rung: out of memory: tried 9 GiB" in said
    assert said[-1] == "A note."


def test_the_page_holds_what_was_found_and_nothing_from_outside() -> None:
    html = to_html(REPORT)
    for words in ("2.50×", "no &lt;kernel&gt; here", "The ladder of vit-s16", "penstock ladder vit-s16", "Why flash.",
                  "A note.", "compile rung", "Toy", "--model.classifier pooled"):  # fmt: skip
        assert words in html, words
    assert html.count("<svg") == 4
    assert not re.search(r"<script|<link|src=|href=|url\(|@import|https?://", html)


def test_without_loss_runs_there_is_no_loss_section() -> None:
    bare = replace(
        REPORT,
        noise=None,
        rungs=tuple(replace(r, losses=(), loss=None, loss_difference=None) for r in REPORT.rungs),
    )
    html = to_html(bare)
    assert html.count("<svg") == 2
    assert "What it does to the loss" not in html


def test_written_json_reads_back(tmp_path: Path) -> None:
    html, data = write(REPORT, tmp_path / "new" / "folder")
    found = json.loads(data.read_text(encoding="utf-8"))
    assert found["speedup"] == 2.5
    assert found["plan"] == "precision=O1 compile=blocks"
    assert found["rungs"][1]["forecast"]["seconds"] == {"gemm": 0.1}
    assert found["rungs"][5]["status"] == "unsupported"
    assert html.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_showing_needs_no_torch() -> None:
    code = "import sys, penstock.ladder.show, penstock.ladder.settings; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
