"""The figures of ladders and plans: bars, lines, and bars made of parts.

Each takes plain numbers and returns one `<svg>` element. A value that the caller does not have is None and is not
drawn; a missing measurement is never drawn as zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.report.chart import CURVE_COLORS, SMALL, WIDTH, Chart, Entry, Scale, number, signed, ticks, wrap

State = Literal["baseline", "kept", "not kept", "absent", "higher", "lower"]
"""Later steps build on a `kept` one; a `not kept` one was measured; an `absent` one has no measurement. `higher` and
`lower` are outside the noise."""

_COLORS = {"baseline": "--base", "kept": "--accent", "higher": "--bad", "lower": "--c1"}
_BASELINE, _UNKEPT = Entry("baseline", "--base"), Entry("measured, not kept", "--idle")
_PREDICTED = Entry("predicted", "--mark", "diamond")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One step of a figure with a bar per step."""

    label: str
    state: State
    value: float | None = None
    low: float | None = None
    high: float | None = None
    """The spread around `value`."""
    floor: float | None = None
    """The value before the step; what is above it is the gain."""
    predicted: float | None = None
    reason: str = ""
    """Why there is no value: a few words, written in the bar's place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a figure: its name and its points (x, y)."""

    label: str
    points: Sequence[tuple[float, float]]
    bold: bool = False
    tips: Sequence[str] = ()
    """Shown to a pointer at each point; points are marked where there are tips, and those of a bold line have their
    values above them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One bar: its name and its parts, in order."""

    label: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        """Its length."""
        return sum(self.parts.values())


def waterfall(bars: Sequence[Bar], *, title: str, y_label: str) -> str:
    """Relative speed step by step; the baseline is 1. A step's gain is drawn on top of the steps before it.

    `predicted` is marked by a diamond. Raises ValueError where no bar has a value.
    """
    entries = [
        _BASELINE, Entry("where the step starts", "--soft"), Entry("what it gains", "--accent"), _UNKEPT, _PREDICTED,
    ]  # fmt: skip
    chart = _bars(bars, 376.0, y_label, entries, lambda value: f"{value:.2f}×")
    x, y = chart.x, chart.y
    chart.line(x.start, y(1), x.stop, y(1), stroke="--edge", dash="4 4")
    half, right, level = _half_width(chart), 0.0, 0.0
    for index, bar in enumerate(bars):
        middle = x(index + 0.5)
        if bar.value is not None and bar.floor == level:  # from the step that this one builds on
            chart.line(right, y(level), middle - half, y(level), stroke="--edge")
        if bar.value is not None and bar.state in ("baseline", "kept"):
            right, level = middle + half, bar.value
    said = "; ".join(f"{b.label} {b.value:.2f}" if b.value else f"{b.label} {b.reason}" for b in bars)
    return chart.svg(title, said)


def memory_bars(bars: Sequence[Bar], *, title: str, y_label: str) -> str:
    """Peak memory step by step, measured as bars and predicted as diamonds."""
    entries = [_BASELINE, Entry("kept", "--accent"), _UNKEPT, _PREDICTED]
    said = "; ".join(f"{b.label} {b.value:.3g}" for b in bars if b.value is not None)
    return _bars(bars, 236.0, y_label, entries, number).svg(title, said)


def difference_bars(bars: Sequence[Bar], *, noise: float, title: str) -> str:
    """Loss differences from the baseline; the band is ±2 standard deviations over seeds."""
    entries = [
        Entry("±2 standard deviations of the baseline over seeds", "--idle"), Entry("within", "--accent"),
        Entry("higher", "--bad"), Entry("lower", "--c1"),
    ]  # fmt: skip
    chart = _bars(bars, 180.0, "loss minus baseline", entries, lambda value: signed(value, 3), band=2 * noise)
    said = "; ".join(f"{bar.label} {bar.value:+.4f}" for bar in bars if bar.value is not None)
    return chart.svg(title, said)


def _bars(
    bars: Sequence[Bar], height: float, y_label: str, entries: Sequence[Entry], write: Callable[[float], str],
    *, band: float | None = None,
) -> Chart:  # fmt: skip
    """Axes, bars with their values and predictions, and the names below; a `band` lies around 0."""
    if not any(bar.value is not None for bar in bars):
        raise ValueError("A figure needs at least one measured bar.")
    ends = [end for bar in bars for end in (bar.value, bar.high, bar.predicted) if end is not None]
    reach = [0.0] if band is None else [-band, band, -1e-4, 1e-4]
    marks = ticks(min(*ends, *reach) * 1.12, max(*ends, *reach) * 1.06, 5)
    chart = Chart()
    top = chart.head(y_label, entries) + 6
    chart.x = Scale(0, len(bars), 58.0, WIDTH - 12.0)
    chart.y = Scale(marks[0], marks[-1], top + height, top)
    x, y = chart.x, chart.y
    if band is not None:
        chart.box(x.start, y(-band), x.stop, y(band), fill="--idle")
    chart.y_axis(marks)
    chart.line(x.start, y(0), x.stop, y(0), stroke="--edge")
    for index, bar in enumerate(bars):
        middle = x(index + 0.5)
        if bar.value is None:
            chart.text(middle + 4, y(0) - 8, bar.reason or "not measured", fill="--muted", rotate=-90)
        else:
            _bar(chart, middle, bar, bar.value, write)
    chart.height = _names_below(chart, bars)
    return chart


