"""A chart, written directly as SVG: shapes, scales, axes, a legend, and text that fits its place.

Lengths are in SVG user units, which a page shows as about one CSS pixel each; y grows downwards. A figure is drawn
separately for each width at which it is shown, so that its text never shrinks. Colours are the CSS variables of
`style`, so one figure works on a light and a dark page, inlined in HTML or by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import Literal, TypedDict, Unpack

WIDE, NARROW = 800.0, 340.0
"""Widths at which pages draw every figure: for a screen, and for a phone."""
SMALL = 11.5
"""Font size of the numbers along an axis."""
# Light and dark. One hue for gains, one for predictions, one for trouble; everything else is ink in shades. Each pair
# of ink on paper has a contrast of at least 4.5 : 1. The colours of curves have at least 3 : 1, and were chosen by a
# search so that any two of them also differ for eyes without red or green cones.
_COLORS = {
    "paper": "#fbfbf9 #12161c", "card": "#ffffff #1a2029", "ink": "#1c2430 #e8ecf1", "muted": "#5b6675 #a2adbb",
    "line": "#e2e5e9 #2c3541", "accent": "#0f766e #2dd4bf", "soft": "#b5dcd7 #1d5a55", "base": "#2b3340 #64748b",
    "idle": "#dfe3e8 #2f3946", "edge": "#9aa5b3 #66738a", "mark": "#c2410c #fb923c", "bad": "#b4233c #fb7185",
    "c0": "#0f766e #2dd4bf", "c1": "#3e55c8 #37a8ec", "c2": "#6c2d0a #cda629", "c3": "#a09600 #cf4232",
    "c4": "#1b2093 #526ee3", "c5": "#659da7 #fef145", "c6": "#481645 #bdf8f8", "c7": "#6887ff #528295",
}  # fmt: skip
FIGURE_STYLE = """
svg.figure{font-family:ui-sans-serif,system-ui,"Segoe UI","Helvetica Neue",Arial,sans-serif;display:block;
width:100%;height:auto;font-variant-numeric:tabular-nums;stroke-linejoin:round}
svg.figure .halo{paint-order:stroke;stroke:var(--card);stroke-width:3.5px}
""".strip()


def style(root: str) -> str:
    """The colours as variables of the elements that the selector `root` names: light, or dark if the reader's system is
    dark or a surrounding element says so (a page's own switch, Jupyter, VS Code).
    """
    light, dark = (
        f"color-scheme:{name};" + ";".join(f"--{key}:{both.split()[which]}" for key, both in _COLORS.items())
        for which, name in enumerate(("light", "dark"))
    )
    around = "[data-theme={0}],[data-jp-theme-light={1}],.vscode-{0}"
    return (
        f"{root}{{{light}}}\n@media (prefers-color-scheme:dark){{{root}{{{dark}}}}}\n"
        f":is({around.format('light', 'true')}) {root}{{{light}}}\n"
        f":is({around.format('dark', 'false')}) {root}{{{dark}}}\n{FIGURE_STYLE}"
    )


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
        """Round numbers, about `about` of them; on a logarithmic scale 1, 2 and 5 of each decade, more on a short one,
        and only the decades on a long one."""
        if not self.log:
            near = 1e-9 * (self.high - self.low)
            return [m for m in ticks(self.low, self.high, about) if self.low - near <= m <= self.high + near]
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        steps: tuple[float, ...] = (1.0, 2.0, 5.0) if last - first <= 3 else (1.0,)
        if self.high < 20 * self.low:
            steps = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
        every = [step * 10.0**power for power in range(first, last + 1) for step in steps]
        return [mark for mark in every if self.low <= mark <= self.high]


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of a legend: its meaning, colour and mark."""

    words: str
    color: str
    mark: Literal["box", "dot", "diamond", "line", "dashes"] = "box"
    bold: bool = False


@dataclass(frozen=True, slots=True)
class Label:
    """A line of text with its corners, the upper left one first."""

    words: str
    x1: float
    y1: float
    x2: float
    y2: float

    def overlaps(self, other: Label) -> bool:
        """Whether the two share more than an edge."""
        least = 0.5
        return (
            min(self.x2, other.x2) - max(self.x1, other.x1) > least
            and min(self.y2, other.y2) - max(self.y1, other.y1) > least
        )


class Look(TypedDict, total=False):
    """Style of a shape. A colour is a variable of `style` or any CSS colour; a shape without one is not filled."""

    fill: str
    opacity: float
    stroke: str | None
    stroke_width: float
    dash: str | None


class Chart:
    """A drawing with one rectangular plot for points: there `x` runs from left to right, `y` from the bottom up.

    Shapes are placed in units of the drawing, which the two scales return. `svg` returns the text; scales and height
    may be set after the legend, because they depend on its rows.
    """

    x: Scale
    y: Scale

    def __init__(self, width: float = WIDE, height: float = 0.0) -> None:
        self.width, self.height = width, height
        self.labels: list[Label] = []
        """Rectangles of all text so far."""
        self._parts: list[str] = []
        self._on_top: list[str] = []
        self._series = ""

    @property
    def narrow(self) -> bool:
        """Whether labels have no room next to the plot."""
        return self.width < (NARROW + WIDE) / 2

    @contextmanager
    def series(self, name: str) -> Iterator[None]:
        """Mark the shapes drawn inside as a series, which the legend's entry of this name shows and hides."""
        self._series = f' data-series="{escape(name)}"'
        self._parts.append(f"<g{self._series}>")
        yield
        self._parts.append("</g>")
        self._series = ""

    def _add(self, tag: str, place: str, look: Look, tip: str = "") -> None:
        drawn = f"fill:{_color(look.get('fill', 'none'))}"
        if "opacity" in look:
            drawn += f";fill-opacity:{look['opacity']:g}"
        if stroke := look.get("stroke"):
            drawn += f";stroke:{_color(stroke)};stroke-width:{look.get('stroke_width', 1.0):g}"
        if dash := look.get("dash"):
            drawn += f";stroke-dasharray:{dash}"
        inner = f"<title>{escape(tip)}</title>" if tip else ""
        self._parts.append(f'<{tag} {place} style="{drawn}">{inner}</{tag}>')

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
        self, points: Iterable[tuple[float, float]], *, closed: bool = False, tips: Sequence[str] = (), tip: str = "",
        **look: Unpack[Look],
    ) -> None:  # fmt: skip
        """A line through points; `closed` makes it a polygon. `tips` are shown to a pointer near each point."""
        listed = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        shown_tips = f' data-tips="{escape("|".join(tips))}"' if tips else ""
        self._add("polygon" if closed else "polyline", f'points="{listed}"{shown_tips}', look, tip)

    def circle(self, x: float, y: float, radius: float, *, tip: str = "", **look: Unpack[Look]) -> None:
        """A disc."""
        self._add("circle", f'cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}"', look, tip)

    def text(
        self, x: float, y: float, words: str, *, size: float = 12.0, fill: str = "--ink", bold: bool = False,
        anchor: Literal["start", "middle", "end"] = "start", halo: bool = False, optional: bool = False,
        inside: bool = False,
    ) -> bool:  # fmt: skip
        """Draw one line of text with its baseline at y; returns whether it was drawn.

        A `halo` puts it above all shapes and separates it from lines. An `optional` text is left out if it would
        overlap other text, and one `inside` the drawing is moved sideways until it fits.
        """
        wide = text_width(words, size, bold=bold)
        left = x - wide * {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor]
        moved = min(max(left, 0.0), max(self.width - wide, 0.0)) - left if inside else 0.0
        label = Label(words, left + moved, y - 0.78 * size, left + moved + wide, y + 0.22 * size)
        if optional and any(label.overlaps(drawn_label) for drawn_label in self.labels):
            return False
        self.labels.append(label)
        look = f"fill:{_color(fill)};font-size:{size:g}px" + (";font-weight:650" if bold else "")
        place = f'x="{x + moved:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
        place += f' class="halo"{self._series}' if halo else ""
        (self._on_top if halo else self._parts).append(f'<text {place} style="{look}">{escape(words)}</text>')
        return True

    def x_axis(
        self, label: str, marks: Sequence[float], write: Callable[[float], str] | None = None, *,
        grid: bool = False,
    ) -> float:  # fmt: skip
        """Draw numbers below the plot, each with a tick or, with `grid`, a line across the plot; the label is below
        them.

        Returns the y of its lower end. Numbers without room are left out.
        """
        bottom = self.y.start
        for mark in marks:
            at, words = self.x(mark), number(mark, marks) if write is None else write(mark)
            self.line(
                at, self.y.stop if grid else bottom + 5, at, bottom, stroke="--line" if grid else "--edge"
            )
            self.text(
                at, bottom + 18, words, size=SMALL, anchor="middle", fill="--muted", optional=True,
                inside=True,
            )  # fmt: skip
        lines = wrap(label, self.width - 8) if label else []
        for row, words in enumerate(lines):
            middle = (self.x.start + self.x.stop) / 2
            self.text(middle, bottom + 38 + 15 * row, words, anchor="middle", fill="--muted", inside=True)
        return bottom + 24 + (5 + 15 * len(lines) if lines else 0)

    def y_axis(self, marks: Sequence[float], write: Callable[[float], str] | None = None) -> None:
        """Draw a line across the plot for each number, with the number to the left."""
        for mark in marks:
            at, words = self.y(mark), number(mark, marks) if write is None else write(mark)
            self.line(self.x.start, at, self.x.stop, at, stroke="--line")
            self.text(self.x.start - 8, at + 4, words, size=SMALL, anchor="end", fill="--muted")

    def points(self, values: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
        """Positions of points (x, y) in the drawing."""
        return [(self.x(x), self.y(y)) for x, y in values]

    def head(self, label: str, entries: Sequence[Entry], title: str = "") -> float:
        """Draw a title, the label of the vertical axis, and the legend; returns where the plot may begin."""
        y = 16.0
        for line in wrap(title, self.width - 4, 15, bold=True) if title else ():
            self.text(2, y + 2, line, size=15, bold=True)
            y += 21
        if label:
            self.text(2, y, label, fill="--muted")
        left = text_width(label) + 26 if label else 0.0
        if left > self.width / 3:
            left, y = 0.0, y + 19
        return self.legend(entries, left, y, self.width - left) - 4

    def legend(self, entries: Sequence[Entry], x: float, y: float, width: float) -> float:
        """Draw entries from (x, y) on in rows of at most `width`, each entry in at most three lines.

        y is the baseline of the first row; returns the baseline for the row after the last.
        """
        space, row, at = 20.0, 19.0, x
        for entry in entries:
            lines = wrap(entry.words, width - space, bold=entry.bold, most=3)
            needed = space + max(text_width(line, bold=entry.bold) for line in lines)
            if at > x and at + needed > x + width:
                at, y = x, y + row
            self._parts.append(f'<g class="key" data-key="{escape(entry.words)}">')
            self.text(at + 2, y, _MARKS[entry.mark], size=13, fill=entry.color, bold=entry.bold)
            for extra, line in enumerate(lines):
                y += 15.0 if extra else 0.0
                self.text(at + space, y, line, bold=entry.bold, fill="--ink" if entry.bold else "--muted")
            self._parts.append("</g>")
            at += needed + 18
        return y + (row if entries else 0.0)

    def svg(self, title: str, description: str = "", *, alone: bool = False) -> str:
        """The drawing as an `<svg>` element; with `alone` it includes the styles that a separate file needs."""
        margin = 14 if alone else 0
        size = f"{self.width + 2 * margin:g} {self.height + 2 * margin:g}"
        head = f'viewBox="{-margin} {-margin} {size}" role="img" class="figure"'
        words = f"<title>{escape(title)}</title>"
        if description:
            words += f"<desc>{escape(description)}</desc>"
        if alone:
            wide, high = size.split()
            head = f'xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" {head}'
            paper = (
                f'<rect x="{-margin}" y="{-margin}" width="{wide}" height="{high}" style="fill:var(--card)"/>'
            )
            words += f"<style>{style('svg')}</style>{paper}"
        return f"<svg {head}>{words}{''.join([*self._parts, *self._on_top])}</svg>"


def _color(name: str) -> str:
    return f"var({name})" if name.startswith("--") else name


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers that span [low, high], in equal round steps, about as many as requested."""
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
        if abs(step * 10**decimals - round(step * 10**decimals)) > 1e-6:  # for steps such as 2.5
            decimals += 1
        return f"{value:.{decimals}f}"
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(decimals, 6)}f}"


def signed(value: float, decimals: int) -> str:
    """A difference with its sign; one that rounds to zero has none."""
    rounded = round(value, decimals)
    return f"{rounded:+.{decimals}f}" if rounded else f"{0:.{decimals}f}"


def text_width(words: str, size: float = 12.0, *, bold: bool = False) -> float:
    """Approximate width of a line of text, in the wider of the fonts that a page may use."""
    ems = sum(0.36 if c in _NARROW else 0.92 if c in _WIDE else 0.71 if c.isupper() else 0.62 for c in words)
    return ems * size * (1.16 if bold else 1.0)


def wrap(
    words: str, width: float, size: float = 12.0, *, bold: bool = False, most: int | None = None
) -> list[str]:
    """A label broken between words into lines of at most `width`; beyond `most` lines it ends in an ellipsis."""
    lines: list[str] = []
    for word in words.split():
        if lines and text_width(f"{lines[-1]} {word}", size, bold=bold) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    if most is not None and len(lines) > most:
        lines[most - 1 :] = [f"{lines[most - 1]} …"]
    return lines or [""]
