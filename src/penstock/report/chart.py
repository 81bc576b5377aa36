"""What all figures share: scales, axes, legends, and text that fits its place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.report.svg import Canvas

WIDTH = 1180.0
"""Of every figure."""
SMALL = 11.5
"""Size of the numbers along an axis."""

_NARROW, _WIDE = frozenset("fijlrtI.,:;'|!()[] "), frozenset("mwMW@%→×–")


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps numbers to a length of the drawing: `low` to `start`, and `high` to `stop`."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log(value), math.log(low), math.log(high)
        return self.start + (value - low) / (high - low) * (self.stop - self.start)

    def marks(self, about: int = 5) -> list[float]:
        """About so many round numbers; on a logarithmic scale 1, 2 and 5 of each decade, or the decades alone."""
        if not self.log:
            near = 1e-9 * (self.high - self.low)
            return [m for m in ticks(self.low, self.high, about) if self.low - near <= m <= self.high + near]
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        steps = (1.0, 2.0, 5.0) if last - first <= 3 else (1.0,)
        every = [step * 10.0**power for power in range(first, last + 1) for step in steps]
        return [mark for mark in every if self.low <= mark <= self.high]


@dataclass(frozen=True, slots=True)
class Plot:
    """A rectangle of a canvas to draw points in: `x` runs from left to right, `y` from the bottom up."""

    canvas: Canvas
    x: Scale
    y: Scale

    def x_axis(
        self, label: str, marks: Iterable[float], write: Callable[[float], str], *, grid: bool = False
    ) -> None:
        """Numbers below the plot, each with a tick or, with `grid`, a line across; the label below them."""
        top = self.y.stop if grid else self.y.start + 5
        for mark in marks:
            at = self.x(mark)
            self.canvas.line(at, top, at, self.y.start, stroke="--line" if grid else "--edge")
            self.canvas.text(at, self.y.start + 19, write(mark), size=SMALL, anchor="middle", fill="--muted")
        middle = (self.x.start + self.x.stop) / 2
        self.canvas.text(middle, self.y.start + 38, label, anchor="middle", fill="--muted")

    def y_axis(self, label: str, marks: Iterable[float], write: Callable[[float], str]) -> None:
        """A line across the plot for each number, with the number at its left; the label is at the upper left."""
        for mark in marks:
            at = self.y(mark)
            self.canvas.line(self.x.start, at, self.x.stop, at, stroke="--line")
            self.canvas.text(self.x.start - 8, at + 4, write(mark), size=SMALL, anchor="end", fill="--muted")
        self.canvas.text(2, 16, label, fill="--muted")

    def points(self, values: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
        """The places of points (x, y)."""
        return [(self.x(x), self.y(y)) for x, y in values]


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of a legend: a mark, its colour, and what it means."""

    words: str
    color: str
    mark: Literal["box", "dot", "diamond", "line"] = "box"
    bold: bool = False
    dash: str | None = None


def legend(
    canvas: Canvas, entries: Sequence[Entry], x: float, y: float, width: float, *, column: bool = False
) -> float:
    """Draw entries from (x, y) on in rows of at most `width`, or with `column` one below the other.

    y is the baseline of the first row; what is returned is that of the row after the last.
    """
    space, row, at = 24.0, 19.0, x
    for entry in entries:
        lines = wrap(entry.words, width - space, bold=entry.bold)
        taken = space + max(text_width(line, bold=entry.bold) for line in lines)
        if at > x and (column or at + taken > x + width):
            at, y = x, y + row
        _mark(canvas, entry, at, y - 4)
        for extra, line in enumerate(lines):
            y += 15.0 if extra else 0.0
            canvas.text(at + space, y, line, bold=entry.bold, fill="--ink" if entry.bold else "--muted")
        at += taken + 22
    return y + row


def _mark(canvas: Canvas, entry: Entry, x: float, y: float) -> None:
    if entry.mark == "box":
        edge = "--edge" if entry.color == "--idle" else None
        canvas.rect(x + 2, y - 6, 14, 12, fill=entry.color, stroke=edge, radius=2)
    elif entry.mark == "dot":
        canvas.circle(x + 9, y, 4, fill=entry.color)
    elif entry.mark == "diamond":
        canvas.diamond(x + 9, y, 6, fill=entry.color)
    else:
        width = 3.0 if entry.bold else 2.0
        canvas.line(x, y, x + 18, y, stroke=entry.color, stroke_width=width, dash=entry.dash)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers that span [low, high], about as many as asked, a round step apart."""
    if not math.isfinite(low) or not math.isfinite(high) or high <= low:
        raise ValueError(f"An axis must rise between finite numbers, not from {low} to {high}.")
    rough = (high - low) / max(about, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def number(value: float, steps: Sequence[float] = ()) -> str:
    """A number for an axis or a label: with the decimals that `steps` need, else with three significant digits."""
    if len(steps) > 1:
        step = steps[1] - steps[0]
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        if abs(step * 10**decimals - round(step * 10**decimals)) > 1e-6:  # steps of 2.5
            decimals += 1
        return f"{value:.{decimals}f}"
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(decimals, 6)}f}"


def signed(value: float, decimals: int) -> str:
    """A difference with its sign, which one that rounds to nothing does not have."""
    rounded = round(value, decimals)
    return f"{rounded:+.{decimals}f}" if rounded else f"{0:.{decimals}f}"


def text_width(words: str, size: float = 12.0, *, bold: bool = False) -> float:
    """About how wide a line of text is, in the wider of the fonts that a page may be shown in."""
    ems = sum(0.36 if c in _NARROW else 0.92 if c in _WIDE else 0.71 if c.isupper() else 0.62 for c in words)
    return ems * size * (1.16 if bold else 1.0)


def wrap(
    words: str, width: float, size: float = 12.0, *, bold: bool = False, most: int | None = None
) -> list[str]:
    """A label broken between words into lines of at most `width`; what is beyond `most` lines ends in an ellipsis."""
    lines: list[str] = []
    for word in words.split():
        if lines and text_width(f"{lines[-1]} {word}", size, bold=bold) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    if most is not None and len(lines) > most:
        lines[most - 1 :] = [f"{lines[most - 1]} …"]
    return lines or [""]
