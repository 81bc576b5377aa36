"""What leaving parts out costs in test loss, seed by seed, beside the noise between seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.report.figures import WIDTH
from penstock.report.svg import Canvas, number, ticks

_LEFT, _RIGHT, _TOP, _ROW, _GAP, _BOTTOM = 196.0, 14.0, 62.0, 26.0, 64.0, 48.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One task: the losses of each variant over seeds; None stands for a run that was lost."""

    title: str
    baseline: str
    """The variant from which differences are taken, seed by seed; all its runs have a loss."""
    losses: Mapping[str, Sequence[float | None]]

    @property
    def noise(self) -> float:
        """Standard deviation of the baseline's losses over seeds."""
        return statistics.stdev(loss for loss in self.losses[self.baseline] if loss is not None)

    def difference(self, variant: str, seed: int) -> float | None:
        """Loss of a variant less that of the baseline with the same seed; None where the run was lost."""
        mine, base = self.losses[variant][seed], self.losses[self.baseline][seed]
        return None if mine is None or base is None else mine - base


def ablation_figure(panels: Sequence[Panel], *, title: str, alone: bool = False) -> str:
    """A row for each variant, a column for each task, a dot for each seed: its test loss less the baseline's.

    The band is one standard deviation of the baseline's own losses to either side. Dots are coloured by whether they
    lie in it, and runs that were lost stand as a word. Raises ValueError unless all panels have the same variants.
    """
    names = list(panels[0].losses)
    if any(list(panel.losses) != names for panel in panels):
        raise ValueError("All panels of an ablation need the same variants, in the same order.")
    canvas = Canvas(WIDTH, _TOP + _ROW * len(names) + _BOTTOM)
    wide = (WIDTH - _LEFT - _RIGHT - _GAP * (len(panels) - 1)) / len(panels)
    for row, name in enumerate(names):
        canvas.text(_LEFT - 14, _TOP + _ROW * (row + 0.5) + 4, name, anchor="end")
    for column, panel in enumerate(panels):
        _panel(canvas, panel, _LEFT + column * (wide + _GAP), wide)
    _legend(canvas, panels[0].baseline)
    return canvas.svg(title, "; ".join(_said(panel) for panel in panels), alone=alone)


def _panel(canvas: Canvas, panel: Panel, left: float, wide: float) -> None:
    seeds = range(len(panel.losses[panel.baseline]))
    all_of = {name: [panel.difference(name, seed) for seed in seeds] for name in panel.losses}
    found = [value for values in all_of.values() for value in values if value is not None]
    noise = panel.noise
    marks = ticks(min(*found, -noise) * 1.05, max(*found, noise) * 1.05, 4)
    bottom = _TOP + _ROW * len(panel.losses)

    def x(value: float) -> float:
        return left + wide * (value - marks[0]) / (marks[-1] - marks[0])

    canvas.rect(x(-noise), _TOP, x(noise) - x(-noise), bottom - _TOP, fill="--idle")
    for mark in marks:
        canvas.line(x(mark), _TOP, x(mark), bottom, stroke="--line" if mark else "--edge")
        canvas.text(x(mark), bottom + 18, number(mark, marks), size=11, anchor="middle", fill="--muted")
    canvas.text(left, _TOP - 12, panel.title, bold=True)
    words = f"test loss less that of {panel.baseline} with the same seed"
    canvas.text(left + wide / 2, bottom + 38, words, size=11, anchor="middle", fill="--muted")
    for row, (name, values) in enumerate(all_of.items()):
        y = _TOP + _ROW * (row + 0.5)
        for seed, value in enumerate(values):
            if value is not None:
                color = "--accent" if abs(value) <= noise else "--bad"
                canvas.circle(x(value), y, 4, fill=color, tip=f"{name}, seed {seed}: {value:+.4f}")
        lost = values.count(None)
        if lost:
            canvas.text(x(noise) + 10, y + 4, f"lost, {lost} of {len(values)}", size=11, fill="--bad")


def _legend(canvas: Canvas, baseline: str) -> None:
    canvas.rect(14, 14, 14, 12, fill="--idle")
    canvas.text(34, 24, f"standard deviation of {baseline} over seeds", size=11)
    for at, color, words in ((290.0, "--accent", "a run within"), (400.0, "--bad", "a run outside")):
        canvas.circle(at, 20, 4, fill=color)
        canvas.text(at + 10, 24, words, size=11)


def _said(panel: Panel) -> str:
    words = []
    for name, losses in panel.losses.items():
        found = [loss for loss in losses if loss is not None]
        words.append(f"{name} {sum(found) / len(found):.4f}" if found else f"{name} lost")
    return f"{panel.title}: {', '.join(words)}"
