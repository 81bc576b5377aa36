"""The few drawing commands our figures need, written straight as SVG.

Lengths are in SVG user units, which a page shows as CSS pixels at full width; y grows downwards. Colours are
the CSS variables of `STYLE`, so one figure reads on a light and a dark page, inlined in HTML or by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Literal

Anchor = Literal["start", "middle", "end"]

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
width:100%;height:auto}
svg.figure text{fill:var(--ink)}
""".strip()

CURVE_COLORS = tuple(f"--c{i}" for i in range(8))


class Canvas:
    """A drawing under construction. Methods append; `svg` gives the text."""

    def __init__(self, width: float, height: float) -> None:
        self.width = width
        self.height = height
        self._parts: list[str] = []

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str,
        stroke: str | None = None,
        dash: str | None = None,
        radius: float = 0.0,
        tip: str = "",
    ) -> None:
        """A rectangle; `tip` is what a pointer resting on it is told."""
        style = f"fill:{_color(fill)}" + _stroke(stroke, 1.0, dash)
        size = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{max(height, 0):.1f}"'
        inner = f"<title>{escape(tip)}</title>" if tip else ""
        self._parts.append(f'<rect {size} rx="{radius:g}" style="{style}">{inner}</rect>')

    def line(
        self,
        x1: float,
        y1: float,
        x2: float,
        y2: float,
        *,
        stroke: str,
        width: float = 1.0,
        dash: str | None = None,
    ) -> None:
        """A straight line."""
        ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
        self._parts.append(f'<line {ends} style="{_stroke(stroke, width, dash).lstrip(";")}"/>')

    def polyline(
        self,
        points: Iterable[tuple[float, float]],
        *,
        stroke: str,
        width: float = 1.5,
        dash: str | None = None,
    ) -> None:
        """An open line through points."""
        style = f"fill:none{_stroke(stroke, width, dash)};stroke-linejoin:round;stroke-linecap:round"
        self._parts.append(f'<polyline points="{_points(points)}" style="{style}"/>')

    def polygon(
        self,
        points: Iterable[tuple[float, float]],
        *,
        fill: str,
        stroke: str | None = None,
        opacity: float = 1.0,
    ) -> None:
        """A filled closed line through points."""
        style = f"fill:{_color(fill)};fill-opacity:{opacity:g}" + _stroke(stroke, 1.0, None)
        self._parts.append(f'<polygon points="{_points(points)}" style="{style}"/>')

    def circle(self, x: float, y: float, radius: float, *, fill: str, tip: str = "") -> None:
        """A filled disc."""
        inner = f"<title>{escape(tip)}</title>" if tip else ""
        place = f'cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}"'
        self._parts.append(f'<circle {place} style="fill:{_color(fill)}">{inner}</circle>')

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 12.0,
        anchor: Anchor = "start",
        fill: str = "--ink",
        bold: bool = False,
        rotate: float = 0.0,
    ) -> None:
        """One line of text with its baseline at y."""
        turn = f' transform="rotate({rotate:g} {x:.1f} {y:.1f})"' if rotate else ""
        style = f"fill:{_color(fill)};font-size:{size:g}px" + (";font-weight:650" if bold else "")
        style += ";font-variant-numeric:tabular-nums"
        place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
        self._parts.append(f'<text {place}{turn} style="{style}">{escape(words)}</text>')

    def diamond(self, x: float, y: float, radius: float, *, fill: str) -> None:
        """The mark of a predicted value."""
        around = [(x, y - radius), (x + radius, y), (x, y + radius), (x - radius, y)]
        self.polygon(around, fill=fill, stroke="--card")

    def svg(self, title: str, description: str = "", *, alone: bool = False) -> str:
        """The drawing as an `<svg>` element; `alone` adds what a file of its own needs."""
        head = f'viewBox="0 0 {self.width:g} {self.height:g}" role="img" class="figure"'
        words = f"<title>{escape(title)}</title>"
        if description:
            words += f"<desc>{escape(description)}</desc>"
        if alone:
            head = (
                f'xmlns="http://www.w3.org/2000/svg" width="{self.width:g}" height="{self.height:g}" {head}'
            )
            words += f'<style>{STYLE}</style><rect width="100%" height="100%" style="fill:var(--card)"/>'
        return f"<svg {head}>{words}{''.join(self._parts)}</svg>"


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
    """A number for an axis or a label: the decimals its neighbours need, else three significant digits."""
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


def wrap(words: str, characters: int) -> list[str]:
    """Break a label into lines of at most so many characters, never inside a word."""
    lines: list[str] = []
    for word in words.split():
        if lines and len(lines[-1]) + 1 + len(word) <= characters:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def _points(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _color(name: str) -> str:
    return f"var({name})" if name.startswith("--") else name


def _stroke(color: str | None, width: float, dash: str | None) -> str:
    if color is None:
        return ""
    return f";stroke:{_color(color)};stroke-width:{width:g}" + (f";stroke-dasharray:{dash}" if dash else "")
