"""One body with two branches against single models of equal parameters and of equal FLOPs.

    python benchmarks/universal.py --runs runs/universal --output universal_cpu.json

| model | blocks | what it shares with `joint` |
|---|---|---|
| joint | 2 in the body, 1 in each branch | |
| parameters | an encoder and a decoder of 2 | parameters of both together, as near as whole blocks come |
| flops | an encoder and a decoder of 3 | FLOPs of a step of both together |

All see number words of two languages, from which a tenth of the numbers is held out, in as many steps. Then each body
that understands, and one that has learned nothing, is fine-tuned on few pairs of numbers, which are the same or
different in the two languages, and judged by pairs of numbers that were held out. A run in --runs that is complete is
not made again; the results are written after each seed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from penstock.config.model import UniversalConfig
from penstock.config.plan import Plan
from penstock.config.run import DataConfig, Recipe, RunConfig
from penstock.config.stack import Stack
from penstock.data import Loader
from penstock.data.text.build import TextRow
from penstock.data.text.embedded import numbers
from penstock.kernels.cross_entropy import IGNORED
from penstock.models.convert import from_pretrained
from penstock.planner.describe import totals
from penstock.report.record import environment
from penstock.tasks import task_of
from penstock.train import train

LANGUAGES = ("en", "de")
BATCH, LABELS, TUNED = 16, 256, 160
"""Samples of a step; pairs with labels; steps of fine-tuning."""


def block(depth: int) -> Stack:
    return Stack(width=64, depth=depth, heads=2, mlp_width=256, mlp="gelu_tanh")


def models() -> dict[str, UniversalConfig]:
    """All models by name; single ones have one branch."""
    joint = UniversalConfig(
        shared=block(2), understanding=block(1), generating=block(1), vocabulary=368, sequence=64, init="scaled",
        token_types=2,
    )  # fmt: skip
    found = {"joint": joint}
    for name, depth in (("parameters", 1), ("flops", 2)):
        for branch in joint.BRANCHES:
            found[f"{name}, {branch}"] = replace(joint, shared=block(depth), branches=(branch,))
    return found


def write_text(folder: Path) -> Path:
    """Numbers in both languages, a line each, of those that are not held out."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "numbers.txt"
    rows = [row for row in numbers("two", LANGUAGES).parts[0] if isinstance(row, TextRow)]
    generator = torch.Generator().manual_seed(0)
    lines = [" = ".join(rows[i].texts) for i in torch.randperm(len(rows), generator=generator).tolist()]
    file.write_text("\n".join(lines))
    return file


def trained(config: RunConfig) -> Any:
    """The evaluation of a run that ends here, or ended before."""
    kept = Path(config.output) / "evaluation.json"
    if not kept.is_file():
        result = train(config)
        kept.write_text(json.dumps(result.evaluation.record()))
    return json.loads(kept.read_text())


@torch.no_grad()
def judged(folder: Path, text: Path) -> dict[str, float]:
    """Perplexity of the next token, and loss and accuracy of masked ones, as far as a model has heads for them, on the
    held-out end of the text."""
    model, joint = from_pretrained(folder / "export").eval(), models()["joint"]
    task = task_of(joint)
    source = task.open(DataConfig(source=f"text:{text}"), joint, "val")
    loader = Loader(
        source, task.prepare(source, joint), batch=64, seed=0, device=torch.device("cpu"), endless=False
    )
    sums = {"next": [0.0, 0.0, 0.0], "masked": [0.0, 0.0, 0.0]}
    with loader:
        for batch in loader:
            given = dict(zip(joint.graph.arguments, batch.inputs))
            for name, one in (("next", "tokens"), ("masked", "hidden")):
                branch = "generating" if name == "next" else "understanding"
                if branch not in model.config.branches:
                    continue
                here = one if len(model.config.branches) > 1 else "tokens"
                documents = (given["documents"] or {}).get(one)
                rows = given["rows"] if name == "masked" else None
                logits = model(**{here: given[one]}, documents=documents, rows=rows)
                logits = logits[name] if isinstance(logits, dict) else logits
                targets = given["targets"][name].flatten()
                logits = logits.flatten(0, -2).float()
                sums[name][0] += float(
                    F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
                )
                sums[name][1] += float((targets != IGNORED).sum())
                sums[name][2] += float((logits.argmax(-1) == targets).sum())
    found = {}
    if sums["next"][1]:
        found["perplexity"] = math.exp(sums["next"][0] / sums["next"][1])
    if sums["masked"][1]:
        found |= {
            "masked_loss": sums["masked"][0] / sums["masked"][1],
            "masked_accuracy": sums["masked"][2] / sums["masked"][1],
        }
    return found


def tuned(name: str, start: Path | None, runs: Path, seed: int) -> float:
    """The accuracy on held-out pairs after fine-tuning on few."""
    config = models()[name]
    config = replace(config, branches=("understanding",), head="classes")
    return float(trained(
        RunConfig(
            model=config, task="pairs", init_from=None if start is None else str(start / "export"), seed=seed,
            data=DataConfig(source=f"numbers:{','.join(LANGUAGES)}", limit=LABELS), output=str(runs), device="cpu",
            recipe=Recipe(steps=TUNED, lr=5e-4, warmup_share=0.1, eval_every_epochs=1000.0),
            plan=Plan(micro_batch=BATCH, optimizer="fused"),
        )
    )["accuracy"])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    text = write_text(options.runs)
    seeds: list[dict[str, Any]] = []
    for seed in range(options.seeds):
        began, rows = time.time(), {}
        for name, model in models().items():
            folder = options.runs / f"{name.replace(', ', '-')}-{seed}"
            trained(
                RunConfig(
                    model=model, data=DataConfig(source=f"text:{text}"), seed=seed, output=str(folder), device="cpu",
                    recipe=Recipe(steps=options.steps, lr=3e-3, warmup_share=0.1, eval_every_epochs=1000.0),
                    plan=Plan(micro_batch=BATCH, optimizer="fused"),
                )
            )  # fmt: skip
            rows[name] = judged(folder, text)
            if "understanding" in model.branches:
                rows[name]["pairs_accuracy"] = tuned(name, folder, folder / "pairs", seed)
        rows["untrained"] = {
            "pairs_accuracy": tuned("flops, understanding", None, options.runs / f"untrained-{seed}", seed)
        }
        seeds.append({"seed": seed, "models": rows, "seconds": time.time() - began})
        options.output.write_text(json.dumps(report(seeds, options.steps), indent=1) + "\n")


def report(seeds: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """All results, with the mean of each and half the distance between its extremes."""
    summary: dict[str, dict[str, Any]] = {}
    for name in seeds[0]["models"]:
        for measure in seeds[0]["models"][name]:
            values = [seed["models"][name][measure] for seed in seeds]
            spread = (max(values) - min(values)) / 2
            summary.setdefault(name, {})[measure] = {"mean": statistics.fmean(values), "spread": spread}
    sizes = {
        name: {"parameters": totals(model).parameters, "flops_per_sample": totals(model).model_flops}
        for name, model in models().items()
    }
    return {
        "environment": environment(), "steps": steps, "batch": BATCH,
        "labels": LABELS, "tuning_steps": TUNED, "models": sizes, "summary": summary, "seeds": seeds,
    }  # fmt: skip


if __name__ == "__main__":
    main()
