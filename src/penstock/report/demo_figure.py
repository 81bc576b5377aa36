"""The picture of a demo: a bar for each optimisation that paid, and what came of them in words below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.report.chart import Chart, Entry, Scale, ticks

_ROW, _TOP, _LEFT, _RIGHT = 38.0, 78.0, 200.0, 210.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rise:
    """One bar: a setting, and how many times the baseline's speed it reaches."""

    title: str
    ratio: float
    low: float
    high: float
    predicted: float | None
    """What the planner said of the ratio before it was measured."""
    images_per_second: float


def demo_figure(title: str, rises: Sequence[Rise], notes: Sequence[str]) -> str:
    """The picture as an SVG file; the first rise is the baseline. Raises ValueError without any."""
    if not rises:
        raise ValueError("A demo's picture needs at least the baseline.")
    reach = max(max(rise.high, rise.predicted or 0.0) for rise in rises)
    bottom = _TOP + _ROW * len(rises)
    chart = Chart(bottom + 52 + 24 * len(notes))
    chart.x = Scale(0, ticks(0, reach, 5)[-1], _LEFT, chart.width - _RIGHT)
    chart.y = Scale(0, len(rises), bottom, _TOP)
    chart.text(14, 30, title, size=19, bold=True)
    entries = [Entry("measured", "--accent"), Entry("predicted before it was measured", "--mark", "diamond")]
    chart.legend(entries, 14, 56, chart.width - 28)
    chart.x_axis("", ticks(0, reach, 5), lambda mark: f"{mark:g}×", grid=True)
    for index, rise in enumerate(rises):
        _bar(chart, _TOP + _ROW * (index + 0.5), rise, "--base" if index == 0 else "--accent")
    for index, note in enumerate(notes):
        chart.text(14, bottom + 54 + 24 * index, note, size=15)
    said = "; ".join(f"{rise.title} {rise.ratio:.2f}×" for rise in rises)
    return chart.svg(title, said, alone=True) + "\n"


def _bar(chart: Chart, middle: float, rise: Rise, color: str) -> None:
    """One bar with its name, its interval, its prediction and its figures."""
    x = chart.x
    chart.text(_LEFT - 14, middle + 5, rise.title, size=15, anchor="end")
    chart.box(x(0), middle - 12, x(rise.ratio), middle + 12, fill=color, radius=2)
    chart.line(x(rise.low), middle, x(rise.high), middle, stroke="--ink", stroke_width=1.4)
    if rise.predicted is not None:
        at = x(rise.predicted)
        around = [(at, middle - 7), (at + 7, middle), (at, middle + 7), (at - 7, middle)]
        chart.path(around, closed=True, fill="--mark", stroke="--card")
    words = f"{rise.ratio:.2f}×   {rise.images_per_second:,.0f} images/s"
    chart.text(chart.width - _RIGHT + 16, middle + 5, words, size=15, bold=True)
