"""The picture of a demo: a bar for each optimisation of the Plan, and what came of them in words below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.report.figures import Bar, waterfall


@dataclass(frozen=True, slots=True, kw_only=True)
class Rise:
    """One bar: a setting, and how many times the baseline's speed it reaches."""

    title: str
    ratio: float
    low: float
    high: float
    predicted: float | None
    """Ratio that the planner predicted before it was measured."""
    images_per_second: float
    proven: bool = True
    """Whether its own gain is beyond the noise."""


def demo_figure(title: str, rises: Sequence[Rise], notes: Sequence[str]) -> str:
    """The picture as an SVG file; the first rise is the baseline. Raises ValueError without any."""
    if not rises:
        raise ValueError("A demo's picture needs at least the baseline.")
    bars = [
        Bar(
            label=rise.title, state=("kept" if rise.proven else "unproven") if index else "baseline",
            value=rise.ratio, low=rise.low, high=rise.high, predicted=rise.predicted if index else None,
            floor=rises[index - 1].ratio if index else None,
            note=f"   {rise.images_per_second:,.0f} images/s",
        )
        for index, rise in enumerate(rises)
    ]  # fmt: skip
    label = "speed relative to the baseline"
    return waterfall(bars, title=title, x_label=label, heading=title, notes=notes, alone=True) + "\n"
