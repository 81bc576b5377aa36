"""Figures of a plan: stacked bars of time and memory per layout, and time against devices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.report.figures import WIDTH
from penstock.report.svg import CURVE_COLORS, Canvas, number, ticks, wrap

_LEFT, _RIGHT, _TOP = 250.0, 60.0, 26.0
_ROW = 34.0
_CHARACTERS = 38


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One bar: its name and its parts, in order."""

    label: str
    parts: Mapping[str, float]


def stacked_bars(
    stacks: Sequence[Stack],
    *,
    title: str,
    unit: str,
    limit: float | None = None,
    words: Mapping[str, str] | None = None,
    alone: bool = False,
) -> str:
    """Horizontal bars of one scale, largest parts first, each part a colour; `limit` is drawn as a line across.

    Parts below half a per cent of the longest bar are summed up as "other". Raises ValueError without any bar.
    """
    if not stacks or not any(sum(stack.parts.values()) > 0 for stack in stacks):
        raise ValueError("A figure of stacked bars needs at least one bar with a length.")
    words = words or {}
    longest = max(sum(stack.parts.values()) for stack in stacks)
    names = _large(stacks, longest)
    top = max(longest, limit or 0.0) * 1.04
    legend = _legend_rows([words.get(name, name) for name in names])
    head = _TOP + 20.0 * len(legend)
    canvas = Canvas(WIDTH, head + _ROW * len(stacks) + 36)
    scale = (WIDTH - _LEFT - _RIGHT) / top
    bottom = head + _ROW * len(stacks)
    marks = [mark for mark in ticks(0, top, 6) if mark <= top]
    for mark in marks:
        x = _LEFT + mark * scale
        canvas.line(x, head - 4, x, bottom, stroke="--line")
        canvas.text(x, bottom + 18, number(mark, marks), size=11.5, anchor="middle", fill="--muted")
    canvas.text(2, 16, unit, size=12, fill="--muted")
    _legend(canvas, legend, names, words)
    for row, stack in enumerate(stacks):
        _bar(canvas, stack, names, words, head + row * _ROW, scale, unit)
    if limit is not None:
        x = _LEFT + limit * scale
        canvas.line(x, head - 8, x, bottom, stroke="--bad", width=1.6, dash="5 4")
        canvas.text(x, head - 12, f"limit {number(limit)}", size=11.5, anchor="middle", fill="--bad")
    said = "; ".join(f"{stack.label}: {sum(stack.parts.values()):.4g} {unit}" for stack in stacks)
    return canvas.svg(title, said, alone=alone)


def _large(stacks: Sequence[Stack], longest: float) -> list[str]:
    """Parts worth a colour of their own, the largest first, at most as many as there are colours less one."""
    size: dict[str, float] = {}
    for stack in stacks:
        for name, value in stack.parts.items():
            size[name] = max(size.get(name, 0.0), value)
    kept = [
        name for name, value in sorted(size.items(), key=lambda item: -item[1]) if value > 0.005 * longest
    ]
    return kept[: len(CURVE_COLORS) - 1]


def _bar(
    canvas: Canvas,
    stack: Stack,
    names: Sequence[str],
    words: Mapping[str, str],
    y: float,
    scale: float,
    unit: str,
) -> None:
    for line, text in enumerate(wrap(stack.label, _CHARACTERS)[:2]):
        canvas.text(_LEFT - 10, y + 14 + 13 * line, text, size=11, anchor="end")
    x = _LEFT
    other = sum(value for name, value in stack.parts.items() if name not in names)
    drawn = [
        (words.get(name, name), stack.parts.get(name, 0.0), CURVE_COLORS[i]) for i, name in enumerate(names)
    ]
    small = ", ".join(
        f"{words.get(name, name)} {value:.3g}"
        for name, value in sorted(stack.parts.items(), key=lambda item: -item[1])
        if name not in names and value > 0
    )
    for name, value, color in [*drawn, (f"other ({small})", other, "--idle")]:
        if value > 0:
            canvas.rect(x, y + 4, value * scale, _ROW - 12, fill=color, tip=f"{name}: {value:.4g} {unit}")
            x += value * scale
    # In a column of their own, right of the limit: beside short bars the line would cross them.
    canvas.text(WIDTH - _RIGHT + 10, y + 19, number(sum(stack.parts.values())), size=12, bold=True)


def _legend_rows(names: Sequence[str]) -> list[list[str]]:
    rows: list[list[str]] = [[]]
    used = 0.0
    for name in [*names, "other"]:
        size = 6.6 * len(name) + 34
        if rows[-1] and used + size > WIDTH - 80:
            rows.append([])
            used = 0.0
        rows[-1].append(name)
        used += size
    return rows


def _legend(
    canvas: Canvas, rows: Sequence[Sequence[str]], names: Sequence[str], words: Mapping[str, str]
) -> None:
    colors = {words.get(name, name): CURVE_COLORS[i] for i, name in enumerate(names)} | {"other": "--idle"}
    for line, row in enumerate(rows):
        x = 80.0
        for name in row:
            canvas.rect(x, 7 + 20 * line, 12, 12, fill=colors[name], radius=2)
            canvas.text(x + 17, 17 + 20 * line, name, size=12, fill="--muted")
            x += 6.6 * len(name) + 34


