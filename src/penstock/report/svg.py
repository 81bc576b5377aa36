"""The few drawing commands our figures need, written straight as SVG.

Lengths are in SVG user units, which a page shows as CSS pixels at full width; y grows downwards. Colours are
the CSS variables of `STYLE`, so one figure reads on a light and a dark page, inlined in HTML or by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Literal, TypedDict, Unpack

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


class Look(TypedDict, total=False):
    """How a shape is drawn. A colour is a variable of `STYLE` or any CSS colour; a shape without one is not filled."""

    fill: str
    opacity: float
    stroke: str | None
    stroke_width: float
    dash: str | None


class Canvas:
    """A drawing under construction. Methods append; `svg` gives the text. The height may be set last."""

    def __init__(self, width: float, height: float = 0.0) -> None:
        self.width = width
        self.height = height
        self._parts: list[str] = []

    def _add(self, tag: str, place: str, look: Look, tip: str) -> None:
        style = f"fill:{_color(look.get('fill', 'none'))}"
        if "opacity" in look:
            style += f";fill-opacity:{look['opacity']:g}"
        if stroke := look.get("stroke"):
            style += f";stroke:{_color(stroke)};stroke-width:{look.get('stroke_width', 1.0):g}"
        if dash := look.get("dash"):
            style += f";stroke-dasharray:{dash}"
        inner = f"<title>{escape(tip)}</title>" if tip else ""
        self._parts.append(f'<{tag} {place} style="{style}">{inner}</{tag}>')

    def rect(
        self, x: float, y: float, width: float, height: float, *, radius: float = 0.0, tip: str = "",
        **look: Unpack[Look],
    ) -> None:  # fmt: skip
        """A rectangle. `tip` is shown to a pointer that rests on it."""
        size = f'width="{max(width, 0):.1f}" height="{max(height, 0):.1f}" rx="{radius:g}"'
        self._add("rect", f'x="{x:.1f}" y="{y:.1f}" {size}', look, tip)

    def line(self, x1: float, y1: float, x2: float, y2: float, **look: Unpack[Look]) -> None:
        """A straight line."""
        self._add("line", f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"', look, "")

    def path(
        self, points: Iterable[tuple[float, float]], *, closed: bool = False, **look: Unpack[Look]
    ) -> None:
        """A line through points; `closed` makes it a polygon."""
        listed = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._add("polygon" if closed else "polyline", f'points="{listed}"', look, "")

    def circle(self, x: float, y: float, radius: float, *, tip: str = "", **look: Unpack[Look]) -> None:
        """A disc."""
        self._add("circle", f'cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}"', look, tip)

    def diamond(self, x: float, y: float, radius: float, *, fill: str) -> None:
        """The mark of a predicted value."""
        around = [(x, y - radius), (x + radius, y), (x, y + radius), (x - radius, y)]
        self.path(around, closed=True, fill=fill, stroke="--card")

    def text(
        self, x: float, y: float, words: str, *, size: float = 12.0, fill: str = "--ink", bold: bool = False,
        anchor: Literal["start", "middle", "end"] = "start", rotate: float = 0.0,
    ) -> None:  # fmt: skip
        """One line of text with its baseline at y."""
        turn = f' transform="rotate({rotate:g} {x:.1f} {y:.1f})"' if rotate else ""
        style = f"fill:{_color(fill)};font-size:{size:g}px" + (";font-weight:650" if bold else "")
        place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turn}'
        self._parts.append(f'<text {place} style="{style}">{escape(words)}</text>')

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
