"""A pipeline schedule drawn as ranks by time, as in every paper on the subject.

Forward, backward and weight gradient have a colour each. A cell shows its micro-batch's number if it is wide enough. A
rank's second and later model chunks have tints of the same colours. Empty space is the bubble.
"""

from __future__ import annotations

from penstock.errors import ConfigError
from penstock.report.chart import WIDE, Chart, Entry, Scale, number
from penstock.schedules import Kind, Simulation, Span

MOST_CELLS = 20_000
_LEFT, _RIGHT = 56.0, 62.0
_SMALLEST = 7.5  # a smaller number is left out; a pointer on the cell still shows it

# The whole backward and its first half share a colour: for the previous stage they are the same work.
_KINDS: dict[Kind, Entry] = {
    "F": Entry("F: forward", "--c1"),
    "B": Entry("B: backward", "--c0"),
    "I": Entry("I: backward, input gradient", "--c0"),
    "W": Entry("W: weight gradient", "--c2"),
}
# Per cent of the colour in a rank's second and its last chunk; ink on them has a contrast of at least 4.5 : 1.
_TINTS = (42, 24)


def schedule_figure(
    simulation: Simulation, *, title: str, unit: str = "", memory_unit: str = "", width: float = WIDE,
    alone: bool = False,
) -> str:  # fmt: skip
    """One `<svg>` element; `alone` makes it a separate file. `unit` and `memory_unit` are the names of the costs'
    units.

    Raises `ConfigError` for more than 20,000 actions, which no page can show.
    """
    shown = simulation.timeline()
    if len(shown) > MOST_CELLS:
        raise ConfigError(
            f"The figure would have {len(shown):,} actions, more than {MOST_CELLS:,}; draw a schedule of fewer "
            "micro-batches, which has the same shape."
        )
    ranks = len(simulation.schedule.ranks)
    row = min(30.0, max(12.0, 640.0 / ranks))
    used = {action.kind for order in simulation.schedule.ranks for action in order}
    entries = [entry for kind, entry in _KINDS.items() if kind in used]
    if len(simulation.schedule.placement) > ranks:
        entries.append(
            Entry("later chunks are fainter", f"color-mix(in srgb, var(--ink) {_TINTS[1]}%, var(--card))")
        )
    idle = f"{100 * float(simulation.bubble_fraction):.1f} %"
    chart = Chart(width)
    chart.text(2, 17, f"bubble {idle} of the ranks' time", bold=True)
    top = chart.legend(entries, 2, 38, width - 2) + 18
    bottom = top + ranks * row
    chart.x = Scale(0.0, float(simulation.makespan), _LEFT, width - _RIGHT)
    chart.y = Scale(ranks, 0, bottom, top)
    _rows(chart, simulation, row, memory_unit)
    tints = _tints(simulation)
    for span in shown:
        _cell(chart, span, row, tints[span.action.stage])
    chart.height = chart.x_axis(f"time [{unit}]" if unit else "time", chart.x.marks(4 if chart.narrow else 8))
    schedule = simulation.schedule
    took = f"{number(float(simulation.makespan))} {unit}".rstrip()
    description = (
        f"{schedule.micro_batches} micro-batches through {schedule.stages} stages on {ranks} ranks: "
        f"{took}, of which {idle} are idle."
    )
    return chart.svg(title, description, alone=alone)


def _tints(simulation: Simulation) -> list[int]:
    """For each stage, the per cent of its colour: 100 for a rank's first chunk, less for each later one."""
    seen = [0] * len(simulation.schedule.ranks)
    chunk = []
    for rank in simulation.schedule.placement:
        chunk.append(seen[rank])
        seen[rank] += 1
    first, last = _TINTS
    steps = max(max(seen) - 2, 1)
    return [100 if c == 0 else round(first - (first - last) * (c - 1) / steps) for c in chunk]


def _cell(chart: Chart, span: Span, row: float, tint: int) -> None:
    x1, x2 = chart.x(float(span.start)), chart.x(float(span.end))
    y, hue, solid = chart.y(span.rank), _KINDS[span.action.kind].color, tint == 100
    chart.box(
        x1, y + 2, x2, y + row - 2,
        fill=hue if solid else f"color-mix(in srgb, var({hue}) {tint}%, var(--card))",
        stroke="--card" if solid else hue,
        radius=min(2.0, (x2 - x1) / 4),
        tip=f"{span.action}: {number(float(span.start))} to {number(float(span.end))}",
    )  # fmt: skip
    words = str(span.action.micro_batch)
    size = min(12.0, row - 5, (x2 - x1 - 2) / (0.62 * len(words)))
    if size >= _SMALLEST:
        middle, fill = y + row / 2 + 0.36 * size, "--card" if solid else "--ink"
        chart.text((x1 + x2) / 2, middle, words, size=size, anchor="middle", fill=fill)


def _rows(chart: Chart, simulation: Simulation, row: float, memory_unit: str) -> None:
    """Each rank's name, its empty time line, and its peak memory."""
    size, right = min(12.0, row - 2), chart.x.stop + 8
    chart.text(right, chart.y.stop - 6, f"holds {memory_unit}".rstrip(), size=11, fill="--muted", inside=True)
    for rank, peak in enumerate(map(float, simulation.peak_memory)):
        y = chart.y(rank)
        chart.box(_LEFT, y + 2, chart.x.stop, y + row - 2, fill="--paper", stroke="--line", radius=2)
        base = y + row / 2 + 0.36 * size
        chart.text(_LEFT - 8, base, f"rank {rank}", size=size, anchor="end", fill="--muted")
        chart.text(right, base, f"{peak:.0f}" if peak == int(peak) else number(peak), size=size)