def pareto(
    points: Sequence[tuple[float, float, str]], *, title: str, y_label: str, alone: bool = False
) -> str:
    """Time against devices, both on logarithmic axes: (devices, time, words) each; the dashed line is perfect scaling.

    Raises ValueError without any point.
    """
    if not points:
        raise ValueError("A front needs at least one point.")
    points = sorted(points)
    height, left, right, top, bottom = 340.0, 70.0, 30.0, 34.0, 44.0
    canvas = Canvas(WIDTH, height)
    xs, ys = [math.log2(p[0]) for p in points], [math.log10(p[1]) for p in points]
    ideal = [ys[0] - (x - xs[0]) * math.log10(2) for x in xs]
    x_low, x_high = min(xs) - 0.3, max(xs) + 0.3
    y_low, y_high = min([*ys, *ideal]) - 0.08, max(ys) + 0.08

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            left + (x - x_low) / (x_high - x_low) * (WIDTH - left - right),
            height - bottom - (y - y_low) / (y_high - y_low) * (height - top - bottom),
        )

    canvas.text(2, 16, y_label, size=12, fill="--muted")
    canvas.polyline([place(x, y) for x, y in zip(xs, ideal)], stroke="--edge", dash="4 4")
    canvas.polyline([place(x, y) for x, y in zip(xs, ys)], stroke="--accent", width=2)
    for (devices, seconds, tip), x, y in zip(points, xs, ys):
        px, py = place(x, y)
        canvas.circle(px, py, 5, fill="--accent", tip=tip)
        canvas.text(px, py - 11, number(seconds), size=12, anchor="middle", bold=True)
        canvas.text(px, height - 22, f"{devices:,.0f}", size=11.5, anchor="middle", fill="--muted")
    canvas.text(WIDTH - right, height - 6, "devices", size=12, anchor="end", fill="--muted")
    said = "; ".join(f"{devices:,.0f} devices: {seconds:.4g}" for devices, seconds, _ in points)
    return canvas.svg(title, said, alone=alone)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line of a figure: its name and its points, (x, y) each above 0."""

    label: str
    points: Sequence[tuple[float, float]]


def curves(lines: Sequence[Curve], *, title: str, x_label: str, y_label: str, alone: bool = False) -> str:
    """Curves on logarithmic axes, a colour each, their ends named. Raises ValueError without any point."""
    xs = [math.log10(x) for line in lines for x, _ in line.points]
    ys = [math.log10(y) for line in lines for _, y in line.points]
    if not xs:
        raise ValueError("A figure of curves needs at least one point.")
    height, left, right, top, bottom = 340.0, 84.0, 30.0, 60.0, 48.0
    canvas = Canvas(WIDTH, height)
    x_low, x_high = min(xs) - 0.06, max(xs) + 0.06
    y_low, y_high = min(ys) - 0.06, max(ys) + 0.06

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            left + (math.log10(x) - x_low) / (x_high - x_low) * (WIDTH - left - right),
            height - bottom - (math.log10(y) - y_low) / (y_high - y_low) * (height - top - bottom),
        )

    for mark in _marks(10**x_low, 10**x_high):
        x, _ = place(mark, 10**y_low)
        canvas.line(x, top, x, height - bottom, stroke="--line")
        canvas.text(x, height - bottom + 18, f"{mark:g}", size=11.5, anchor="middle", fill="--muted")
    for mark in _marks(10**y_low, 10**y_high):
        _, y = place(10**x_low, mark)
        canvas.line(left, y, WIDTH - right, y, stroke="--line")
        canvas.text(left - 8, y + 4, f"{mark:.2g}", size=11.5, anchor="end", fill="--muted")
    canvas.text(2, 16, y_label, size=12, fill="--muted")
    canvas.text(WIDTH - right, height - 8, x_label, size=12, anchor="end", fill="--muted")
    x = left
    for i, line in enumerate(lines):
        color = CURVE_COLORS[i % len(CURVE_COLORS)]
        canvas.polyline([place(*point) for point in line.points], stroke=color, width=2)
        for px, py in line.points:
            canvas.circle(*place(px, py), 3.5, fill=color, tip=f"{line.label}: {px:.4g}, {py:.4g}")
        canvas.rect(x, 30, 12, 12, fill=color, radius=2)
        canvas.text(x + 17, 40, line.label, size=12, fill="--muted")
        x += 6.6 * len(line.label) + 40
    said = "; ".join(f"{line.label}: {len(line.points)} points" for line in lines)
    return canvas.svg(title, said, alone=alone)


def _marks(low: float, high: float) -> list[float]:
    """Round numbers between two ends of a logarithmic axis: 1, 2 and 5 of each decade, or decades alone where many."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1.0, 2.0, 5.0) if last - first <= 3 else (1.0,)
    every = [step * 10.0**power for power in range(first, last + 1) for step in steps]
    return [mark for mark in every if low <= mark <= high]
