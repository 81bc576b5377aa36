"""The report of a climb as table, page and JSON."""

from __future__ import annotations

import io
import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from penstock.ladder.page import picture, to_html
from penstock.ladder.result import (
    Chosen,
    Control,
    Estimate,
    Forecast,
    LadderReport,
    Nearest,
    Noise,
    RungResult,
    Status,
)
from penstock.ladder.show import ending, remarks, table, write


def _rung(name: str, status: Status, ratio: float, total: float, *, difference: float = 0.0) -> RungResult:
    return RungResult(
        name=name, title=f"{name} rung", why=f"Why {name}.", status=status, plan="precision=O1",
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
        losses=(2.0, 1.5 + difference), loss=1.5 + difference, loss_difference=difference,
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
    same_results=Chosen(
        plan="precision=O1 compile=blocks",
        model={"classifier": "pooled"},
        rungs=("half", "compile"),
        train_command='penstock train vit-s16 --model.classifier pooled --plan "precision=O1 compile=blocks"',
        speedup=Estimate(value=2.5, low=2.49, high=2.51, rounds=9),
        samples_per_second=Estimate(value=20.0, low=19.0, high=21.0, rounds=9),
        predicted=2.4, memory_bytes=350 * 2**20, loss_difference=0.5, within_noise=False,
    ),
    fastest=None,
    control=Control(
        ratio=Estimate(value=1.001, low=0.997, high=1.005, rounds=12), processor_ratio=None, floor=0.01
    ),
    tried=(), candidates=96, batch=8, rounds=7, loss_steps=2,
    machine={"name": "toy", "device": "cpu", "source": "measured", "peak_flops": {"fp32": 2e11},
             "memory_bytes_per_second": 4e10},
    environment={"machine": {"processor": "Toy", "cores": 2, "threads": 2, "gpus": [], "system": "Linux"},
                 "versions": {"torch": "2.13"}, "commit": "abc", "time": "2026-11-21"},
    command="penstock ladder vit-s16",
    wall_seconds=100.0,
    notes=("A note.",),
)  # fmt: skip


NOTHING = replace(
    REPORT,
    rungs=(REPORT.rungs[0], *(replace(rung, status="not kept") for rung in REPORT.rungs[1:4])),
    same_results=replace(REPORT.same_results, plan="baseline", rungs=(), speedup=Estimate.exact(1.0)),
    nearest=Nearest(
        plan="precision=O1", ratio=Estimate(value=1.021, low=0.97, high=1.0748, rounds=9), budget=1234.5
    ),
    others_busy=1.4,
)  # fmt: skip


def test_where_nothing_is_beyond_the_noise_the_plain_plan_stands() -> None:
    (only,) = ending(NOTHING)
    assert only[0] == (
        "Same results: Nothing beyond ±5.3 % on this machine, so the plain Plan remains. The most promising, "
        "precision=O1, measures 1.02× (0.97 to 1.07), which may be chance. A longer climb (--budget 1240) or one on a "
        "quieter machine should decide it."
    )
    quiet = replace(NOTHING, others_busy=None, nearest=replace(NOTHING.nearest, budget=None))
    assert ending(quiet)[0][0].endswith("which may be chance.")
    html = to_html(NOTHING)
    assert "Nothing beyond ±5.3 % on this machine" in html
    assert "0 of them pay" in html
    assert "nothing beyond ±5.3 % on this machine" in picture(NOTHING)


def test_only_what_is_kept_is_green() -> None:
    """The gain of a rung within the noise is drawn, in grey, and named so."""
    shown = replace(
        REPORT, rungs=(*REPORT.rungs[:3], replace(REPORT.rungs[3], status="unproven"), *REPORT.rungs[4:])
    )
    assert "1 of them pay" in to_html(shown)
    drawn, kept = picture(shown), picture(REPORT)
    assert "within the noise" in drawn
    assert "within the noise" not in kept
    assert drawn.count("var(--accent)") < kept.count("var(--accent)")


