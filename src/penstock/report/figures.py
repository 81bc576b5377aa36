"""The figures of a report: waterfall of gains, bars of memory, curves of loss.

Each takes plain numbers and returns one `<svg>` element. Values the caller does not have are None and are not
drawn; nothing is ever drawn as zero for want of a measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.report.svg import CURVE_COLORS, Canvas, number, signed, ticks, wrap

State = Literal["baseline", "kept", "left", "absent"]
"""`kept` steps are built upon, `left` ones were measured and are not, `absent` ones have no measurement."""

WIDTH = 1180.0
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
    """Where the step started from; what lies above is its gain."""
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


@dataclass(frozen=True, slots=True)
class _Frame:
    """The axes' rectangle and the linear scales of both directions."""

    left: float
    top: float
    right: float
    bottom: float
    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return self.left + (value - self.x_low) / (self.x_high - self.x_low) * (self.right - self.left)

    def y(self, value: float) -> float:
        return self.bottom - (value - self.y_low) / (self.y_high - self.y_low) * (self.bottom - self.top)


def waterfall(bars: Sequence[Bar], *, title: str, y_label: str, alone: bool = False) -> str:
    """Relative speed step by step, 1 being the baseline: what each step gains stands on what went before it.

    `predicted` is marked by a diamond beside the bar. Raises ValueError where no bar has a value.
    """
    canvas, frame, slot = _bar_frame(bars, height=420.0, y_label=y_label, unit="×")
    canvas.line(frame.left, frame.y(1), frame.right, frame.y(1), stroke="--edge", dash="4 4")
    level: tuple[float, float] | None = None  # right edge and height of the bar that is built upon
    for index, bar in enumerate(bars):
        middle, half = frame.left + (index + 0.5) * slot, _half_width(slot)
        if bar.value is None:
            _absent(canvas, frame, middle, bar)
        else:
            if level is not None:
                canvas.line(level[0], frame.y(level[1]), middle - half, frame.y(level[1]), stroke="--edge")
            _step(canvas, frame, middle, half, bar)
            _value_label(canvas, frame, middle, bar, f"{bar.value:.2f}×")
            _predicted(canvas, frame, middle, bar)
            if bar.state in ("baseline", "kept"):
                level = (middle + half, bar.value)
        _step_label(canvas, frame, middle, slot, bar)
    _legend(
        canvas,
        [("--base", "baseline"), ("--soft", "where the step starts"), ("--accent", "what it gains"),
         ("--idle", "measured, not kept"), ("diamond", "predicted")],
    )  # fmt: skip
    said = "; ".join(f"{b.label} {b.value:.2f}" if b.value else f"{b.label} {b.reason}" for b in bars)
    return canvas.svg(title, said, alone=alone)


def memory_bars(bars: Sequence[Bar], *, title: str, y_label: str, unit: str = "", alone: bool = False) -> str:
    """Peak memory step by step, measured as bars and predicted as diamonds."""
    canvas, frame, slot = _bar_frame(bars, height=280.0, y_label=y_label, unit=unit)
    for index, bar in enumerate(bars):
        middle, half = frame.left + (index + 0.5) * slot, _half_width(slot)
        if bar.value is None:
            _absent(canvas, frame, middle, bar)
        else:
            fill = {"baseline": "--base", "kept": "--accent"}.get(bar.state, "--idle")
            edge = "--edge" if bar.state == "left" else None
            top = frame.y(bar.value)
            tip = f"{bar.label}: {bar.value:.3g}{unit}"
            canvas.rect(
                middle - half, top, 2 * half, frame.bottom - top, fill=fill, stroke=edge, radius=2, tip=tip
            )
            _value_label(canvas, frame, middle, bar, number(bar.value))
            _predicted(canvas, frame, middle, bar)
        _step_label(canvas, frame, middle, slot, bar)
    _legend(
        canvas,
        [
            ("--base", "baseline"),
            ("--accent", "kept"),
            ("--idle", "measured, not kept"),
            ("diamond", "predicted"),
        ],
    )
    said = "; ".join(f"{b.label} {b.value:.3g}{unit}" for b in bars if b.value is not None)
    return canvas.svg(title, said, alone=alone)


