"""A confusion matrix: a row for each true class, a column for each predicted one."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.report.chart import SMALL, WIDE, Chart, Scale, text_width, wrap

MOST_CLASSES = 40
"""Most classes that are drawn: cells of a larger matrix would be too small to read."""


def confusion_figure(counts: Sequence[Sequence[int]], names: Sequence[str], *, width: float = WIDE) -> str:
    """One `<svg>` element of samples by true and predicted class, each cell shaded by its share of the row. Correct
    samples are on the diagonal, in another colour.
    """
    chart = Chart(width)
    margin = min(0.3 * width, 14 + max(text_width(name, SMALL) for name in names))
    side = min(44.0, (width - margin - 4) / len(names))
    chart.text(2, 14, "true class in rows, predicted class in columns", fill="--muted")
    top = 26.0
    chart.x = Scale(0, len(names), margin, margin + side * len(names))
    chart.y = Scale(len(names), 0, top + side * len(names), top)
    for row, (name, values) in enumerate(zip(names, counts, strict=True)):
        total, y = sum(values), chart.y(row)
        if side >= 11:
            (label, *_) = wrap(name, margin - 8, SMALL, most=1)
            chart.text(margin - 6, y + side / 2 + 4, label, size=SMALL, anchor="end", fill="--muted")
        for column, count in enumerate(values):
            share = count / total if total else 0.0
            color = "--c0" if row == column else "--bad"
            shade = f"color-mix(in srgb, var({color}) {round(8 + 80 * share) if count else 3}%, var(--card))"
            tip = f"{name} predicted as {names[column]}: {count:,} of {total:,} ({share:.0%})"
            x = chart.x(column)
            chart.box(x, y, x + side - 1, y + side - 1, fill=shade, tip=tip)
            if count and side >= text_width(f"{count}", SMALL) + 4:
                ink = "--card" if share > 0.6 else "--ink"
                chart.text(x + side / 2, y + side / 2 + 4, f"{count}", size=SMALL, anchor="middle", fill=ink)
    bottom = chart.y.start + 16
    for column, name in enumerate(names):
        chart.text(
            chart.x(column + 0.5), bottom, name, size=SMALL, anchor="middle", fill="--muted", optional=True, inside=True
        )  # fmt: skip
    chart.height = bottom + 8
    return chart.svg("Confusion matrix", f"{len(names)} classes")
