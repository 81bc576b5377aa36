"""A chart, written straight as SVG: shapes, scales, axes, a legend, and text that fits its place.

Lengths are in SVG user units, which a page shows as CSS pixels at full width; y grows downwards. Colours are the CSS
variables of `STYLE`, so one figure reads on a light and a dark page, inlined in HTML or by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal, TypedDict, Unpack

WIDTH = 1180.0
"""Of every figure."""
SMALL = 11.5
"""Size of the numbers along an axis."""
# One hue for what was gained, one for what was predicted, one for trouble; everything else is ink in
# shades. Each pair of ink on paper has a contrast of at least 4.5 : 1 in both schemes.
STYLE = """
:root{color-scheme:light dark;--paper:#fbfbf9;--card:#ffffff;--ink:#1c2430;--muted:#5b6675;--line:#e2e5e9;
--accent:#0f766e;--soft:#b5dcd7;--base:#64748b;--idle:#dfe3e8;--edge:#9aa5b3;--mark:#c2410c;--bad:#b4233c;
--c0:#0f766e;--c1:#2563c9;--c2:#9333b8;--c3:#b45309;--c4:#be3455;--c5:#4d7c0f;--c6:#0e7490;--c7:#6d5ae0}
@media (prefers-color-scheme:dark){:root{--paper:#12161c;--card:#1a2029;--ink:#e8ecf1;--muted:#a2adbb;
--line:#2c3541;--accent:#2dd4bf;--soft:#1d5a55;--base:#8794a6;--idle:#2f3946;--edge:#66738a;--mark:#fb923c;
--bad:#fb7185;--c0:#2dd4bf;--c1:#7aa9ff;--c2:#d59bf0;--c3:#f5b04c;--c4:#fb8ba3;--c5:#a3d65c;--c6:#5cc8e8;
--c7:#a99cff}}
svg.figure{font-family:ui-sans-serif,system-ui,"Segoe UI","Helvetica Neue",Arial,sans-serif;display:block;
width:100%;height:auto;font-variant-numeric:tabular-nums;stroke-linejoin:round}
""".strip()

CURVE_COLORS = tuple(f"--c{i}" for i in range(8))

_NARROW, _WIDE = frozenset("fijlrtI.,:;'|!()[] "), frozenset("mwMW@%→×–")
_MARKS = {"box": "■", "dot": "●", "diamond": "◆", "line": "━", "dashes": "┅"}


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
class Entry:
    """A line of a legend: what it means, the colour, and the mark."""

    words: str
    color: str
    mark: Literal["box", "dot", "diamond", "line", "dashes"] = "box"
    bold: bool = False


class Look(TypedDict, total=False):
    """How a shape is drawn. A colour is a variable of `STYLE` or any CSS colour; a shape without one is not filled."""

    fill: str
    opacity: float
    stroke: str | None
    stroke_width: float
    dash: str | None


class Chart:
    """A drawing with one rectangle to draw points in: `x` runs from left to right there, `y` from the bottom up.

    Shapes are placed in units of the drawing, which the two scales give. `svg` gives the text; scales and height may be
    set after the legend, whose rows they have to leave room for.
    """

    x: Scale
    y: Scale

    def __init__(self, height: float = 0.0, width: float = WIDTH) -> None:
        self.width, self.height = width, height
        self._parts: list[str] = []

    def _add(self, tag: str, place: str, look: Look, tip: str = "") -> None:
        style = f"fill:{_color(look.get('fill', 'none'))}"
        if "opacity" in look:
            style += f";fill-opacity:{look['opacity']:g}"
        if stroke := look.get("stroke"):
            style += f";stroke:{_color(stroke)};stroke-width:{look.get('stroke_width', 1.0):g}"
        if dash := look.get("dash"):
            style += f";stroke-dasharray:{dash}"
        inner = f"<title>{escape(tip)}</title>" if tip else ""
        self._parts.append(f'<{tag} {place} style="{style}">{inner}</{tag}>')

    def box(
        self, x1: float, y1: float, x2: float, y2: float, *, radius: float = 0.0, tip: str = "",
        **look: Unpack[Look],
    ) -> None:  # fmt: skip
        """A rectangle between two corners. `tip` is shown to a pointer that rests on it."""
        size = f'width="{abs(x2 - x1):.1f}" height="{abs(y2 - y1):.1f}" rx="{radius:g}"'
        self._add("rect", f'x="{min(x1, x2):.1f}" y="{min(y1, y2):.1f}" {size}', look, tip)

    def line(self, x1: float, y1: float, x2: float, y2: float, **look: Unpack[Look]) -> None:
        """A straight line."""
        self._add("line", f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"', look)

    def path(
        self, points: Iterable[tuple[float, float]], *, closed: bool = False, **look: Unpack[Look]
    ) -> None:
        """A line through points; `closed` makes it a polygon."""
        listed = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._add("polygon" if closed else "polyline", f'points="{listed}"', look)

    def circle(self, x: float, y: float, radius: float, *, tip: str = "", **look: Unpack[Look]) -> None:
        """A disc."""
        self._add("circle", f'cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}"', look, tip)

    def text(
        self, x: float, y: float, words: str, *, size: float = 12.0, fill: str = "--ink", bold: bool = False,
        anchor: Literal["start", "middle", "end"] = "start", rotate: float = 0.0,
    ) -> None:  # fmt: skip
        """One line of text with its baseline at y."""
        turn = f' transform="rotate({rotate:g} {x:.1f} {y:.1f})"' if rotate else ""
        style = f"fill:{_color(fill)};font-size:{size:g}px" + (";font-weight:650" if bold else "")
        place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turn}'
        self._parts.append(f'<text {place} style="{style}">{escape(words)}</text>')

    def x_axis(
        self,
        label: str,
        marks: Sequence[float],
        write: Callable[[float], str] | None = None,
        *,
        grid: bool = False,
    ) -> None:
        """Numbers below the plot, each with a tick or, with `grid`, a line across; the label below them."""
        bottom = self.y.start
        for mark in marks:
            at, words = self.x(mark), number(mark, marks) if write is None else write(mark)
            self.line(
                at, self.y.stop if grid else bottom + 5, at, bottom, stroke="--line" if grid else "--edge"
            )
            self.text(at, bottom + 19, words, size=SMALL, anchor="middle", fill="--muted")
        if label:
            middle = (self.x.start + self.x.stop) / 2
            self.text(middle, bottom + 38, label, anchor="middle", fill="--muted")

    def y_axis(self, marks: Sequence[float], write: Callable[[float], str] | None = None) -> None:
        """A line across the plot for each number, with the number at its left."""
        for mark in marks:
            at, words = self.y(mark), number(mark, marks) if write is None else write(mark)
            self.line(self.x.start, at, self.x.stop, at, stroke="--line")
            self.text(self.x.start - 8, at + 4, words, size=SMALL, anchor="end", fill="--muted")

    def points(self, values: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
        """The places of points (x, y)."""
        return [(self.x(x), self.y(y)) for x, y in values]

    def head(self, label: str, entries: Sequence[Entry]) -> float:
        """The label of the y axis at the upper left, and the legend behind it; returns where the plot may begin."""
        self.text(2, 16, label, fill="--muted")
        left = text_width(label) + 40
        return self.legend(entries, left, 16, self.width - left) + 3

    def legend(self, entries: Sequence[Entry], x: float, y: float, width: float) -> float:
        """Draw entries from (x, y) on in rows of at most `width`.

        y is the baseline of the first row; what is returned is that of the row after the last.
        """
        space, row, at = 22.0, 19.0, x
        for entry in entries:
            lines = wrap(entry.words, width - space, bold=entry.bold)
            taken = space + max(text_width(line, bold=entry.bold) for line in lines)
            if at > x and at + taken > x + width:
                at, y = x, y + row
            self.text(at + 3, y, _MARKS[entry.mark], size=14, fill=entry.color, bold=entry.bold)
            for extra, line in enumerate(lines):
                y += 15.0 if extra else 0.0
                self.text(at + space, y, line, bold=entry.bold, fill="--ink" if entry.bold else "--muted")
            at += taken + 22
        return y + row

    def svg(self, title: str, description: str = "", *, alone: bool = False) -> str:
        """The drawing as an `<svg>` element. `alone` adds what a file of its own needs."""
        head = f'viewBox="0 0 {self.width:g} {self.height:g}" role="img" class="figure"'
        words = f"<title>{escape(title)}</title>"
        if description:
            words += f"<desc>{escape(description)}</desc>"
        if alone:
            size = f'width="{self.width:g}" height="{self.height:g}"'
            head = f'xmlns="http://www.w3.org/2000/svg" {size} {head}'
            words += f'<style>{STYLE}</style><rect width="100%" height="100%" style="fill:var(--card)"/>'
        return f"<svg {head}>{words}{''.join(self._parts)}</svg>"


def _color(name: str) -> str:
    return f"var({name})" if name.startswith("--") else name


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
