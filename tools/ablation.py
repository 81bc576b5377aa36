"""Write docs/reference/precision-ablation.md and its figure from what benchmarks/precision_ablation.py measured:
`make reference`.

A test runs `page()` and compares, so the page cannot say other than the figures.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.report.chart import WIDTH, Entry, Plot, Scale, legend, number, ticks
from penstock.report.svg import Canvas

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "precision_ablation.json"
PATH = ROOT / "docs" / "reference" / "precision-ablation.md"
FIGURE = PATH.with_suffix(".svg")
TITLES = {
    "digits": "Handwritten digits, Vision Transformer",
    "bytes": "Python's source text, decoder",
}
BASELINE = "O0"

INTRODUCTION = """\
# What each part of mixed precision is for

Written by `make reference` from `benchmarks/results/precision_ablation.json`; do not edit.

The same training with parts left out, on real data: scikit-learn's handwritten digits by a small Vision Transformer,
and the source text of Python's standard library by a byte-level decoder, with AdamW and a cosine. Each variant runs
with {seeds} seeds, which draw weights and batches, for a difference has to be seen beside what seeds alone make.

Gradients vanish in fp16 because the loss is a mean over very many samples. So that a small model shows it, the loss of
each step is divided by {share:,}, as that of one micro-batch is where {share:,} of them make up a step. In fp32 that
changes nothing: AdamW does not see the scale of gradients.

![Test loss of every run, by variant and task](precision-ablation.svg)
"""

CLOSING = """\
*Difference* is the mean over seeds of the test loss less that of O0 with the same seed, ± its standard deviation; the
noise to hold it against is the standard deviation of O0's own losses in the first row. *Lost* are runs whose loss is no
number at the end, or that ended because the loss scale lay at its floor.

- **O1 and O2, in bf16 and fp16, lie within the noise.** In fp16 they do so because the loss is scaled and the weights
  have fp32 masters.
- **Without the loss scale** most gradients are zero in fp16, and the model learns late, from those that are not.
- **Without master weights** an update that is smaller than half a unit in the last place of its weight is lost. bf16,
  with 8 bits, loses many and ends worse; in fp16 also AdamW's second moment, a square, falls below the smallest number,
  so that steps divide by zero and the run is lost.
- **O3** has no master weights, no scale and norms in the half type: in bf16 it ends worse than O2 every time, in fp16
  it is lost. It is for inference.
"""


def document() -> dict[str, Any]:
    """What was measured."""
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return found


def losses(found: dict[str, Any], task: str) -> dict[str, list[float | None]]:
    """Test losses of each variant, by seed; None where the run was lost."""
    runs = sorted(found["runs"][task], key=lambda run: run["seed"])
    variants = dict.fromkeys(run["variant"] for run in runs)
    return {
        variant: [
            None if run["ended"] else run["test_loss"] for run in runs if run["variant"] == variant
        ]
        for variant in variants
    }  # fmt: skip


def differences(of: Losses, variant: str) -> list[float]:
    """Test loss less that of the baseline with the same seed, for each run that was not lost."""
    pairs = zip(of[variant], of[BASELINE], strict=True)
    return [mine - base for mine, base in pairs if mine is not None and base is not None]


def noise(of: Losses) -> float:
    """Standard deviation of the baseline's test losses over seeds."""
    return statistics.stdev(loss for loss in of[BASELINE] if loss is not None)


Losses = Mapping[str, Sequence[float | None]]
"""Test losses of each variant over seeds; None stands for a run that was lost."""


def figure(found: dict[str, Any]) -> str:
    """The figure as an SVG file."""
    panels = {title: losses(found, task) for task, title in TITLES.items()}
    return draw(panels, title="Test loss with parts of mixed precision left out") + "\n"


