"""Loads as a heat map: a row for each layer or label, a cell for each expert."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from penstock.report.chart import SMALL, WIDE, Chart, Entry, Scale, number, text_width

MOST_CELLS = 20_000
_STEPS = (0.5, 0.8, 1.25, 2.0)
"""Bounds between the shades: multiples of an even share of the row."""
_SHADES = (8, 24, 44, 68, 100)


def load_figure(
    rows: Sequence[tuple[str, Sequence[int]]], *, title: str, width: float = WIDE, alone: bool = False
) -> str:
    """One `<svg>` element of visits by row and expert, each shaded by its multiple of the row's mean; `alone` makes it
    a file of its own. The pointer on a cell reads its visits.
    """
    chart = Chart(width)
    fill = partial("color-mix(in srgb, var(--c0) {}%, var(--card))".format)
    words = [
        f"below {_STEPS[0]:g}",
        *(f"{a:g} to {b:g}" for a, b in pairwise(_STEPS)),
        f"from {_STEPS[-1]:g}",
    ]
    chart.text(2, 17, "visits over the row's mean", bold=True)
    entries = [Entry(text, fill(shade)) for text, shade in zip(words, _SHADES)]
    top = chart.legend(entries, 2, 38, width - 2) + 14
    left = min(0.4 * width, 12 + max((text_width(name, SMALL) for name, _ in rows), default=0.0))
    most = max((len(values) for _, values in rows), default=1)
    high = min(24.0, max(5.0, 640.0 / max(1, len(rows))))
    chart.x, chart.y = Scale(0, most, left, width - 4), Scale(len(rows), 0, top + high * len(rows), top)
    for place, (name, values) in enumerate(rows):
        y, total = top + place * high, sum(values)
        if high >= 10:
            chart.text(
                left - 6, y + high / 2 + 4, name, size=SMALL, anchor="end", fill="--muted", optional=True
            )
        gap = 1.0 if high >= 10 else 0.0
        for expert, visits in enumerate(values):
            multiple = visits * len(values) / total if total else 0.0
            shade = fill(_SHADES[sum(multiple >= step for step in _STEPS)])
            tip = f"{name}, expert {expert}: {visits:,} visits, {multiple:.2f} of the mean"
            chart.box(chart.x(expert), y, chart.x(expert + 1) - gap, y + high - gap, fill=shade, tip=tip)
    marks = chart.x.marks(4 if chart.narrow else 8)
    shown = [mark for mark in marks if mark == int(mark) and mark < most]
    chart.height = chart.x_axis("expert", shown, lambda mark: number(mark, shown))
    return chart.svg(title, f"Visits of {most} experts in {len(rows)} rows.", alone=alone)