def loss_curves(
    curves: Sequence[Curve],
    *,
    band: tuple[Sequence[float], Sequence[float]] | None,
    band_label: str,
    title: str,
    alone: bool = False,
) -> str:
    """Loss over steps, one line per curve, on the band (lowest, highest) of the baseline over its seeds."""
    drawn = [curve for curve in curves if curve.values]
    every = [value for curve in drawn for value in curve.values]
    if band is not None:
        every += [*band[0], *band[1]]
    steps = max(len(curve.values) for curve in drawn)
    marks = ticks(min(every), max(max(every), min(every) + 1e-3), 5)
    canvas = Canvas(WIDTH, 400.0)
    legend_width = 250.0
    frame = _Frame(_LEFT, 34, WIDTH - legend_width, 354, 1, max(steps, 2), marks[0], marks[-1])
    _grid(canvas, frame, marks, "loss", lambda value: number(value, marks))
    for mark in ticks(1, max(steps, 2), 8):
        if mark >= 1 and mark == int(mark) and mark <= steps:
            canvas.text(frame.x(mark), frame.bottom + 18, f"{mark:.0f}", anchor="middle", fill="--muted")
    canvas.text(
        (frame.left + frame.right) / 2, frame.bottom + 38, "optimizer step", anchor="middle", fill="--muted"
    )
    if band is not None:
        low, high = band
        outline = [(frame.x(i + 1), frame.y(v)) for i, v in enumerate(high)]
        outline += [(frame.x(i + 1), frame.y(v)) for i, v in reversed(list(enumerate(low)))]
        canvas.polygon(outline, fill="--edge", opacity=0.38)
    x = frame.right + 22
    if band is not None:
        canvas.rect(x, 40, 22, 12, fill="--edge", radius=2)
        canvas.text(x + 30, 50, band_label, size=12, fill="--muted")
    colored, y = 0, 70.0
    for curve in drawn:
        color, dash = "--ink", None
        if not curve.bold:
            color = CURVE_COLORS[colored % len(CURVE_COLORS)]
            dash = "5 3" if colored >= len(CURVE_COLORS) else None
            colored += 1
        width = 2.6 if curve.bold else 1.5
        points = [(frame.x(i + 1), frame.y(value)) for i, value in enumerate(curve.values)]
        canvas.polyline(points, stroke=color, width=width, dash=dash)
        canvas.line(x, y - 4, x + 22, y - 4, stroke=color, width=width + 0.6, dash=dash)
        for line in wrap(curve.label, 29 if curve.bold else 34):
            canvas.text(x + 30, y, line, size=11.5, bold=curve.bold)
            y += 15.0
        y += 5.0
    said = "; ".join(f"{c.label} ends at {c.values[-1]:.4f}" for c in drawn)
    return canvas.svg(title, said, alone=alone)


def difference_dots(dots: Sequence[Dot], *, noise: float | None, title: str, alone: bool = False) -> str:
    """Loss differences from the baseline, one dot per step; the band is ±2 standard deviations over seeds."""
    known = [abs(dot.value) for dot in dots if dot.value is not None]
    reach = max([*known, 2 * noise if noise else 0.0, 1e-4]) * 1.12
    marks = ticks(-reach, reach, 4)
    slot = (WIDTH - _RIGHT - _LEFT) / len(dots)
    canvas = Canvas(WIDTH, 240 + 15.0 * max(len(_lines(dot.label, slot)) for dot in dots))
    frame = _Frame(_LEFT, 34, WIDTH - _RIGHT, 214, 0, 1, marks[0], marks[-1])
    if noise is not None:
        top, bottom = frame.y(2 * noise), frame.y(-2 * noise)
        canvas.rect(frame.left, top, frame.right - frame.left, bottom - top, fill="--idle")
    _grid(canvas, frame, marks, "loss minus baseline", lambda value: f"{value:+g}" if value else "0")
    canvas.line(frame.left, frame.y(0), frame.right, frame.y(0), stroke="--ink")
    for index, dot in enumerate(dots):
        middle = frame.left + (index + 0.5) * slot
        if dot.value is not None:
            color = _dot_color(dot.value, noise)
            y = frame.y(dot.value)
            canvas.line(middle, frame.y(0), middle, y, stroke=color, width=1.5)
            canvas.circle(middle, y, 5, fill=color, tip=f"{dot.label}: {dot.value:+.4f}")
            above = y - 10 if dot.value >= 0 else y + 19
            canvas.text(middle, above, signed(dot.value, 3), size=11, anchor="middle")
        else:
            canvas.text(middle, frame.y(0) - 6, "–", anchor="middle", fill="--muted")
        for row, line in enumerate(_lines(dot.label, slot)):
            canvas.text(middle, frame.bottom + 20 + 15 * row, line, size=_size(slot), anchor="middle")
    if noise is not None:
        _legend(
            canvas,
            [("--idle", "±2 standard deviations of the baseline over seeds"), ("--accent", "within"),
             ("--bad", "higher"), ("--c1", "lower")],
        )  # fmt: skip
    said = "; ".join(f"{dot.label} {dot.value:+.4f}" for dot in dots if dot.value is not None)
    return canvas.svg(title, said, alone=alone)


def _dot_color(value: float, noise: float | None) -> str:
    if noise is None or abs(value) <= 2 * noise:
        return "--accent"
    return "--bad" if value > 0 else "--c1"