def _printed(report: LadderReport, width: int, *, every: bool = False) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(table(report, width, every=every))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_the_table_tells_what_pays_and_on_demand_every_rung() -> None:
    rows = {line[:14].strip(): line for line in _printed(REPORT, 140)}
    assert "2.00×" in rows["half rung"]
    assert "2.50×" in rows["half rung"]  # predicted
    assert "+0.0200" in rows["half rung"]
    assert "12.5" in rows["compile rung"]
    assert "order rung" not in rows
    rows = {line[:14].strip(): line for line in _printed(REPORT, 140, every=True)}
    assert rows["order rung"].endswith("not kept")
    assert "batch rung" not in rows, "what was not measured is in the remarks"


LONG = replace(
    REPORT,
    rungs=(
        *REPORT.rungs,
        replace(REPORT.rungs[1], title="fp32 master weights in half", processor_to_baseline=Estimate.exact(1.9),
                worth=Estimate(value=1.7, low=1.6, high=1.8)),
    ),
)  # fmt: skip


@pytest.mark.parametrize("width", range(60, 201, 10))
def test_at_any_width_a_rung_has_one_line_and_no_number_is_cut(width: int) -> None:
    lines = _printed(LONG, width, every=True)
    assert all(len(line) <= width for line in lines)
    assert not any("…" in line for line in lines)
    measured = [rung for rung in LONG.rungs if rung.measured]
    assert len(lines) == len(measured) + 2  # title and head
    for words in ("step", "in all"):
        assert words in lines[1]
    for rung, line in zip(measured, lines[2:], strict=True):
        assert line.startswith(rung.title)
        assert rung.to_baseline is not None
        assert f"{rung.to_baseline.value:.2f}×" in line


def test_a_wider_terminal_never_shows_less() -> None:
    heads = [set(_printed(LONG, width)[1].split()) for width in range(60, 201, 5)]
    assert all(one <= other for one, other in itertools.pairwise(heads))
    assert {"verdict", "images/s"} & heads[0]
    assert {"TFLOP/s", "predicted", "worth", "MiB", "CPU", "compile"} <= heads[-1]


def test_remarks_count_what_the_table_leaves_out_and_on_demand_say_why() -> None:
    twice = replace(REPORT, rungs=(*REPORT.rungs, replace(REPORT.rungs[5], title="other rung")))
    said = remarks(twice)
    assert said[0] == "2 measured that no Plan includes: image rung 1.10×, order rung 0.97×."
    assert said[1] == "2 do not apply here, 1 ran out of memory (--all says why)."
    assert any(words.startswith("Noise floor 1.0%: ") for words in said)
    assert said[-1] == "A note."
    said = remarks(twice, every=True)
    assert "flash rung, other rung: unsupported: no <kernel> here" in said
    assert "batch rung: out of memory: tried 9 GiB" in said


def test_a_floor_does_not_stand_beside_a_scatter_that_hides_more() -> None:
    wide = Estimate(value=1.1, low=0.63, high=1.72)
    scattered = replace(REPORT, control=Control(ratio=wide, processor_ratio=wide, floor=0.005))
    (words,) = [line for line in remarks(scattered) if "built twice" in line]
    assert "Noise floor" not in words
    assert "(-37.0% to +72.0%)" in words
    assert "small gains stay undecided" in words
    for low in (0.0, 0.01):  # a few rounds on a busy machine; below the smallest number the start is zero
        control = replace(scattered.control, ratio=replace(wide, low=low, rounds=2))
        assert "give no interval): rounds scatter" in " ".join(remarks(replace(scattered, control=control)))


def test_a_plan_of_unproven_rungs_is_not_said_to_be_of_none_that_pay() -> None:
    rungs = tuple(replace(r, status="unproven") if r.status == "kept" else r for r in REPORT.rungs)
    words = to_html(replace(REPORT, rungs=rungs))
    assert "0 of them pay" not in words
    assert "of the Plan together do" in words


