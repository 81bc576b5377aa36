"""Figures are drawn where the numbers say, are well-formed, and never show what was not measured."""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import mul
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

import penstock.report.page
from penstock.errors import ConfigError
from penstock.precision.histogram import HIGH, LOW, Histogram
from penstock.report.chart import (
    CURVE_COLORS,
    NARROW,
    SMALL,
    WIDE,
    Chart,
    Label,
    Scale,
    number,
    signed,
    style,
    text_width,
    ticks,
    wrap,
)
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
from penstock.report.page import Cell, Section, Tile, page, terminal_table
from penstock.report.precision_figures import gradient_figure, percent
from penstock.report.schedule_figure import schedule_figure
from penstock.schedules import Costs, generate, simulate

GOLDEN = Path(__file__).parent / "golden"
BARS = [
    Bar(label="baseline", state="baseline", value=1.0),
    Bar(label="half & half", state="kept", value=2.0, low=1.9, high=2.1, floor=1.0, predicted=2.5),
    Bar(label="slower one", state="not kept", value=1.5, floor=2.0),
    Bar(label="half <one>", state="offered", value=1.8, floor=2.0, note=" more", predicted=2.2),
]


def _elements(svg: str, tag: str) -> list[ElementTree.Element]:
    return [element for element in ElementTree.fromstring(svg).iter() if element.tag.endswith(tag)]


def test_all_differences_zero_is_no_division_by_zero() -> None:
    assert "svg" in difference_bars(
        [Bar(label="a", state="kept", value=0.0)], noise=0.0, title="t", x_label="l"
    )


@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (lambda: waterfall([], title="t", x_label="y"), "at least one measured bar"),
        (lambda: lines([], title="t", x_label="x", y_label="y"), "at least one point"),
        (lambda: stacked_bars([], title="t", unit="s"), "at least one bar"),
        (lambda: gradient_figure(replace(GRADIENTS, counts=(), zeros=0, wrong=0), scale=1.0, title="t"), "one value"),
        (lambda: schedule_figure(simulate(generate("1f1b", 32, 400)), title="t"),
         "25,600 actions, more than 20,000; draw a schedule of fewer"),
    ],
)  # fmt: skip
def test_nothing_and_too_much_to_draw_are_refused(draw: Callable[[], str], words: str) -> None:
    with pytest.raises((ValueError, ConfigError), match=words):
        draw()


@pytest.mark.parametrize(
    ("share", "words"),
    [(0.0, "0 %"), (1.0, "100.00 %"), (0.0156, "1.56 %"), (2e-5, "0.002 %"), (1.2e-7, "0.00001 %")],
)
def test_what_is_not_zero_never_reads_as_zero(share: float, words: str) -> None:
    assert percent(share) == words


def test_the_axis_of_gradients_reaches_what_a_large_scale_saves() -> None:
    assert "2⁻⁴⁵ to 2⁻⁴⁴" in gradient_figure(GRADIENTS, scale=2.0**26, title="t")
    assert "below 2⁻⁴⁰" in gradient_figure(GRADIENTS, scale=1.0, title="t")


def test_a_figure_alone_is_a_file_of_its_own() -> None:
    chart = Chart(10, 10)
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


def test_a_scale_maps_its_ends_and_marks_round_numbers() -> None:
    scale = Scale(1, 1000, 100, 400, log=True)
    assert [scale(value) for value in (1, 10, 1000)] == pytest.approx([100, 200, 400])
    assert scale.marks() == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]
    assert Scale(1e-6, 1e3, 0, 1, log=True).marks() == [10.0**power for power in range(-6, 4)]
    assert Scale(0, 17, 0, 1).marks() == [0, 5, 10, 15]


def test_a_page_is_self_contained_and_escaped() -> None:
    html = page(
        "A <title>", "lead", [Tile(value="2×", words="faster & better", lead=True)],
        [Section(title="s", text="one\n\ntwo", code="a < b", figures=[lambda width: f"<svg>{width}</svg>"],
                 columns=[Cell("c")], rows=[("strong", [Cell("1", "small")])], facts={"k": "v"})],
    )  # fmt: skip
    assert "A &lt;title&gt;" in html
    assert "a &lt; b" in html
    assert "faster &amp; better" in html
    assert not re.search(r"<link|src=|href=|url\(|@import|https?://", html)
    assert html.count("<p>") == 2
    assert [f"<svg>{width}</svg>" in html for width in (WIDE, NARROW)] == [True, True]


def test_a_cell_of_a_notebook_has_the_same_without_a_script_or_rules_for_others() -> None:
    section = Section(title="s", figures=[lambda width: "<svg></svg>"])
    html = page("t", "lead", [], [section], whole=False)
    assert "<svg></svg>" in html
    assert not re.search(r"<script|<html|<body|<!doctype", html)
    rules = html.split("<style>")[1].split("</style>")[0]
    rules = re.sub(r"@(media|container)[^{]*", "", rules)
    names = [name.strip("{} \n") for name in re.findall(r"[^{};]+\{", rules)]
    assert all(".penstock" in name or "svg.figure" in name for name in names if name), names