def _bar(chart: Chart, middle: float, bar: Bar, value: float, write: Callable[[float], str]) -> None:
    """A step: where it started in a soft colour, its gain above that, then whiskers, prediction and value."""
    y, half, ink = chart.y, _half_width(chart), "--ink"
    look = _COLORS.get(bar.state, "--idle")
    edge, dash = (None, None) if look != "--idle" else ("--edge", "3 3")
    start = min(bar.floor, value) if bar.floor is not None and bar.state == "kept" else 0.0
    tip = f"{bar.label}: {write(value)}"
    if start:
        chart.box(middle - half, y(0), middle + half, y(start), fill="--soft", tip=tip)
    chart.box(
        middle - half, y(start), middle + half, y(value), fill=look, stroke=edge, dash=dash, radius=2, tip=tip
    )
    if bar.low is not None and bar.high is not None:
        chart.line(middle, y(bar.low), middle, y(bar.high), stroke=ink, stroke_width=1.4)
        for end in (bar.low, bar.high):
            chart.line(middle - 4, y(end), middle + 4, y(end), stroke=ink, stroke_width=1.4)
    top = y(max(value, start, bar.high or 0.0))
    if bar.predicted is not None:
        at = y(bar.predicted)
        around = [(middle, at - 6), (middle + 6, at), (middle, at + 6), (middle - 6, at)]
        chart.path(around, closed=True, fill=_PREDICTED.color, stroke="--card")
        top = at - 4 if top - 28 < at < top + 4 else top  # keeps clear of the diamond
    faint = bar.state == "not kept"
    beside = y(value) + 18 if value < 0 else top - 7
    fill = "--muted" if faint else ink
    chart.text(middle, beside, write(value), size=13, anchor="middle", bold=not faint, fill=fill)


def _half_width(chart: Chart) -> float:
    return min(31.0, (chart.x(1) - chart.x(0)) * 0.36)


def _names_below(chart: Chart, bars: Sequence[Bar]) -> float:
    """Write each step's name below its place, broken to its width; returns the figure's height."""
    slot = chart.x(1) - chart.x(0)
    size = SMALL if slot >= 66 else 10.5
    lowest = chart.y.start
    for index, bar in enumerate(bars):
        fill = "--muted" if bar.state in ("not kept", "absent") else "--ink"
        for row, line in enumerate(wrap(bar.label, slot - 2, size, most=4)):
            below = chart.y.start + 20 + 15 * row
            chart.text(chart.x(index + 0.5), below, line, size=size, anchor="middle", fill=fill)
            lowest = max(lowest, below)
    return lowest + 6