def test_two_plans_are_offered_with_what_they_do_to_the_loss() -> None:
    (only,) = ending(REPORT)
    assert only[0].startswith("Same results: 2.50× the baseline's speed (2.49 to 2.51), predicted 2.40×.")
    assert "outside the ±0.2000 of chance" in only[0]
    speedup = Estimate(value=3.5, low=3.4, high=3.6)
    faster = replace(REPORT.same_results, speedup=speedup, train_command="penstock train two")
    both = replace(REPORT, fastest=faster)
    assert [command for _, command in ending(both)] == ["penstock train two", REPORT.train_command]
    html = to_html(both)
    assert "3.50×" in html
    assert "penstock train two" in html


def test_the_page_holds_what_was_found_and_nothing_from_outside() -> None:
    html = to_html(REPORT)
    for words in ("2.50×", "no &lt;kernel&gt; here", "The ladder of vit-s16", "penstock ladder vit-s16", "Why flash.",
                  "A note.", "compile rung", "Toy", "--model.classifier pooled", "torch 2.13"):  # fmt: skip
        assert words in html, words
    assert html.count("<svg") == 8  # four figures, each for a screen and a telephone
    assert not re.search(r"<link|src=|href=|url\(|@import|https?://", html)
    for title in ("What was not measured", "What each rung does"):  # long lists are folded
        assert f"<details><summary><h2>{title}</h2></summary>" in html
    assert html.count("<details>") == html.count("</details>") == 2


def test_the_axis_of_speeds_holds_speeds_and_each_rung_once() -> None:
    html = to_html(REPORT)
    wide = html.split('<div class="wide">')[1].split("</svg>")[0]
    words = re.findall(r"<text[^>]*>([^<]*)</text>", wide)
    drawn = [rung for rung in REPORT.rungs if rung.measured and rung.compared_by == "samples"]
    for rung in drawn:
        assert words.count(rung.title) == 1
        assert rung.to_baseline is not None
        assert f"{rung.to_baseline.value:.2f}×" in words
    assert "image rung" not in words  # its samples are larger: it has no speed to compare
    assert "flash rung" not in words


def test_page_terminal_and_notebook_show_the_same_figures() -> None:
    html, cell = to_html(REPORT), REPORT._repr_html_()
    for line in _printed(REPORT, 200, every=True)[2:]:
        for figure in re.findall(r"\d\S*×", line):
            assert figure in html
            assert figure in cell
    assert "<script" not in cell
    assert cell.count("<svg") == 2


def test_the_picture_stands_alone(tmp_path: Path) -> None:
    html, _ = write(REPORT, tmp_path)
    svg = html.with_suffix(".svg").read_text(encoding="utf-8")
    assert svg.startswith('<svg xmlns="http://www.w3.org/2000/svg"')
    assert "vit-s16: 2.50× the speed with the same results" in svg
    assert "half rung" in svg
    assert "order rung" not in svg  # it does not pay


def test_without_loss_runs_there_is_no_loss_section() -> None:
    rungs = tuple(replace(r, losses=(), loss=None, loss_difference=None) for r in REPORT.rungs)
    html = to_html(replace(REPORT, noise=None, rungs=rungs))
    assert html.count("<svg") == 4
    assert "What it does to the loss" not in html


def test_written_json_reads_back(tmp_path: Path) -> None:
    html, data = write(REPORT, tmp_path / "new" / "folder")
    found = json.loads(data.read_text(encoding="utf-8"))
    assert found["speedup"] == 2.5
    assert REPORT.best.name == "compile"  # the last that is kept
    assert found["plan"] == "precision=O1 compile=blocks"
    assert found["rungs"][1]["forecast"]["seconds"] == {"gemm": 0.1}
    assert found["rungs"][5]["status"] == "unsupported"
    assert html.read_text(encoding="utf-8").startswith("<!doctype html>")