def draw(panels: Mapping[str, Losses], *, title: str) -> str:
    """A row for each variant, a column for each task, a dot for each seed: its test loss less the baseline's.

    The band is one standard deviation of the baseline's own losses to either side. Dots are coloured by whether they
    lie in it, and runs that were lost stand as a word. Raises ValueError unless all panels have the same variants.
    """
    names = list(next(iter(panels.values())))
    if any(list(panel) != names for panel in panels.values()):
        raise ValueError("All panels of an ablation need the same variants, in the same order.")
    left, right, top, row, gap = 196.0, 14.0, 62.0, 26.0, 64.0
    bottom = top + row * len(names)
    canvas = Canvas(WIDTH, bottom + 48)
    rows = Scale(len(names), 0, bottom, top)
    for i, name in enumerate(names):
        canvas.text(left - 14, rows(i + 0.5) + 4, name, anchor="end")
    wide = (WIDTH - left - right - gap * (len(panels) - 1)) / len(panels)
    for column, (task, of) in enumerate(panels.items()):
        start = left + column * (wide + gap)
        values = [value for name in names for value in differences(of, name)]
        reach = noise(of)
        marks = ticks(min(*values, -reach) * 1.05, max(*values, reach) * 1.05, 4)
        _panel(Plot(canvas, Scale(marks[0], marks[-1], start, start + wide), rows), task, of, marks)
    entries = [
        Entry(f"standard deviation of {BASELINE} over seeds", "--idle"), Entry("a run within", "--accent", "dot"),
        Entry("a run outside", "--bad", "dot"),
    ]  # fmt: skip
    legend(canvas, entries, 14, 24, WIDTH)
    return canvas.svg(title, "; ".join(_said(task, of) for task, of in panels.items()), alone=True)


def _panel(plot: Plot, task: str, of: Losses, marks: Sequence[float]) -> None:
    canvas, x, reach = plot.canvas, plot.x, noise(of)
    canvas.rect(x(-reach), plot.y.stop, x(reach) - x(-reach), plot.y.start - plot.y.stop, fill="--idle")
    words = f"test loss less that of {BASELINE} with the same seed"
    plot.x_axis(words, marks, lambda mark: number(mark, marks), grid=True)
    canvas.line(x(0), plot.y.stop, x(0), plot.y.start, stroke="--edge")
    canvas.text(x.start, plot.y.stop - 12, task, bold=True)
    for row, (name, mine) in enumerate(of.items()):
        y = plot.y(row + 0.5)
        for seed, (loss, base) in enumerate(zip(mine, of[BASELINE], strict=True)):
            if loss is not None and base is not None:
                color = "--accent" if abs(loss - base) <= reach else "--bad"
                canvas.circle(
                    x(loss - base), y, 4, fill=color, tip=f"{name}, seed {seed}: {loss - base:+.4f}"
                )
        if lost := list(mine).count(None):
            canvas.text(x(reach) + 10, y + 4, f"lost, {lost} of {len(mine)}", size=11, fill="--bad")


def _said(task: str, of: Losses) -> str:
    words = []
    for name, mine in of.items():
        found = [loss for loss in mine if loss is not None]
        words.append(f"{name} {statistics.fmean(found):.4f}" if found else f"{name} lost")
    return f"{task}: {', '.join(words)}"


def page(found: dict[str, Any]) -> str:
    """The whole page."""
    seeds = len(losses(found, "digits")[BASELINE])
    parts = [INTRODUCTION.format(seeds=seeds, share=found["share"])]
    for task, title in TITLES.items():
        of, runs = losses(found, task), found["runs"][task]
        settings = found["tasks"][task]
        lines = [
            f"## {title}",
            "",
            f"{settings['steps']} steps, learning rate {settings['lr']:g}.",
            "",
            "| variant | test loss | difference | accuracy | steps skipped | lost |",
            "|---|---|---|---|---|---|",
        ]
        for variant, values in of.items():
            mine = [run for run in runs if run["variant"] == variant]
            kept = [value for value in values if value is not None]
            lost = len(values) - len(kept)
            right = statistics.fmean(run["test_accuracy"] for run in mine)
            skipped = statistics.fmean(run["skipped"] for run in mine)
            lines.append(
                f"| {variant} | {_spread(kept)} | "
                f"{'' if variant == BASELINE else _spread(differences(of, variant), signed=True)} | "
                f"{right:.1%} | {skipped:.0f} | {f'{lost} of {len(values)}' if lost else ''} |"
            )
        parts.append("\n".join([*lines, ""]))
    machine, versions = found["environment"]["machine"], found["environment"]["versions"]
    source = (
        f"Measured on {machine['processor']}, torch {versions['torch']}, one thread, by "
        "`python benchmarks/precision_ablation.py --output benchmarks/results/precision_ablation.json`.\n"
    )
    return "\n".join([*parts, CLOSING, source])


def _spread(values: list[float], *, signed: bool = False) -> str:
    if not values:
        return "–"
    sign = "+" if signed else ""
    return f"{statistics.fmean(values):{sign}.4f} ± {statistics.stdev(values):.4f}"


if __name__ == "__main__":
    PATH.write_text(page(document()), encoding="utf-8")
    FIGURE.write_text(figure(document()), encoding="utf-8")
