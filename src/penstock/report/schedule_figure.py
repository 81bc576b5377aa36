"""A pipeline schedule drawn as ranks by time, the figure of every paper on the subject.

Forward, backward and weight gradient have a colour each, a cell carries its micro-batch's number where it is wide
enough, and a rank's second and later model chunks are tints of the same colours. What stays empty is the bubble.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import ConfigError
from penstock.report.figures import WIDTH
from penstock.report.svg import Canvas, number, ticks
from penstock.schedules import Kind, Simulation, Span

MOST_CELLS = 20_000
_LEFT, _RIGHT, _TOP, _AXIS = 66.0, 70.0, 44.0, 42.0
_SMALLEST = 7.5  # a number smaller than this is left out; resting on the cell still tells it

# The whole backward and its first half share a colour: they are the same work seen by the stage before.
_HUES: dict[Kind, str] = {"F": "--c1", "B": "--c0", "I": "--c0", "W": "--c3"}
_WORDS: dict[Kind, str] = {
    "F": "F  forward",
    "B": "B  backward",
    "I": "I  backward, input gradient",
    "W": "W  weight gradient",
}
_TINTS = (
    42,
    24,
)  # per cent of the hue in the second and the last chunk; ink on them has contrast 4.5 : 1 and more


def schedule_figure(
    simulation: Simulation,
    *,
    title: str,
    unit: str = "",
    memory_unit: str = "",
    window: tuple[float, float] | None = None,
    alone: bool = False,
) -> str:
    """One `<svg>` element; `alone` makes it a file of its own. `unit` and `memory_unit` name those of the costs.

    `window` is the part of the time to show, all of it by default. Raises `ConfigError` for an empty window and for
    more than 20,000 actions in it, which no page shows.
    """
    low, high = window if window else (0.0, float(simulation.makespan))
    if not low < high:
        raise ConfigError(f"The figure's window must rise, but it is from {low:g} to {high:g}.")
    shown = [span for span in simulation.timeline() if float(span.end) > low and float(span.start) < high]
    if len(shown) > MOST_CELLS:
        raise ConfigError(
            f"The figure would have {len(shown):,} actions, more than {MOST_CELLS:,}; give it a window of the time, "
            "or draw a schedule of fewer micro-batches, which has the same shape."
        )
    ranks = len(simulation.schedule.ranks)
    row = min(30.0, max(12.0, 640.0 / ranks))
    canvas = Canvas(WIDTH, _TOP + ranks * row + _AXIS)
    scale = (WIDTH - _LEFT - _RIGHT) / (high - low)
    _frame(canvas, simulation, row, memory_unit)
    tints = _tints(simulation)
    for span in shown:
        _cell(canvas, span, row, low, high, scale, tints[span.action.stage])
    _time_axis(canvas, _TOP + ranks * row, low, high, scale, unit)
    _heading(canvas, simulation)
    return canvas.svg(title, _said(simulation, unit), alone=alone)


def _tints(simulation: Simulation) -> list[int]:
    """Per stage, the per cent of its colour: 100 for a rank's first chunk, less for each one after it."""
    seen = [0] * len(simulation.schedule.ranks)
    chunk = []
    for rank in simulation.schedule.placement:
        chunk.append(seen[rank])
        seen[rank] += 1
    first, last = _TINTS
    steps = max(max(seen) - 2, 1)
    return [100 if c == 0 else round(first - (first - last) * (c - 1) / steps) for c in chunk]


def _cell(canvas: Canvas, span: Span, row: float, low: float, high: float, scale: float, tint: int) -> None:
    x1 = _LEFT + (max(float(span.start), low) - low) * scale
    x2 = _LEFT + (min(float(span.end), high) - low) * scale
    y = _TOP + span.rank * row
    hue = _HUES[span.action.kind]
    solid = tint == 100
    canvas.rect(
        x1,
        y + 2,
        x2 - x1,
        row - 4,
        fill=hue if solid else f"color-mix(in srgb, var({hue}) {tint}%, var(--card))",
        stroke="--card" if solid else hue,
        radius=min(2.0, (x2 - x1) / 4),
        tip=f"{span.action}: {number(float(span.start))} to {number(float(span.end))}",
    )
    words = str(span.action.micro_batch)
    size = min(12.0, row - 5, (x2 - x1 - 2) / (0.62 * len(words)))
    if size >= _SMALLEST:
        middle, fill = y + row / 2 + 0.36 * size, "--card" if solid else "--ink"
        canvas.text((x1 + x2) / 2, middle, words, size=size, anchor="middle", fill=fill)


def _frame(canvas: Canvas, simulation: Simulation, row: float, memory_unit: str) -> None:
    """Each rank's name, its empty time line, and the most it holds."""
    size = min(12.0, row - 2)
    canvas.text(WIDTH - _RIGHT + 8, _TOP - 8, f"holds {memory_unit}".rstrip(), size=11, fill="--muted")
    for rank, peak in enumerate(simulation.peak_memory):
        y = _TOP + rank * row
        canvas.rect(_LEFT, y + 2, WIDTH - _LEFT - _RIGHT, row - 4, fill="--paper", stroke="--line", radius=2)
        canvas.text(
            _LEFT - 8, y + row / 2 + 0.36 * size, f"rank {rank}", size=size, anchor="end", fill="--muted"
        )
        canvas.text(WIDTH - _RIGHT + 8, y + row / 2 + 0.36 * size, _plain(float(peak)), size=size)


def _time_axis(canvas: Canvas, y: float, low: float, high: float, scale: float, unit: str) -> None:
    marks = [mark for mark in ticks(low, high, 10) if low <= mark <= high]
    for mark in marks:
        x = _LEFT + (mark - low) * scale
        canvas.line(x, y + 2, x, y + 7, stroke="--edge")
        canvas.text(x, y + 20, number(mark, marks), size=11, anchor="middle", fill="--muted")
    words = f"time [{unit}]" if unit else "time"
    canvas.text((_LEFT + WIDTH - _RIGHT) / 2, y + 36, words, size=11, anchor="middle", fill="--muted")


def _heading(canvas: Canvas, simulation: Simulation) -> None:
    """What the colours mean, and how much is bubble."""
    x = _LEFT
    for kind in _used(simulation):
        canvas.rect(x, 8, 14, 14, fill=_HUES[kind], radius=2)
        canvas.text(x + 20, 19.5, _WORDS[kind])
        x += 20 + 6.6 * len(_WORDS[kind]) + 18
    if len(simulation.schedule.placement) > len(simulation.schedule.ranks):
        canvas.text(x, 19.5, "fainter: later chunks", fill="--muted")
    share = f"bubble {100 * float(simulation.bubble_fraction):.1f} % of the ranks' time"
    canvas.text(WIDTH - _RIGHT, 19.5, share, anchor="end", bold=True)


def _used(simulation: Simulation) -> Sequence[Kind]:
    found = {action.kind for order in simulation.schedule.ranks for action in order}
    return [kind for kind in _WORDS if kind in found]


def _said(simulation: Simulation, unit: str) -> str:
    """The figure in words, for who cannot see it."""
    schedule = simulation.schedule
    return (
        f"{schedule.micro_batches} micro-batches through {schedule.stages} stages on {len(schedule.ranks)} ranks: "
        f"{number(float(simulation.makespan))} {unit}".rstrip()
        + f", of which {100 * float(simulation.bubble_fraction):.1f} % are idle."
    )


def _plain(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else number(value)