def lines(
    drawn: Sequence[Line],
    *,
    title: str,
    x_label: str,
    y_label: str,
    log: bool = False,
    x_marks: Sequence[float] | None = None,
    band: tuple[Sequence[tuple[float, float]], Sequence[tuple[float, float]]] | None = None,
    band_label: str = "",
) -> str:
    """Lines, a colour each and the bold ones in black, on the band between a lower and an upper line.

    With `log` both axes are logarithmic. Raises ValueError without any point.
    """
    drawn = [line for line in drawn if line.points]
    every = [point for points in (*(line.points for line in drawn), *(band or ())) for point in points]
    if not every:
        raise ValueError("A figure of lines needs at least one point.")
    plain = [line for line in drawn if not line.bold]
    looks = dict.fromkeys((line.label for line in drawn if line.bold), ("--ink", "line"))
    for index, line in enumerate(plain):
        color = CURVE_COLORS[index % len(CURVE_COLORS)]
        looks[line.label] = (color, "line" if index < len(CURVE_COLORS) else "dashes")
    chart = Chart()
    entries = [Entry(band_label, "--edge")] if band else []
    entries += [Entry(line.label, *looks[line.label], line.bold) for line in drawn]  # type: ignore[arg-type]
    top = chart.head(y_label, entries) + 6
    chart.height = top + 360
    xs, ys = zip(*every)
    if log:
        margin, bottom = 1.15, chart.height - 48
        chart.x = Scale(min(xs) / margin, max(xs) * margin, 84.0, WIDTH - 30, log=True)
        chart.y = Scale(min(ys) / margin, max(ys) * margin, bottom, top, log=True)
        chart.y_axis(chart.y.marks(), lambda mark: f"{mark:.3g}")
    else:
        marks = ticks(min(ys), max(max(ys), min(ys) + 1e-3), 5)
        chart.x = Scale(min(xs), max(max(xs), min(xs) + 1), 58.0, WIDTH - 12)
        chart.y = Scale(marks[0], marks[-1], chart.height - 48, top)
        chart.y_axis(marks)
    at = chart.x.marks(8) if x_marks is None else x_marks
    chart.x_axis(x_label, at, lambda mark: f"{mark:,g}", grid=log)
    if band is not None:
        low, high = band
        chart.path(chart.points([*high, *reversed(low)]), closed=True, fill="--edge", opacity=0.38)
    for line in drawn:
        color, mark = looks[line.label]
        places = chart.points(line.points)
        width = 2.6 if line.bold else 1.6
        chart.path(places, stroke=color, stroke_width=width, dash="5 3" if mark == "dashes" else None)
        for (x, y), tip in zip(places, line.tips):
            chart.circle(x, y, 4, fill=color, tip=tip)
        for (x, y), (_, value) in zip(places, line.points if line.tips and line.bold else ()):
            chart.text(x, y - 11, number(value), anchor="middle", bold=True)
    said = "; ".join(f"{line.label} ends at {line.points[-1][1]:.4g}" for line in drawn)
    return chart.svg(title, said)


def stacked_bars(
    stacks: Sequence[Stack],
    *,
    title: str,
    unit: str,
    limit: float | None = None,
    words: Mapping[str, str] | None = None,
) -> str:
    """Horizontal bars of one scale, the largest parts first, each part with its colour; `limit` is a line across.

    Parts below half a per cent of the longest bar are summed up as "other". Raises ValueError without any bar.
    """
    longest = max((stack.total for stack in stacks), default=0.0)
    if longest <= 0:
        raise ValueError("A figure of stacked bars needs at least one bar with a length.")
    left, right, row = 250.0, WIDTH - 60.0, 34.0
    words = words or {}
    colors = dict(zip(_large(stacks, longest), CURVE_COLORS))
    chart = Chart()
    entries = [Entry(words.get(name, name), color) for name, color in colors.items()]
    head = chart.head(unit, [*entries, Entry("other", "--idle")]) + 3
    bottom = head + row * len(stacks)
    x = chart.x = Scale(0, max(longest, limit or 0.0) * 1.04, left, right)
    chart.y = Scale(0, len(stacks), bottom, head - 4)
    chart.x_axis("", x.marks(6), grid=True)
    for index, stack in enumerate(stacks):
        y, done = head + index * row, 0.0
        for extra, text in enumerate(wrap(stack.label, left - 14, 11, most=2)):
            chart.text(left - 10, y + 14 + 13 * extra, text, size=11, anchor="end")
        small = {name: value for name, value in stack.parts.items() if name not in colors and value > 0}
        listed = ", ".join(
            f"{words.get(k, k)} {small[k]:.3g}" for k in sorted(small, key=lambda k: -small[k])
        )
        parts = [(words.get(name, name), stack.parts.get(name, 0.0), color) for name, color in colors.items()]
        for name, value, color in [*parts, (f"other ({listed})", sum(small.values()), "--idle")]:
            if value > 0:
                tip = f"{name}: {value:.4g} {unit}"
                chart.box(x(done), y + 4, x(done + value), y + row - 8, fill=color, tip=tip)
                done += value
        # In a column of their own, right of the limit: beside short bars the line would cross them.
        chart.text(right + 10, y + 19, number(stack.total), bold=True)
    if limit is not None:
        at = x(limit)
        chart.line(at, head - 8, at, bottom, stroke="--bad", stroke_width=1.6, dash="5 4")
        chart.text(at, head - 12, f"limit {number(limit)}", size=SMALL, anchor="middle", fill="--bad")
    chart.height = bottom + 30
    return chart.svg(title, "; ".join(f"{stack.label}: {stack.total:.4g} {unit}" for stack in stacks))


def _large(stacks: Sequence[Stack], longest: float) -> list[str]:
    """Parts worth a colour of their own, the largest first, at most as many as there are colours less one."""
    size: dict[str, float] = {}
    for stack in stacks:
        for name, value in stack.parts.items():
            size[name] = max(size.get(name, 0.0), value)
    kept = [name for name in sorted(size, key=lambda name: -size[name]) if size[name] > 0.005 * longest]
    return kept[: len(CURVE_COLORS) - 1]
