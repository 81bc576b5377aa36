"""Figures of ladders and plans: rows of bars, bars made of parts, and lines.

Each function takes plain numbers and returns one `<svg>` element, drawn for a `width`. Bars are in rows, so that every
name and value has its own line. A missing measurement has no row and is never drawn as zero. Axes reach as far as the
measurements: a prediction or limit far beyond is written, not drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Unpack

from penstock.report.chart import (
    CURVE_COLORS,
    WIDE,
    Chart,
    Entry,
    Look,
    Scale,
    number,
    signed,
    text_width,
    wrap,
)

State = Literal["baseline", "kept", "unproven", "offered", "not kept", "higher", "lower"]
"""Later steps build on a `kept` one, and on an `unproven` one, whose own gain is within the noise. An `offered` step
pays at a price, and a `not kept` one does not pay. `higher` and `lower` are outside the noise."""

_COLORS = {"baseline": "--base", "kept": "--accent", "offered": "--c1", "higher": "--bad", "lower": "--c1"}
_BASELINE, _UNKEPT = Entry("baseline", "--base"), Entry("measured, not kept", "--idle")
_UNPROVEN = Entry("within the noise", "--idle")
_OFFERED, _PREDICTED = Entry("pays, but changes results", "--c1"), Entry("predicted", "--mark", "diamond")
_BEYOND = 1.25
"""A prediction is drawn up to this many times the largest value; beyond that an arrow at the axis' end replaces it."""
_FAR_LIMIT = 2.5
"""A limit is drawn up to this many times the longest bar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One step of a figure with a bar per step."""

    label: str
    state: State
    value: float
    low: float | None = None
    high: float | None = None
    """The interval around `value`."""
    floor: float | None = None
    """The value before the step; the gain is the rest of the bar."""
    predicted: float | None = None
    note: str = ""
    """A few words after the value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a figure: its name and its points (x, y)."""

    label: str
    points: Sequence[tuple[float, float]]
    bold: bool = False
    tips: Sequence[str] = ()
    """Shown to a pointer at each point instead of its numbers. Points with tips are marked, and points of a bold line
    have their values above them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One bar: its name and its parts, in order."""

    label: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        """Length of the bar."""
        return sum(self.parts.values())


def waterfall(
    bars: Sequence[Bar], *, title: str, x_label: str, heading: str = "", notes: Sequence[str] = (),
    parts: tuple[str, str] = ("where the step starts", "what it gains"), marked: str = "predicted", width: float = WIDE,
    alone: bool = False,
) -> str:  # fmt: skip
    """Relative speed step by step; the baseline is 1. A step's gain is drawn after its `floor`: the speed of earlier
    steps, or whatever the first of `parts` names; the second of `parts` names the rest of a bar.

    `predicted` is drawn as a diamond, named `marked`; `heading` is written above and `notes` below. Raises ValueError
    without bars.
    """
    entries = _entries(bars, Entry(parts[0], "--soft"), Entry(parts[1], "--accent"), marked=marked)
    rows = _bars(bars, x_label, entries, lambda value: f"{value:.2f}×", width, heading=heading, ruler=1.0)
    for note in notes:
        for line in wrap(note, width - 4, 13):
            rows.text(2, rows.height + 16, line, size=13)
            rows.height += 20
    description = "; ".join(f"{bar.label} {bar.value:.2f}" for bar in bars)
    return rows.svg(title, description, alone=alone)


def memory_bars(
    bars: Sequence[Bar], *, title: str, x_label: str, kept: str = "kept", width: float = WIDE
) -> str:
    """Peak memory step by step, measured as bars and predicted as diamonds. `kept` names the bars of that state."""
    entries = _entries(bars, Entry(kept, "--accent"))
    description = "; ".join(f"{bar.label} {bar.value:.3g}" for bar in bars)
    return _bars(bars, x_label, entries, number, width).svg(title, description)


def difference_bars(
    bars: Sequence[Bar], *, noise: float, title: str, x_label: str, width: float = WIDE
) -> str:
    """Differences from the baseline; the band is ±2 standard deviations over seeds."""
    entries = [
        Entry("±2 standard deviations of the baseline over seeds", "--idle"), Entry("within", "--accent"),
        Entry("higher", "--bad"), Entry("lower", "--c1"),
    ]  # fmt: skip
    drawn = _bars(bars, x_label, entries, lambda value: signed(value, 3), width, band=2 * noise)
    description = "; ".join(f"{bar.label} {bar.value:+.4f}" for bar in bars)
    return drawn.svg(title, description)


