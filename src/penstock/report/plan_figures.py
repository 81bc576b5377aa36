"""Figures of a plan: stacked bars of time and memory, time against devices, and curves of scaling laws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.report.chart import WIDTH, Entry, Plot, Scale, legend, number, text_width, wrap
from penstock.report.svg import CURVE_COLORS, Canvas

_LEFT, _RIGHT, _ROW = 250.0, 60.0, 34.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One bar: its name and its parts, in order."""

    label: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        """Its length."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a figure: its name and its points, (x, y) each above 0."""

    label: str
    points: Sequence[tuple[float, float]]


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
    words = words or {}
    colors = dict(zip(_large(stacks, longest), CURVE_COLORS))
    canvas, x = Canvas(WIDTH), text_width(unit) + 40
    entries = [Entry(words.get(name, name), color) for name, color in colors.items()]
    head = legend(canvas, [*entries, Entry("other", "--idle")], x, 16, WIDTH - x) + 6
    bottom = head + _ROW * len(stacks)
    scale = Scale(0, max(longest, limit or 0.0) * 1.04, _LEFT, WIDTH - _RIGHT)
    marks = scale.marks(6)
    plot = Plot(canvas, scale, Scale(0, len(stacks), bottom, head - 4))
    plot.x_axis("", marks, lambda mark: number(mark, marks), grid=True)
    canvas.text(2, 16, unit, fill="--muted")
    for row, stack in enumerate(stacks):
        _stack(canvas, stack, colors, words, head + row * _ROW, scale, unit)
    if limit is not None:
        canvas.line(
            scale(limit), head - 8, scale(limit), bottom, stroke="--bad", stroke_width=1.6, dash="5 4"
        )
        canvas.text(
            scale(limit), head - 12, f"limit {number(limit)}", size=11.5, anchor="middle", fill="--bad"
        )
    canvas.height = bottom + 30
    said = "; ".join(f"{stack.label}: {stack.total:.4g} {unit}" for stack in stacks)
    return canvas.svg(title, said)


def _large(stacks: Sequence[Stack], longest: float) -> list[str]:
    """Parts worth a colour of their own, the largest first, at most as many as there are colours less one."""
    size: dict[str, float] = {}
    for stack in stacks:
        for name, value in stack.parts.items():
            size[name] = max(size.get(name, 0.0), value)
    kept = [name for name in sorted(size, key=lambda name: -size[name]) if size[name] > 0.005 * longest]
    return kept[: len(CURVE_COLORS) - 1]


def _stack(
    canvas: Canvas,
    stack: Stack,
    colors: Mapping[str, str],
    words: Mapping[str, str],
    y: float,
    scale: Scale,
    unit: str,
) -> None:
    for line, text in enumerate(wrap(stack.label, _LEFT - 14, 11, most=2)):
        canvas.text(_LEFT - 10, y + 14 + 13 * line, text, size=11, anchor="end")
    small = {name: value for name, value in stack.parts.items() if name not in colors and value > 0}
    listed = ", ".join(f"{words.get(k, k)} {small[k]:.3g}" for k in sorted(small, key=lambda k: -small[k]))
    drawn = [(words.get(name, name), stack.parts.get(name, 0.0), color) for name, color in colors.items()]
    done = 0.0
    for name, value, color in [*drawn, (f"other ({listed})", sum(small.values()), "--idle")]:
        if value > 0:
            at, end = scale(done), scale(done + value)
            canvas.rect(at, y + 4, end - at, _ROW - 12, fill=color, tip=f"{name}: {value:.4g} {unit}")
            done += value
    # In a column of their own, right of the limit: beside short bars the line would cross them.
    canvas.text(WIDTH - _RIGHT + 10, y + 19, number(stack.total), bold=True)


def devices_figure(points: Sequence[tuple[float, float, str]], *, title: str, y_label: str) -> str:
    """Time against devices on logarithmic axes: (devices, time, words) each; the dashed line is perfect scaling.

    Raises ValueError without any point.
    """
    if not points:
        raise ValueError("A figure of devices needs at least one point.")
    points = sorted(points)
    fewest, slowest = points[0][:2]
    measured = [(devices, seconds) for devices, seconds, _ in points]
    ideal = [(devices, slowest * fewest / devices) for devices, _ in measured]
    plot = _log_plot([*measured, *ideal], top=34.0, margin=1.2)
    canvas = plot.canvas
    plot.x_axis("devices", [devices for devices, _ in measured], lambda devices: f"{devices:,.0f}")
    canvas.text(2, 16, y_label, fill="--muted")
    canvas.path(plot.points(ideal), stroke="--edge", dash="4 4")
    canvas.path(plot.points(measured), stroke="--accent", stroke_width=2)
    for (x, y), (_, seconds, tip) in zip(plot.points(measured), points):
        canvas.circle(x, y, 5, fill="--accent", tip=tip)
        canvas.text(x, y - 11, number(seconds), anchor="middle", bold=True)
    said = "; ".join(f"{devices:,.0f} devices: {seconds:.4g}" for devices, seconds in measured)
    return canvas.svg(title, said)


def curves(lines: Sequence[Line], *, title: str, x_label: str, y_label: str) -> str:
    """Lines on logarithmic axes, a colour each. Raises ValueError without any point."""
    every = [point for line in lines for point in line.points]
    if not every:
        raise ValueError("A figure of curves needs at least one point.")
    plot = _log_plot(every, top=52.0, margin=1.15)
    canvas = plot.canvas
    plot.x_axis(x_label, plot.x.marks(), lambda mark: f"{mark:g}", grid=True)
    plot.y_axis(y_label, plot.y.marks(), lambda mark: f"{mark:.2g}")
    colors = [CURVE_COLORS[i % len(CURVE_COLORS)] for i in range(len(lines))]
    for line, color in zip(lines, colors):
        canvas.path(plot.points(line.points), stroke=color, stroke_width=2)
        for (px, py), (x, y) in zip(line.points, plot.points(line.points)):
            canvas.circle(x, y, 3.5, fill=color, tip=f"{line.label}: {px:.4g}, {py:.4g}")
    entries = [Entry(line.label, color) for line, color in zip(lines, colors)]
    legend(canvas, entries, plot.x.start, 38, plot.x.stop - plot.x.start)
    said = "; ".join(f"{line.label}: {len(line.points)} points" for line in lines)
    return canvas.svg(title, said)


def _log_plot(points: Sequence[tuple[float, float]], *, top: float, margin: float) -> Plot:
    """Logarithmic axes that leave a factor of `margin` around all points."""
    height, left, right, bottom = 340.0, 84.0, 30.0, 48.0
    xs, ys = zip(*points)
    return Plot(
        Canvas(WIDTH, height),
        Scale(min(xs) / margin, max(xs) * margin, left, WIDTH - right, log=True),
        Scale(min(ys) / margin, max(ys) * margin, height - bottom, top, log=True),
    )
