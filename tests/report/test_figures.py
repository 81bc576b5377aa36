"""Figures are drawn where the numbers say, are well-formed, and never show what was not measured."""

from __future__ import annotations

import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from penstock.report.chart import Chart, Entry, Scale, number, signed, text_width, ticks, wrap
from penstock.report.figures import (
    Bar,
    Line,
    Stack,
    difference_bars,
    lines,
    memory_bars,
    stacked_bars,
    waterfall,
)
from penstock.report.page import Cell, Section, Tile, page

BARS = [
    Bar(label="baseline", state="baseline", value=1.0),
    Bar(label="half & half", state="kept", value=2.0, low=1.9, high=2.1, floor=1.0, predicted=2.5),
    Bar(label="slower one", state="not kept", value=1.5, floor=2.0),
    Bar(label="absent <one>", state="absent", reason="out of memory", predicted=3.0),
]


def _elements(svg: str, tag: str) -> list[ElementTree.Element]:
    return [element for element in ElementTree.fromstring(svg).iter() if element.tag.endswith(tag)]


def _bar(svg: str, tip: str) -> list[ElementTree.Element]:
    """Rectangles that tell a pointer `tip`."""
    return [rect for rect in _elements(svg, "rect") if any((child.text or "") == tip for child in rect)]


def test_bars_stand_on_one_line_and_their_heights_are_their_values() -> None:
    svg = waterfall(BARS, title="t", y_label="y")
    (base,) = _bar(svg, "baseline: 1.00×")
    start, gain = _bar(svg, "half & half: 2.00×")
    (left,) = _bar(svg, "slower one: 1.50×")
    unit = float(base.get("height") or 0)
    assert float(start.get("height") or 0) == pytest.approx(unit, abs=0.2)
    assert float(gain.get("height") or 0) == pytest.approx(unit, abs=0.2)  # from 1 to 2
    assert float(left.get("height") or 0) == pytest.approx(1.5 * unit, abs=0.3)
    floors = {round(float(r.get("y") or 0) + float(r.get("height") or 0)) for r in (base, start, left)}
    assert len(floors) == 1


def test_what_was_not_measured_has_no_bar_but_its_reason() -> None:
    svg = waterfall(BARS, title="t", y_label="y")
    assert not _bar(svg, "absent <one>: 0.00×")
    assert "out of memory" in svg
    assert "<one>" not in svg  # words are escaped
    assert len(_elements(svg, "polygon")) == 1  # what was measured and predicted


def test_a_figure_without_any_measurement_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one measured bar"):
        waterfall([Bar(label="x", state="absent")], title="t", y_label="y")


def test_memory_bars_label_their_values() -> None:
    svg = memory_bars([Bar(label="a", state="baseline", value=812.0)], title="t", y_label="MiB")
    assert ">812<" in svg


def test_curves_fall_where_losses_fall() -> None:
    one = Line(label="one", points=[(1, 3.0), (2, 2.0), (3, 1.0)], bold=True)
    band = ([(1, 2.9), (3, 0.9)], [(1, 3.1), (3, 1.1)])
    svg = lines(
        [one, Line(label="none", points=[])],
        band=band,
        band_label="seeds",
        title="t",
        x_label="x",
        y_label="y",
    )
    (line,) = _elements(svg, "polyline")
    heights = [float(point.split(",")[1]) for point in (line.get("points") or "").split()]
    assert heights == sorted(heights)  # y grows downwards
    assert ">none<" not in svg


def test_lines_mark_the_points_that_have_tips_and_name_every_line() -> None:
    first = Line(label="first <law>", points=[(10, 1e22), (20, 3e22)], tips=["one", "two"])
    svg = lines(
        [first, Line(label="other", points=[(15, 2e22)])],
        title="cost",
        x_label="size",
        y_label="FLOPs",
        log=True,
    )
    assert [circle[0].text for circle in _elements(svg, "circle")] == ["one", "two"]
    words = [element.text for element in _elements(svg, "text")]
    assert {"size", "FLOPs", "first <law>", "other", "10", "20", "1e+22", "2e+22"} <= set(words)


def test_differences_beyond_noise_are_coloured_and_grow_from_zero() -> None:
    bars = [
        Bar(label="a", state="higher", value=0.5), Bar(label="b", state="lower", value=-0.1),
        Bar(label="c", state="absent"),
    ]  # fmt: skip
    svg = difference_bars(bars, noise=0.02, title="t")
    (up,), (down,) = _bar(svg, "a: +0.500"), _bar(svg, "b: -0.100")
    assert "--bad" in (up.get("style") or "")
    assert "--c1" in (down.get("style") or "")
    assert float(up.get("y") or 0) + float(up.get("height") or 0) == pytest.approx(
        float(down.get("y") or 0), abs=0.2
    )


