"""One body with two branches against single models of equal parameters and of equal FLOPs.

    python benchmarks/universal.py --runs runs/universal --output universal_cpu.json

| model | blocks | what it shares with `joint` |
|---|---|---|
| joint | 2 in the body, 1 in each branch | |
| parameters | an encoder and a decoder of 2 | parameters of both together, as near as whole blocks come |
| flops | an encoder and a decoder of 3 | FLOPs of a step of both together |

All see number words of two languages, from which a tenth of the numbers is held out, in as many steps. Then each body
that understands, and one that has learned nothing, is fine-tuned on few pairs of numbers, which are the same or
different in the two languages, and judged by pairs of numbers that were held out. Each seed is written to --output at
once, and a script that was stopped goes on there when it is started again; a run in --runs that is complete is not made
again either.
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
from penstock.data.toy.words import numbers
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


def begun(output: Path, steps: int) -> list[dict[str, Any]]:
    """The seeds that an earlier call with as many steps has written to a file; none where there is no file."""
    if not output.exists():
        return []
    data: dict[str, Any] = json.loads(output.read_text())
    same = {"steps": steps, "batch": BATCH, "labels": LABELS, "tuning_steps": TUNED, "models": sizes()}
    if other := [name for name, value in same.items() if data[name] != value]:
        raise SystemExit(f"{output} was made with other {', '.join(other)}; name another file in --output.")
    return list(data["seeds"])


def compared(seed: int, runs: Path, steps: int) -> dict[str, Any]:
    """What all models of a seed score."""
    text, begin, rows = write_text(runs), time.time(), {}
    for name, model in models().items():
        folder = runs / f"{name.replace(', ', '-')}-{seed}"
        trained(
            RunConfig(
                model=model, data=DataConfig(source=f"text:{text}"), seed=seed, output=str(folder), device="cpu",
                recipe=Recipe(steps=steps, lr=3e-3, warmup_share=0.1, eval_every_epochs=1000.0),
                plan=Plan(micro_batch=BATCH, optimizer="fused"),
            )
        )  # fmt: skip
        rows[name] = judged(folder, text)
        if "understanding" in model.branches:
            rows[name]["pairs_accuracy"] = tuned(name, folder, folder / "pairs", seed)
    accuracy = tuned("flops, understanding", None, runs / f"untrained-{seed}", seed)
    rows["untrained"] = {"pairs_accuracy": accuracy}
    return {"seed": seed, "models": rows, "seconds": time.time() - begin}


def sizes() -> dict[str, dict[str, float]]:
    """Parameters, and model FLOPs of a sample, of each model."""
    return {
        name: {"parameters": work.parameters, "flops_per_sample": work.model_flops}
        for name, model in models().items()
        if (work := totals(model))
    }


def report(seeds: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """All results, with means and deviations over seeds."""
    summary: dict[str, dict[str, Any]] = {}
    for name in seeds[0]["models"]:
        for measure in seeds[0]["models"][name]:
            values = [seed["models"][name][measure] for seed in seeds]
            deviation = statistics.stdev(values) if len(values) > 1 else None
            summary.setdefault(name, {})[measure] = {"mean": statistics.fmean(values), "deviation": deviation}
    return {
        "environment": environment(), "steps": steps, "batch": BATCH, "labels": LABELS, "tuning_steps": TUNED,
        "models": sizes(), "summary": summary, "seeds": seeds,
    }  # fmt: skip


def table(data: dict[str, Any]) -> list[str]:
    """The lines of the page's table: one body, two single models by what they have equal, and none that learned."""
    lines = ["| | parameters | FLOPs a sample | perplexity | masked words, % | pairs, % |", "|---" * 6 + "|"]
    for title, parts in {
        "joint": ("joint",),
        **{f"two of equal {equal}": (f"{short}, generating", f"{short}, understanding")
           for equal, short in (("parameters", "parameters"), ("FLOPs", "flops"))},
        "untrained": ("untrained",),
    }.items():  # fmt: skip
        size = [data["models"][part] for part in parts if part in data["models"]]
        cells = [
            f"{sum(one['parameters'] for one in size):,}" if size else "",
            f"{sum(one['flops_per_sample'] for one in size) / 1e6:.0f} M" if size else "",
        ]
        scores = {name: score for part in parts for name, score in data["summary"][part].items()}
        for name, scale, digits in (
            ("perplexity", 1, 3),
            ("masked_accuracy", 100, 1),
            ("pairs_accuracy", 100, 1),
        ):
            score = scores.get(name)
            shown = (
                [f"{scale * value:.{digits}f}" for value in score.values() if value is not None]
                if score
                else []
            )
            cells.append(" ± ".join(shown))
        lines.append(f"| {title} | {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |"))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True, help="written after each seed")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    seeds = begun(options.output, options.steps)
    for seed in range(options.seeds):
        if all(one["seed"] != seed for one in seeds):
            seeds.append(compared(seed, options.runs, options.steps))
            part = options.output.with_name(f"{options.output.name}.part")
            part.write_text(json.dumps(report(seeds, options.steps), indent=1) + "\n")
            part.replace(options.output)
            print("\n".join(table(report(seeds, options.steps))), flush=True)


if __name__ == "__main__":
    main()