TABLE = Section(
    title="t",
    columns=[
        Cell("name", words=True), Cell("speed"), *(Cell(f"column {i}", rank=i) for i in range(1, 8)), Cell("empty"),
    ],
    rows=[("", [Cell(f"row {r}"), Cell(f"{r}.00×"), *(Cell("1,234.5") for _ in range(7)), Cell("")]) for r in range(3)],
)  # fmt: skip


@pytest.mark.parametrize("width", range(60, 201, 7))
def test_a_table_drops_columns_by_rank_and_breaks_nothing(width: int) -> None:
    out = io.StringIO()
    Console(file=out, width=width).print(terminal_table(TABLE, width))
    head, *rows = out.getvalue().splitlines()
    assert len(rows) == 3
    assert all(len(line.rstrip()) <= width and "…" not in line for line in (head, *rows))
    ranks = [int(rank) for rank in re.findall(r"column (\d)", head)]
    assert ranks == list(range(1, len(ranks) + 1))  # those of the highest rank went first
    used = len(head.rstrip())
    assert len(ranks) == 7 or used + len("  column 1") > width  # and no more than had to
    assert "empty" not in head


def test_a_page_has_no_empty_columns() -> None:
    html = page("t", "", [], [TABLE])
    assert "column 7" in html
    assert "empty" not in html.split("<table>")[1].split("</table>")[0]


def test_the_script_of_all_pages_is_short_and_asks_nobody() -> None:
    script = Path(penstock.report.page.__file__).with_suffix(".js").read_text(encoding="utf-8")
    assert len(script.splitlines()) <= 120
    assert not re.search(r"https?:|fetch\(|XMLHttpRequest|import |eval\(|innerHTML", script)


LONG = "a name that is far longer than the room beside a bar, in many words"
STEPS = [*BARS, Bar(label=LONG, state="kept", value=2.2, floor=2.0, predicted=90.0)]
FIGURES: dict[str, Callable[..., str]] = {
    "waterfall": partial(waterfall, STEPS, title="t", x_label="speed", heading=LONG),
    "memory": partial(memory_bars, STEPS, title="t", x_label="MiB"),
    "difference": partial(difference_bars, STEPS[:3], noise=0.7, title="t", x_label="loss"),
    "stacks": partial(
        stacked_bars, [Stack(label=LONG, parts={"x": 3.0, "y": 1.0}), Stack(label="b", parts={"x": 1.0})],
        title="t", unit="s", limit=4.4,
    ),
    "lines": partial(
        lines,
        [
            Line(label=LONG, points=[(i, 10.0**i) for i in range(1, 9)], tips=["a"] * 8, bold=True),
            Line(label="other", points=[(1, 3.0), (8, 1e8)]),
        ],
        title="t", x_label="devices", y_label="seconds per step", log=True, x_marks=[1, 2, 3, 4, 5, 6, 7, 8],
    ),
    "losses": partial(
        lines, [Line(label="one", points=[(1, 3.0), (2, 2.0), (3, 1.0)])], title="t", x_label="step", y_label="loss",
    ),
}  # fmt: skip


GRADIENTS = Histogram(
    counts=tuple({-60: 1, -45: 9, -30: 1090, -25: 1000, -20: 2000, -14: 2500, 0: 300, 15: 50, 16: 50}.get(exponent, 0)
                 for exponent in range(LOW, HIGH + 1)),
    zeros=2500, wrong=500, largest=1.0,
)  # fmt: skip
PICTURES: dict[str, Callable[[], str]] = {
    **FIGURES,
    "escaped": partial(waterfall, BARS, title="t", x_label="y", notes=["in <words>"]),
    "schedule": lambda: schedule_figure(
        simulate(generate("zb-h1", 3, 6), Costs(forward=10, backward_input=11, backward_weight=7, activation=1.5)),
        title="ZB-H1 & friends", unit="ms", memory_unit="GiB", alone=True,
    ),
    "interleaved": lambda: schedule_figure(simulate(generate("interleaved", 2, 4, 3)), title="Interleaved", alone=True),
    "gradients": partial(gradient_figure, GRADIENTS, scale=2.0**10, title="Gradients"),
}  # fmt: skip


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_those_that_somebody_has_looked_at(name: str) -> None:
    """After a change that is meant: delete the file, run this, look at what it stored, and commit it."""
    golden, drawn = GOLDEN / f"{name.replace(' ', '_')}.svg", PICTURES[name]().replace("><", ">\n<") + "\n"
    if not golden.exists():
        golden.write_text(drawn, encoding="utf-8")
        pytest.fail(f"{golden.name} was not there; look at what is stored now")
    assert drawn == golden.read_text(encoding="utf-8")
    plain = drawn.split("</style>")[-1]
    assert not re.search(r"(fill|stroke):#", plain), "each colour follows the scheme"
    light, dark = style("svg").split("@media (prefers-color-scheme:dark)")
    assert all(f"{used}:" in light and f"{used}:" in dark for used in re.findall(r"var\((--\w+)\)", plain))