def test_all_differences_zero_is_no_division_by_zero() -> None:
    assert "svg" in difference_bars([Bar(label="a", state="kept", value=0.0)], noise=0.0, title="t")


def test_stacked_bars_are_as_long_as_their_parts() -> None:
    svg = stacked_bars(
        [Stack(label="a", parts={"x": 3.0, "y": 1.0}), Stack(label="b", parts={"x": 1.0})],
        title="t",
        unit="s",
    )
    (long,), (short,) = _bar(svg, "x: 3 s"), _bar(svg, "x: 1 s")
    assert float(long.get("width") or 0) == pytest.approx(3 * float(short.get("width") or 0), abs=0.3)


def test_figures_without_data_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one point"):
        lines([], title="t", x_label="x", y_label="y")
    with pytest.raises(ValueError, match="at least one bar"):
        stacked_bars([], title="t", unit="s")


def test_a_figure_alone_is_a_file_of_its_own() -> None:
    chart = Chart(10)
    chart.box(0, 0, 5, 5, fill="--accent")
    svg = chart.svg("t", alone=True)
    assert 'xmlns="http://www.w3.org/2000/svg"' in svg
    assert "prefers-color-scheme:dark" in svg


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 3.1, [0, 1, 2, 3, 4]),
        (0, 0.5, [0, 0.1, 0.2, 0.3, 0.4, 0.5]),
        (-0.04, 0.04, [-0.04, -0.02, 0, 0.02, 0.04]),
    ],
)
def test_ticks_are_round_and_span(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize("bad", [(1.0, 1.0), (0.0, float("nan")), (0.0, float("inf"))])
def test_ticks_refuse_an_axis_that_does_not_rise(bad: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="must rise"):
        ticks(*bad)


@pytest.mark.parametrize(
    ("value", "words"), [(0, "0"), (1234.5, "1,234"), (21.46, "21.5"), (0.01234, "0.0123"), (1.0, "1.00")]
)
def test_numbers_have_three_digits(value: float, words: str) -> None:
    assert number(value) == words


def test_a_difference_that_rounds_to_nothing_has_no_sign() -> None:
    assert [signed(value, 2) for value in (-0.001, 0.0, 0.126, -0.5)] == ["0.00", "0.00", "+0.13", "-0.50"]


def test_axis_numbers_have_the_decimals_of_their_step() -> None:
    steps = ticks(0, 0.5)
    assert [number(step, steps) for step in steps[:3]] == ["0.0", "0.1", "0.2"]
    assert number(2.5, [0, 2.5, 5]) == "2.5"


def test_labels_break_between_words_and_say_when_they_are_cut() -> None:
    assert wrap("larger image (FLOP/s)", text_width("larger image")) == ["larger image", "(FLOP/s)"]
    assert wrap("one two three four", text_width("three"), most=2) == ["one", "two …"]
    assert wrap("", 10) == [""]


def test_a_legend_breaks_into_rows_of_its_width() -> None:
    chart = Chart()
    entries = [Entry(words, "--accent", "dot") for words in ("first entry", "second entry", "third entry")]
    below = chart.legend(entries, 0, 16, 300)
    texts = [text for text in _elements(chart.svg("t"), "text") if text.text != "●"]
    places = [(float(t.get("x") or 0), float(t.get("y") or 0)) for t in texts]
    assert [y for _, y in places] == [16, 16, 35]
    assert below == 54
    assert max(x + text_width("second entry") for x, _ in places) <= 300


def test_a_scale_maps_its_ends_and_marks_round_numbers() -> None:
    scale = Scale(1, 1000, 100, 400, log=True)
    assert [scale(value) for value in (1, 10, 1000)] == pytest.approx([100, 200, 400])
    assert scale.marks() == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]
    assert Scale(1e-6, 1e3, 0, 1, log=True).marks() == [10.0**power for power in range(-6, 4)]
    assert Scale(0, 17, 0, 1).marks() == [0, 5, 10, 15]


def test_a_page_is_self_contained_and_escaped() -> None:
    html = page(
        "A <title>", "lead", [Tile(value="2×", words="faster & better", lead=True)],
        [Section(title="s", text="one\n\ntwo", code="a < b", figures=["<svg></svg>"], columns=[Cell("c")],
                 rows=[("strong", [Cell("1", "small")])], facts={"k": "v"})],
    )  # fmt: skip
    assert "A &lt;title&gt;" in html
    assert "a &lt; b" in html
    assert "faster &amp; better" in html
    assert not re.search(r"<script|<link|src=|href=|url\(|@import|https?://", html)
    assert html.count("<p>") == 2


def test_drawing_needs_no_torch() -> None:
    code = "import sys, penstock.report.figures, penstock.report.page; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
