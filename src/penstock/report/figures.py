"""The figures of a ladder: waterfall of gains, bars of memory, curves and differences of loss.

Each takes plain numbers and returns one `<svg>` element. A value that the caller does not have is None and is not
drawn; a missing measurement is never drawn as zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.report.chart import WIDTH, Entry, Plot, Scale, legend, number, signed, text_width, ticks, wrap
from penstock.report.svg import CURVE_COLORS, Canvas

State = Literal["baseline", "kept", "not kept", "absent"]
"""Later steps build on a `kept` one; a `not kept` one was measured; an `absent` one has no measurement."""

_LEFT, _RIGHT = 58.0, 12.0


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
class Curve:
    """One series over steps 1, 2, 3, …"""

    label: str
    values: Sequence[float]
    bold: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """One difference, where there is one."""

    label: str
    value: float | None


def waterfall(bars: Sequence[Bar], *, title: str, y_label: str) -> str:
    """Relative speed step by step; the baseline is 1. A step's gain is drawn on top of the steps before it.

    `predicted` is marked by a diamond. Raises ValueError where no bar has a value.
    """
    plot = _bars(bars, 420.0, y_label, "×", lambda value: f"{value:.2f}×")
    canvas, y = plot.canvas, plot.y
    canvas.line(plot.x.start, y(1), plot.x.stop, y(1), stroke="--edge", dash="4 4")
    half, right, level = _half_width(plot), 0.0, 0.0
    for index, bar in enumerate(bars):
        middle = plot.x(index + 0.5)
        if bar.value is not None and bar.floor == level:  # from the step that this one builds on
            canvas.line(right, y(level), middle - half, y(level), stroke="--edge")
        if bar.value is not None and bar.state in ("baseline", "kept"):
            right, level = middle + half, bar.value
    _bar_legend(canvas, y_label, [("--soft", "where the step starts"), ("--accent", "what it gains")])
    said = "; ".join(f"{b.label} {b.value:.2f}" if b.value else f"{b.label} {b.reason}" for b in bars)
    return canvas.svg(title, said)


def memory_bars(bars: Sequence[Bar], *, title: str, y_label: str) -> str:
    """Peak memory step by step, measured as bars and predicted as diamonds."""
    canvas = _bars(bars, 280.0, y_label, "", number).canvas
    _bar_legend(canvas, y_label, [("--accent", "kept")])
    said = "; ".join(f"{b.label} {b.value:.3g}" for b in bars if b.value is not None)
    return canvas.svg(title, said)


def loss_curves(
    curves: Sequence[Curve],
    *,
    band: tuple[Sequence[float], Sequence[float]] | None,
    band_label: str,
    title: str,
) -> str:
    """Loss over steps, one line per curve, on the band (lowest, highest) of the baseline over its seeds."""
    drawn = [curve for curve in curves if curve.values]
    every = [value for curve in drawn for value in curve.values]
    if band is not None:
        every += [*band[0], *band[1]]
    steps = max(2, *(len(curve.values) for curve in drawn))
    marks = ticks(min(every), max(max(every), min(every) + 1e-3), 5)
    canvas, side = Canvas(WIDTH), 250.0
    plot = Plot(canvas, Scale(1, steps, _LEFT, WIDTH - side), Scale(marks[0], marks[-1], 354, 34))
    plot.y_axis("loss", marks, lambda value: number(value, marks))
    plot.x_axis("optimizer step", [m for m in plot.x.marks(8) if m == int(m)], lambda value: f"{value:.0f}")
    entries = []
    if band is not None:
        low, high = ([(step, v) for step, v in enumerate(edge, 1)] for edge in band)
        canvas.path(plot.points([*high, *reversed(low)]), closed=True, fill="--edge", opacity=0.38)
        entries.append(Entry(band_label, "--edge"))
    colored = 0
    for curve in drawn:
        color, dash = "--ink", None
        if not curve.bold:
            color = CURVE_COLORS[colored % len(CURVE_COLORS)]
            dash = "5 3" if colored >= len(CURVE_COLORS) else None
            colored += 1
        points = plot.points(enumerate(curve.values, 1))
        canvas.path(points, stroke=color, stroke_width=2.6 if curve.bold else 1.5, dash=dash)
        entries.append(Entry(curve.label, color, "line", curve.bold, dash))
    bottom = legend(canvas, entries, plot.x.stop + 22, 50, side - 30, column=True)
    canvas.height = max(400.0, bottom)
    said = "; ".join(f"{c.label} ends at {c.values[-1]:.4f}" for c in drawn)
    return canvas.svg(title, said)


def difference_dots(dots: Sequence[Dot], *, noise: float | None, title: str) -> str:
    """Loss differences from the baseline, one dot per step; the band is ±2 standard deviations over seeds."""
    known = [abs(dot.value) for dot in dots if dot.value is not None]
    reach = max([*known, 2 * noise if noise else 0.0, 1e-4]) * 1.12
    marks, label = ticks(-reach, reach, 4), "loss minus baseline"
    plot = Plot(
        Canvas(WIDTH),
        Scale(0, len(dots), _LEFT, WIDTH - _RIGHT),
        Scale(marks[0], marks[-1], 214, 34),
    )
    canvas, x, y = plot.canvas, plot.x, plot.y
    if noise is not None:
        canvas.rect(x.start, y(2 * noise), x.stop - x.start, y(-2 * noise) - y(2 * noise), fill="--idle")
        entries = [
            Entry("±2 standard deviations of the baseline over seeds", "--idle"),
            Entry("within", "--accent", "dot"), Entry("higher", "--bad", "dot"), Entry("lower", "--c1", "dot"),
        ]  # fmt: skip
        _legend_after(canvas, label, entries)
    plot.y_axis(label, marks, lambda value: f"{value:+g}" if value else "0")
    canvas.line(x.start, y(0), x.stop, y(0), stroke="--ink")
    for index, dot in enumerate(dots):
        middle = x(index + 0.5)
        if dot.value is None:
            canvas.text(middle, y(0) - 6, "–", anchor="middle", fill="--muted")
            continue
        inside = noise is None or abs(dot.value) <= 2 * noise
        color, at = "--accent" if inside else "--bad" if dot.value > 0 else "--c1", y(dot.value)
        canvas.line(middle, y(0), middle, at, stroke=color, stroke_width=1.5)
        canvas.circle(middle, at, 5, fill=color, tip=f"{dot.label}: {dot.value:+.4f}")
        beside = at - 10 if dot.value >= 0 else at + 19
        canvas.text(middle, beside, signed(dot.value, 3), size=11, anchor="middle")
    canvas.height = _step_names(plot, [(dot.label, "--ink") for dot in dots])
    said = "; ".join(f"{dot.label} {dot.value:+.4f}" for dot in dots if dot.value is not None)
    return canvas.svg(title, said)


def _bars(bars: Sequence[Bar], bottom: float, y_label: str, unit: str, write: Callable[[float], str]) -> Plot:
    """Axes, bars with their values and predictions, and the names below."""
    tops = [top for bar in bars for top in (bar.value, bar.high, bar.predicted) if top is not None]
    if not any(bar.value is not None for bar in bars):
        raise ValueError("A figure needs at least one measured bar.")
    marks = ticks(0, max(tops) * 1.06, 5)
    x = Scale(0, len(bars), _LEFT, WIDTH - _RIGHT)
    plot = Plot(Canvas(WIDTH), x, Scale(0, marks[-1], bottom, 44))
    plot.y_axis(y_label, marks, lambda value: number(value, marks) + unit)
    for index, bar in enumerate(bars):
        middle = x(index + 0.5)
        if bar.value is None:
            words = bar.reason or "not measured"
            plot.canvas.text(middle + 4, bottom - 8, words, fill="--muted", rotate=-90)
        else:
            _bar(plot, middle, bar, bar.value, write)
    names = [(bar.label, "--ink" if bar.state in ("baseline", "kept") else "--muted") for bar in bars]
    plot.canvas.height = _step_names(plot, names)
    return plot


def _bar(plot: Plot, middle: float, bar: Bar, value: float, write: Callable[[float], str]) -> None:
    """A step: where it started in a soft colour, its gain above that, then whiskers, prediction and value."""
    canvas, y = plot.canvas, plot.y
    half, kept = _half_width(plot), bar.state == "kept"
    look = {"baseline": "--base", "kept": "--accent"}.get(bar.state, "--idle")
    edge, dash = (None, None) if look != "--idle" else ("--edge", "3 3")
    start = bar.floor if bar.floor is not None and kept else 0.0
    tip = f"{bar.label}: {write(value)}"
    if start:
        canvas.rect(middle - half, y(start), 2 * half, y(0) - y(start), fill="--soft", tip=tip)
    canvas.rect(
        middle - half, y(value), 2 * half, y(start) - y(value),
        fill=look, stroke=edge, dash=dash, radius=2, tip=tip,
    )  # fmt: skip
    if bar.low is not None and bar.high is not None:
        canvas.line(middle, y(bar.low), middle, y(bar.high), stroke="--ink", stroke_width=1.4)
        for end in (bar.low, bar.high):
            canvas.line(middle - 4, y(end), middle + 4, y(end), stroke="--ink", stroke_width=1.4)
    top = y(max(value, start, bar.high or 0.0))
    if bar.predicted is not None:
        at = y(bar.predicted)
        canvas.diamond(middle, at, 6, fill="--mark")
        top = at - 4 if top - 28 < at < top + 4 else top  # keeps clear of the diamond
    faint = bar.state == "not kept"
    color = "--muted" if faint else "--ink"
    canvas.text(middle, top - 7, write(value), size=13, anchor="middle", bold=not faint, fill=color)


def _half_width(plot: Plot) -> float:
    return min(31.0, (plot.x(1) - plot.x(0)) * 0.36)


def _step_names(plot: Plot, names: Sequence[tuple[str, str]]) -> float:
    """Write each step's name and colour below its place, broken to its width; returns the figure's height."""
    slot = plot.x(1) - plot.x(0)
    size = 11.5 if slot >= 66 else 10.5
    lowest = plot.y.start
    for index, (name, color) in enumerate(names):
        for row, line in enumerate(wrap(name, slot - 2, size, most=4)):
            below = plot.y.start + 20 + 15 * row
            plot.canvas.text(plot.x(index + 0.5), below, line, size=size, anchor="middle", fill=color)
            lowest = max(lowest, below)
    return lowest + 6


def _bar_legend(canvas: Canvas, label: str, own: Sequence[tuple[str, str]]) -> None:
    boxes = [("--base", "baseline"), *own, ("--idle", "measured, not kept")]
    entries = [Entry(words, color) for color, words in boxes]
    _legend_after(canvas, label, [*entries, Entry("predicted", "--mark", "diamond")])


def _legend_after(canvas: Canvas, label: str, entries: Sequence[Entry]) -> None:
    """In the first row of a figure, after the label of its y axis."""
    x = text_width(label) + 40
    legend(canvas, entries, x, 16, WIDTH - x)