def _bar_frame(
    bars: Sequence[Bar], *, height: float, y_label: str, unit: str
) -> tuple[Canvas, _Frame, float]:
    tops = [top for bar in bars for top in (bar.value, bar.high, bar.predicted) if top is not None]
    if not any(bar.value is not None for bar in bars):
        raise ValueError("A figure needs at least one measured bar.")
    marks = ticks(0, max(tops) * 1.06, 5)
    slot = (WIDTH - _RIGHT - _LEFT) / len(bars)
    below = 26 + 15.0 * max(len(_lines(bar.label, slot)) for bar in bars)
    canvas = Canvas(WIDTH, height + below)
    frame = _Frame(_LEFT, 44, WIDTH - _RIGHT, height, 0, 1, 0, marks[-1])
    _grid(canvas, frame, marks, y_label, lambda value: number(value, marks) + unit)
    return canvas, frame, slot


def _grid(
    canvas: Canvas, frame: _Frame, marks: Sequence[float], label: str, write: Callable[[float], str]
) -> None:
    for mark in marks:
        y = frame.y(mark)
        canvas.line(frame.left, y, frame.right, y, stroke="--line")
        canvas.text(frame.left - 8, y + 4, write(mark), size=11.5, anchor="end", fill="--muted")
    canvas.text(2, 16, label, size=12, fill="--muted")


def _half_width(slot: float) -> float:
    return min(31.0, slot * 0.36)


def _step(canvas: Canvas, frame: _Frame, middle: float, half: float, bar: Bar) -> None:
    """A waterfall's bar: up to where it started in a soft colour, and from there its gain."""
    value, floor = bar.value or 0.0, bar.floor
    x, width, bottom = middle - half, 2 * half, frame.bottom
    tip = f"{bar.label}: {value:.2f}×"
    if bar.state == "baseline":
        canvas.rect(x, frame.y(value), width, bottom - frame.y(value), fill="--base", radius=2, tip=tip)
    elif bar.state == "left" or floor is None:
        top = frame.y(value)
        canvas.rect(
            x, top, width, bottom - top, fill="--idle", stroke="--edge", dash="3 3", radius=2, tip=tip
        )
    else:
        canvas.rect(x, frame.y(floor), width, bottom - frame.y(floor), fill="--soft", tip=tip)
        canvas.rect(
            x, frame.y(value), width, frame.y(floor) - frame.y(value), fill="--accent", radius=2, tip=tip
        )
    if bar.low is not None and bar.high is not None:
        canvas.line(middle, frame.y(bar.low), middle, frame.y(bar.high), stroke="--ink", width=1.4)
        for end in (bar.low, bar.high):
            canvas.line(middle - 4, frame.y(end), middle + 4, frame.y(end), stroke="--ink", width=1.4)


def _predicted(canvas: Canvas, frame: _Frame, middle: float, bar: Bar) -> None:
    if bar.predicted is not None:
        canvas.diamond(middle, frame.y(bar.predicted), 6, fill="--mark")


def _value_label(canvas: Canvas, frame: _Frame, middle: float, bar: Bar, words: str) -> None:
    top = frame.y(max(bar.value or 0.0, bar.high or 0.0))
    if bar.predicted is not None and top - 22 < frame.y(bar.predicted) < top + 4:
        top = frame.y(bar.predicted) - 4  # keep clear of the diamond
    faint = bar.state == "left"
    canvas.text(
        middle, top - 7, words, size=13, anchor="middle", bold=not faint, fill="--muted" if faint else "--ink"
    )


def _absent(canvas: Canvas, frame: _Frame, middle: float, bar: Bar) -> None:
    words = bar.reason or "not measured"
    canvas.text(middle + 4, frame.bottom - 8, words, size=12, fill="--muted", rotate=-90)


def _step_label(canvas: Canvas, frame: _Frame, middle: float, slot: float, bar: Bar) -> None:
    color = "--ink" if bar.state in ("baseline", "kept") else "--muted"
    for row, line in enumerate(_lines(bar.label, slot)):
        canvas.text(middle, frame.bottom + 20 + 15 * row, line, size=_size(slot), anchor="middle", fill=color)


def _lines(label: str, slot: float) -> list[str]:
    """A label broken to the width of its bar's slot."""
    return wrap(label, max(8, int(slot / (0.55 * _size(slot)))))[:4]


def _size(slot: float) -> float:
    return 11.5 if slot >= 66 else 10.5


def _legend(canvas: Canvas, entries: Sequence[tuple[str, str]]) -> None:
    x = WIDTH - _RIGHT
    for color, words in reversed(entries):
        x -= 7.0 * len(words) + 4
        canvas.text(x, 16, words, size=12, fill="--muted")
        if color == "diamond":
            canvas.diamond(x - 12, 12, 6, fill="--mark")
        else:
            canvas.rect(
                x - 20, 6, 14, 12, fill=color, radius=2, stroke="--edge" if color == "--idle" else None
            )
        x -= 38
