"""Write docs/reference/precision-ablation.md and its figure from what benchmarks/precision_ablation.py measured:
`make reference`.

A test runs `page()` and compares, so the page cannot say other than the figures.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from penstock.report.ablation_figure import Panel, ablation_figure

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


def differences(of: dict[str, list[float | None]], variant: str) -> list[float]:
    """Test loss less that of the baseline with the same seed, for each run that was not lost."""
    pairs = zip(of[variant], of[BASELINE], strict=True)
    return [mine - base for mine, base in pairs if mine is not None and base is not None]


def noise(of: dict[str, list[float | None]]) -> float:
    """Standard deviation of the baseline's test losses over seeds."""
    return statistics.stdev(loss for loss in of[BASELINE] if loss is not None)


def figure(found: dict[str, Any]) -> str:
    """The figure as an SVG file."""
    panels = [
        Panel(title=title, baseline=BASELINE, losses=losses(found, task)) for task, title in TITLES.items()
    ]
    return (
        ablation_figure(panels, title="Test loss with parts of mixed precision left out", alone=True) + "\n"
    )


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