def _entries(bars: Sequence[Bar], *kept: Entry, marked: str = "predicted") -> list[Entry]:
    """The legend: the baseline, the entries of `kept` bars, and those of other states that occur."""
    states = {bar.state for bar in bars}
    others = {"unproven": _UNPROVEN, "offered": _OFFERED, "not kept": _UNKEPT}
    diamond = [Entry(marked, "--mark", "diamond")] if any(bar.predicted is not None for bar in bars) else []
    return [
        *([_BASELINE] if "baseline" in states else []), *kept,
        *(entry for state, entry in others.items() if state in states), *diamond,
    ]  # fmt: skip


class _Rows(Chart):
    """A chart with a row for each label: next to its bar, or above it if the chart is narrow. y counts rows."""

    def __init__(
        self, labels: Sequence[str], values: Sequence[str], reach: tuple[float, float], x_label: str,
        entries: Sequence[Entry], width: float,
        *, heading: str = "", faint: Sequence[bool] = (), ruler: float | None = None, band: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(width)
        widest = max(map(text_width, labels))
        left, above, row = (2.0, 15.0, 36.0) if self.narrow else (min(widest, 216.0) + 12, 0.0, 25.0)
        wrapped = [wrap(label, width - 4 if self.narrow else left - 10, most=2) for label in labels]
        top = self.head("", entries, heading) + 2
        self.bar_top, self.thick = above + 4, row - above - 8
        self.x = Scale(*reach, left, width - 14 - max(text_width(words, bold=True) for words in values))
        self.tops = [top]
        for lines in wrapped:
            self.tops.append(self.tops[-1] + row + 14 * (len(lines) - 1))
        self.y = Scale(0, len(labels), self.tops[-1] + 2, top)
        if band is not None:
            self.box(self.x(-band), self.y.stop, self.x(band), self.y.start, fill="--idle")
        self.height = self.x_axis(x_label, self.x.marks(4 if self.narrow else 7), grid=True)
        if ruler is not None:
            self.rule(ruler, stroke="--edge", dash="4 4")
        for index, lines in enumerate(wrapped):
            light = bool(faint) and faint[index]
            fill, middle = "--muted" if light else "--ink", sum(self.span(index)) / 2
            self.text(width - 2, middle + 4.5, values[index], anchor="end", bold=not light, fill=fill)
            for extra, words in enumerate(lines):
                y = self.tops[index] + (13 if self.narrow else 16) + 14 * extra
                self.text(2, y, words, fill=fill, halo=True)

    def span(self, index: int) -> tuple[float, float]:
        """The upper and lower end of a row's bar."""
        y = self.tops[index + 1] - self.thick - 4 if self.narrow else self.tops[index] + self.bar_top
        return y, y + self.thick

    def rule(self, value: float, **look: Unpack[Look]) -> None:
        """A line across all rows, interrupted by names above bars."""
        at = self.x(value)
        spans = map(self.span, range(len(self.tops) - 1)) if self.narrow else [(self.y.stop, self.y.start)]
        for y1, y2 in spans:
            self.line(at, y1 - 2, at, y2 + 2, **look)


def _bars(
    bars: Sequence[Bar], x_label: str, entries: Sequence[Entry], write: Callable[[float], str], width: float,
    *, heading: str = "", ruler: float | None = None, band: float | None = None,
) -> _Rows:  # fmt: skip
    """A row for each bar with its spread, prediction and value; a `band` is drawn around 0, a `ruler` across all."""
    if not bars:
        raise ValueError("A figure needs at least one measured bar.")
    reach = [0.0] if band is None else [-band, band, -1e-4, 1e-4]
    ends = [end for bar in bars for end in (bar.value, bar.high, bar.low) if end is not None] + reach
    near = [bar.predicted for bar in bars if bar.predicted and bar.predicted <= _BEYOND * max(ends)]
    low, high = min(ends), max(*ends, *near, 1e-9)
    margin = 0.03 * (high - low)
    rows = _Rows(
        [bar.label for bar in bars], [f"{write(bar.value)}{bar.note}" for bar in bars],
        (low - margin if low < 0 else 0.0, high + margin), x_label, entries, width,
        heading=heading, faint=[bar.state == "not kept" for bar in bars], ruler=ruler, band=band,
    )  # fmt: skip
    rows.line(rows.x(0), rows.y.stop, rows.x(0), rows.y.start, stroke="--edge")
    before, level = 0, 0.0
    for index, bar in enumerate(bars):
        if bar.floor == level:  # from the step on which this one builds
            rows.line(
                rows.x(level), rows.span(before)[1], rows.x(level), rows.span(index)[0], stroke="--edge"
            )
        if bar.state in ("baseline", "kept", "unproven"):
            before, level = index, bar.value
    for index, bar in enumerate(bars):
        _bar(rows, index, bar, write)
    return rows


def _bar(rows: _Rows, index: int, bar: Bar, write: Callable[[float], str]) -> None:
    """Draw a step: its start in a soft colour, then its gain, then whiskers and prediction."""
    value, x, (y1, y2), ink = bar.value, rows.x, rows.span(index), "--ink"
    middle, look = (y1 + y2) / 2, _COLORS.get(bar.state, "--idle")
    edge, dash = ("--edge", "3 3") if bar.state == "not kept" else (None, None)
    start = min(bar.floor, value) if bar.floor is not None and bar.state in ("kept", "unproven") else 0.0
    tip = f"{bar.label}: {write(value)}"
    if bar.low is not None and bar.high is not None and bar.high > bar.low:
        tip += f" ({write(bar.low)} to {write(bar.high)})"
    if bar.predicted is not None:
        tip += f", predicted {write(bar.predicted)}"
    if start:
        rows.box(x(0), y1, x(start), y2, fill="--soft", tip=tip)
    rows.box(x(start), y1, x(value), y2, fill=look, stroke=edge, dash=dash, radius=2, tip=tip)
    if bar.low is not None and bar.high is not None:
        rows.line(x(bar.low), middle, x(bar.high), middle, stroke=ink, stroke_width=1.3)
        for end in (bar.low, bar.high):
            rows.line(x(end), middle - 3.5, x(end), middle + 3.5, stroke=ink, stroke_width=1.3)
    if bar.predicted is not None:
        beyond = bar.predicted > x.high
        at = min(x(bar.predicted), x.stop - 4)
        around = [(at, middle - 6), (at + 6, middle), (at, middle + 6), (at if beyond else at - 6, middle)]
        with rows.series(_PREDICTED.words):
            rows.path(around, closed=True, fill=_PREDICTED.color, stroke="--card", tip=tip)


def lines(
    drawn: Sequence[Line], *, title: str, x_label: str, y_label: str, log: bool = False,
    x_marks: Sequence[float] | None = None,
    band: tuple[Sequence[tuple[float, float]], Sequence[tuple[float, float]]] | None = None,
    band_label: str = "", width: float = WIDE, alone: bool = False,
) -> str:  # fmt: skip
    """Lines, each in its colour and bold ones in black, over a band between a lower and an upper line.

    With `log` both axes are logarithmic. Points that are not finite are left out, and a line that is outside of bold
    lines and band by more than their whole height runs along the axis' end. Raises ValueError without points.
    """
    drawn = [_finite(line) for line in drawn]
    drawn = [line for line in drawn if line.points]
    every = [point for points in (*(line.points for line in drawn), *(band or ())) for point in points]
    if not every:
        raise ValueError("A figure of lines needs at least one point.")
    chart = Chart(width)
    looks = _looks(drawn)
    entries = [Entry(band_label, "--edge")] if band else []
    top = chart.head(y_label, [*entries, *looks]) + 12
    bottom = top + (230 if chart.narrow else 300)
    (xs, ys), right = zip(*every), width - 14
    if log:
        margin = 1.15
        y = Scale(min(ys) / margin, max(ys) * margin, bottom, top, log=True)
        marks = [f"{mark:,g}" for mark in y.marks()]
        chart.x = Scale(min(xs) / margin, max(xs) * margin, max(map(text_width, marks)) + 12, right, log=True)
    else:
        low, high = _reach(drawn, ys, band)
        y = Scale(low, high, bottom, top)
        marks = [number(mark, y.marks()) for mark in y.marks()]
        chart.x = Scale(min(xs), max(max(xs), min(xs) + 1), max(map(text_width, marks)) + 12, right)
    chart.y = y
    chart.y_axis(y.marks(), dict(zip(y.marks(), marks)).__getitem__)
    at = chart.x.marks(4 if chart.narrow else 8) if x_marks is None else x_marks
    chart.height = chart.x_axis(x_label, at, lambda mark: f"{mark:,g}", grid=log)
    if band is not None:
        with chart.series(band_label):
            around = chart.points([*band[1], *reversed(band[0])])
            chart.path(around, closed=True, fill="--edge", opacity=0.38)
    for line, look in zip(drawn, looks, strict=True):
        with chart.series(look.words):
            _line(chart, line, look, x_label)
    description = "; ".join(f"{line.label} ends at {line.points[-1][1]:.4g}" for line in drawn)
    return chart.svg(title, description, alone=alone)


def _finite(line: Line) -> Line:
    kept = [i for i, point in enumerate(line.points) if all(map(math.isfinite, point))]
    tips = [line.tips[i] for i in kept] if line.tips else ()
    return Line(label=line.label, points=[line.points[i] for i in kept], bold=line.bold, tips=tips)


def _looks(drawn: Sequence[Line]) -> list[Entry]:
    """A colour for each line; every second one is dashed, so that neighbours differ even without colour."""
    looks, index = [], 0
    for line in drawn:
        if line.bold:
            looks.append(Entry(line.label, "--ink", "line", bold=True))
        else:
            color = CURVE_COLORS[index % len(CURVE_COLORS)]
            looks.append(Entry(line.label, color, "dashes" if index % 2 else "line"))
            index += 1
    return looks


def _reach(drawn: Sequence[Line], ys: Sequence[float], band: object) -> tuple[float, float]:
    """The lowest and the highest value of a linear axis, with a small margin."""
    low, high = min(ys), max(ys)
    steady = [value for line in drawn if line.bold for _, value in line.points]
    if band is not None and steady:
        high = min(high, 2 * max(steady) - min(steady) + 1e-3)
        low = max(low, 2 * min(steady) - max(steady) - 1e-3)
    room = 0.03 * max(high - low, 1e-3)
    return low - room, high + room


def _line(chart: Chart, line: Line, look: Entry, x_label: str) -> None:
    low, high = chart.y.low, chart.y.high
    places = chart.points((x, min(max(value, low), high)) for x, value in line.points)
    tips = line.tips or [f"{line.label}, {x_label} {x:g}: {value:.4g}" for x, value in line.points]
    stroke, dash = 2.6 if line.bold else 1.7, "6 3" if look.mark == "dashes" else None
    chart.path(places, stroke=look.color, stroke_width=stroke, dash=dash, tips=tips)
    for (x, y), (_, value) in zip(places, line.points) if line.tips else ():
        chart.circle(x, y, 3.5, fill=look.color)
        if line.bold:
            words = number(value)
            chart.text(x, y - 9, words, anchor="middle", bold=True, halo=True, optional=True, inside=True)


def stacked_bars(
    stacks: Sequence[Stack], *, title: str, unit: str, limit: float | None = None,
    words: Mapping[str, str] | None = None, width: float = WIDE,
) -> str:  # fmt: skip
    """Horizontal bars on one scale, the largest parts first, each part with its colour; `limit` is a line across.

    Parts below half a per cent of the longest bar are combined as "other". Raises ValueError without bars.
    """
    longest = max((stack.total for stack in stacks), default=0.0)
    if longest <= 0:
        raise ValueError("A figure of stacked bars needs at least one bar with a length.")
    words, x_label = words or {}, f"{title}, {unit}"
    colors = dict(zip(_large(stacks, longest), CURVE_COLORS))
    entries = [
        *(Entry(words.get(name, name), color) for name, color in colors.items()),
        Entry("other", "--idle"),
    ]
    if limit is not None:
        x_label += f"; the limit is {number(limit)}"
        if limit > _FAR_LIMIT * longest:
            limit = None
        else:
            entries.append(Entry("limit", "--bad", "dashes"))
    labels, values = [stack.label for stack in stacks], [number(stack.total) for stack in stacks]
    rows = _Rows(labels, values, (0.0, 1.02 * max(longest, limit or 0.0)), x_label, entries, width)
    for index, stack in enumerate(stacks):
        (y1, y2), done = rows.span(index), 0.0
        small = {name: value for name, value in stack.parts.items() if name not in colors and value > 0}
        listed = ", ".join(
            f"{words.get(k, k)} {small[k]:.3g}" for k in sorted(small, key=lambda k: -small[k])
        )
        parts = [(words.get(name, name), stack.parts.get(name, 0.0), color) for name, color in colors.items()]
        for name, value, color in [*parts, (f"other ({listed})", sum(small.values()), "--idle")]:
            if value > 0:
                tip = f"{name}: {value:.4g} {unit}"
                with rows.series(name.split(" (")[0] if color == "--idle" else name):
                    rows.box(rows.x(done), y1, rows.x(done + value), y2, fill=color, stroke="--card", tip=tip)
                done += value
    if limit is not None:
        rows.rule(limit, stroke="--bad", stroke_width=1.6, dash="5 4")
    return rows.svg(title, "; ".join(f"{stack.label}: {stack.total:.4g} {unit}" for stack in stacks))


def _large(stacks: Sequence[Stack], longest: float) -> list[str]:
    """Parts that get a colour of their own, the largest first, at most one fewer than there are colours."""
    size: dict[str, float] = {}
    for stack in stacks:
        for name, value in stack.parts.items():
            size[name] = max(size.get(name, 0.0), value)
    large = [name for name in sorted(size, key=lambda name: -size[name]) if size[name] > 0.005 * longest]
    return large[: len(CURVE_COLORS) - 1]