def _labels(svg: str) -> list[Label]:
    """Where text stands, by the widths that figures reckon with."""
    found = []
    for text in _elements(svg, "text"):
        drawn, words = text.get("style") or "", text.text or ""
        size = float(re.search(r"font-size:([\d.]+)px", drawn)[1])  # type: ignore[index]
        wide = text_width(words, size, bold="font-weight" in drawn)
        left = (
            float(text.get("x") or 0)
            - wide * {"start": 0, "middle": 0.5, "end": 1}[text.get("text-anchor") or ""]
        )
        y = float(text.get("y") or 0)
        found.append(Label(words, left, y - 0.78 * size, left + wide, y + 0.22 * size))
    return found


@pytest.mark.parametrize("width", [NARROW, 500.0, WIDE, 1180.0])
@pytest.mark.parametrize("name", FIGURES)
def test_no_label_lies_on_another_or_leaves_the_figure_at_any_width(name: str, width: float) -> None:
    svg = FIGURES[name](width=width)
    _, _, right, bottom = map(float, (ElementTree.fromstring(svg).get("viewBox") or "").split())
    labels = _labels(svg)
    assert len(labels) > 4
    for one, other in itertools.combinations(labels, 2):
        assert not one.overlaps(other), (one, other)
    for label in labels:
        assert label.x1 >= -1, label
        assert label.x2 <= right + 1, label
        assert label.y2 <= bottom + 1, label
    sizes = [float(size) for size in re.findall(r"font-size:([\d.]+)px", svg)]
    assert min(sizes) >= SMALL - 1


def test_an_axis_reaches_as_far_as_what_was_measured() -> None:
    svg = waterfall(STEPS, title="t", x_label="speed")
    marks = [float(t.text or "") for t in _elements(svg, "text") if re.fullmatch(r"[\d.]+", t.text or "")]
    assert max(marks) < 3  # one prediction is 90
    assert "predicted 90.00×" in svg
    runaway = Line(label="diverged", points=[(1, 3.0), (2, 1e9), (3, float("nan"))])
    steady = Line(label="baseline", points=[(1, 3.0), (2, 2.0), (3, 1.0)], bold=True)
    band = [(1, 2.9), (3, 0.9)], [(1, 3.1), (3, 1.1)]
    svg = lines([steady, runaway], band=band, title="t", x_label="x", y_label="y")
    marks = [float(t.text or "") for t in _elements(svg, "text") if re.fullmatch(r"[\d.]+", t.text or "")]
    assert max(marks) < 10
    assert "1e+09" in svg  # a pointer is told


# Machado, Oliveira and Fernandes 2009, at full severity, on linear RGB: normal sight, and eyes without red or green.
SIGHTS = {
    "all": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "no green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
}  # fmt: skip


def _linear(color: str) -> list[float]:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def _seen(color: str, sight: str) -> tuple[float, ...]:
    """A colour in OKLab, where distances are about those that people see."""
    r, g, b = (max(0.0, sum(map(mul, row, _linear(color)))) for row in SIGHTS[sight])
    cones = (
        0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b,
        0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b,
        0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b,
    )
    long, middle, short = (cone ** (1 / 3) for cone in cones)
    return (
        0.2104542553 * long + 0.7936177850 * middle - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * middle + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * middle - 0.8086757660 * short,
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_differ_for_eyes_without_red_or_green_and_stand_out_from_the_paper(scheme: str) -> None:
    rule = next(part for part in style("x").split("{") if part.startswith(f"color-scheme:{scheme}"))
    colors = dict(re.findall(r"--(\w+):(#\w{6})", rule))
    curves = [colors[name.removeprefix("--")] for name in CURVE_COLORS]
    together = [curves, [colors[name] for name in ("accent", "soft", "c1", "bad", "base")]]
    together += [
        [colors[name] for name in ("accent", "c1", "base", "idle")]
    ]  # bars of idle have a dashed edge besides
    for group, (sight, _) in itertools.product(together, SIGHTS.items()):
        for one, other in itertools.combinations(group, 2):
            apart = math.dist(_seen(one, sight), _seen(other, sight))
            assert apart > 0.08, (sight, one, other, apart)

    def contrast(one: str, other: str) -> float:
        bright = sorted(sum(map(mul, (0.2126, 0.7152, 0.0722), _linear(c))) + 0.05 for c in (one, other))
        return bright[1] / bright[0]

    assert all(contrast(color, colors["card"]) >= 2.9 for color in curves)
    assert all(
        contrast(colors[ink], colors["card"]) >= 4.5 for ink in ("ink", "muted", "accent", "bad", "mark")
    )
