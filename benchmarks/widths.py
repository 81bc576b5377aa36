"""The best learning rate at three widths of one decoder: does that of a narrow model carry over to a wide one?

    python benchmarks/widths.py --output benchmarks/results/widths_cpu.json

The model is a gpt-tiny of fixed depth and width of a head on the standard library's source; all widths read the same
tokens, as many steps, with the preset's schedule and weights drawn as Penstock draws them. `FORMS` are ways to set the
rates of its parts: one rate for all, or some of them times the smallest width / width (Yang et al., "Tensor Programs
V", 2022, tables 3 and 8, the column of Adam). Rates are powers of two, tried around the best until both neighbours
of it are worse, and then with further seeds. The optimum is that of a parabola through the best three.

Runs that the file has are not made again, and --runs says how many are made before the program ends; it then returns 3.
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any, NamedTuple

import torch

from penstock.build import Built
from penstock.models.anatomy import anatomy_of
from penstock.models.roles import Head
from penstock.report.record import environment
from time_to_loss import JOBS, figure, parser_for, started, stepped

WIDTHS = (64, 128, 256)
HEAD, DEPTH, TOKENS, STEPS = 32, 2, 64, 256
SEEDS = (0, 1)
FIRST = -8
"""Log2 of the first rate that is tried."""


class Form(NamedTuple):
    """A way to set the learning rates of a model's parts."""

    title: str
    tied: bool = True
    """Whether the output layer is the table of token embeddings."""
    hidden: bool = False
    """Whether rates of the blocks' matrices are scaled by the width, as `recipe.lr_width` does it."""
    output: bool = False
    """Whether the rate of the output layer is scaled too."""
    optimizer: str = "adamw"


FORMS = {
    "one": Form("AdamW, one rate"),
    "hidden": Form("AdamW, `lr_width`", hidden=True),
    "both": Form("AdamW, `lr_width`, the table scaled too", hidden=True, output=True),
    "untied-one": Form("AdamW, untied, one rate", tied=False),
    "untied-hidden": Form("AdamW, untied, `lr_width`", tied=False, hidden=True),
    "untied-both": Form(
        "AdamW, untied, `lr_width`, the output scaled too", tied=False, hidden=True, output=True
    ),
    "muon": Form("Muon, one rate", optimizer="muon"),
}


def trained(name: str, width: int, power: int, seed: int) -> dict[str, Any]:
    """One run to its end, and its loss on unseen files."""
    form, job = FORMS[name], JOBS["gpt-tiny"]
    fields = {
        "model.width": width, "model.heads": width // HEAD, "model.mlp_width": 4 * width, "model.depth": DEPTH,
        "model.sequence": TOKENS, "model.tied": form.tied,
    }  # fmt: skip
    recipe = {"steps": STEPS, "lr_width": WIDTHS[0] if form.hidden else None}
    start = started("gpt-tiny", form.optimizer, 2.0**power, seed, fields, **recipe)
    if form.output:
        scale_output(start.built, WIDTHS[0] / width)
    seconds = sum(stepped(start, STEPS))
    loss = figure(job, start.built, start.loader(False))
    return {"form": name, "width": width, "log2_lr": power, "seed": seed, "loss": loss, "seconds": seconds}


def scale_output(built: Built, factor: float) -> None:
    """Let the output layer's weight learn at a multiple of the rate."""
    weight = built.model.get_submodule(next(anatomy_of(built.model).parts(Head)).name).weight
    for group in list(built.optimizer.param_groups):
        rest = [parameter for parameter in group["params"] if parameter is not weight]
        if len(rest) < len(group["params"]):
            built.optimizer.param_groups.append({**group, "params": [weight], "lr_scale": factor})
            group["params"] = rest


def losses(runs: list[dict[str, Any]], name: str, width: int) -> dict[int, dict[int, float]]:
    """The losses of a form at a width, by log2 of the rate and by seed."""
    found: dict[int, dict[int, float]] = {}
    if width == WIDTHS[0]:  # nothing is scaled, so forms of one model and optimizer are the same
        mine = FORMS[name]
        name = next(
            key for key, one in FORMS.items() if (one.tied, one.optimizer) == (mine.tied, mine.optimizer)
        )
    for run in runs:
        if (run["form"], run["width"]) == (name, width):
            found.setdefault(run["log2_lr"], {})[run["seed"]] = run["loss"]
    return found


def best(tried: dict[int, dict[int, float]]) -> int:
    """The rate with the smallest mean loss."""
    return min(tried, key=lambda power: statistics.fmean(tried[power].values()))


def following(runs: list[dict[str, Any]], name: str, width: int) -> tuple[int, int] | None:
    """Log2 of the rate, and the seed, of the next run; None where all are made."""
    tried, narrowest = losses(runs, name, width), losses(runs, name, WIDTHS[0])
    before = best(narrowest) if narrowest else FIRST
    middle = best(tried) if tried else before
    wanted = (middle, middle - 1, middle + 1, *([before] if width == WIDTHS[-1] else []))
    return next(((one, seed) for seed in SEEDS for one in wanted if seed not in tried.get(one, {})), None)


def table(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each form: log2 of the best rate by width, its move from the smallest width to the largest, the loss of the
    best rate tried, and what the largest width loses at the best rate tried of the smallest."""
    rows: dict[str, Any] = {}
    for name in FORMS:
        if any(following(runs, name, width) for width in WIDTHS):
            continue
        every = [losses(runs, name, width) for width in WIDTHS]
        means = [{one: statistics.fmean(seeds.values()) for one, seeds in tried.items()} for tried in every]
        found = [best(tried) for tried in every]
        optima = [optimum(mean, at) for mean, at in zip(means, found)]
        rows[name] = {
            "log2_lr": optima, "moved": optima[-1] - optima[0], "best_log2_lr": found,
            "loss": [mean[at] for mean, at in zip(means, found)],
            "lost": means[-1][found[0]] - means[-1][found[-1]],
        }  # fmt: skip
    return rows


def optimum(mean: dict[int, float], at: int) -> float:
    """Where a parabola through the best rate and its neighbours is lowest."""
    below, least, above = (mean[at + step] for step in (-1, 0, 1))
    return at + (below - above) / (2 * (below - 2 * least + above))


def lines(stored: dict[str, Any]) -> list[str]:
    """The rows of the page's table."""
    rows = []
    for name, row in stored["table"].items():
        rates, found = (" | ".join(f"{one:.2f}" for one in row[key]) for key in ("log2_lr", "loss"))
        rows.append(f"| {FORMS[name].title} | {rates} | {row['moved']:+.2f} | {found} | {row['lost']:.3f} |")
    return rows


def main() -> int:
    options = parser_for(__doc__, FORMS).parse_args()
    torch.set_num_threads(1)
    runs = json.loads(options.output.read_text())["runs"] if options.output.exists() else []
    left = options.runs
    for name in options.only or FORMS:
        for width in WIDTHS:
            while (one := following(runs, name, width)) is not None:
                if not left:
                    return 3
                left -= 1
                runs.append(trained(name, width, *one))
                print(runs[-1], flush=True)
                stored = {"table": table(runs), "runs": runs, "environment": environment()}
                options.output.write_text(json.dumps(stored, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
