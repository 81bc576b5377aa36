"""Dense, sparse and hard-gated translators at equal FLOPs of a token, at equal parameters, and depth for width.

    python benchmarks/translation_experts.py --runs runs/experts --output translation_experts.json
    python benchmarks/translation_experts.py --data names --runs runs/names --output names.json

| model | blocks | perceptrons | what it shares with `dense` |
|---|---|---|---|
| dense | 4 | one | |
| sparse | 4 | 4 experts as wide, a learned router sends a token to one | FLOPs but for the router; more parameters |
| families | 4 | the same, the target language's family chooses | FLOPs; parameters of sparse |
| dealt | 4 | the same, languages are dealt to experts without regard to families | FLOPs; parameters of sparse |
| wide | 4 | one, four times as wide | parameters of sparse; more FLOPs |
| deep | 8 | one | twice the FLOPs in its blocks |

Half of the blocks encode, half decode. `numbers` are those below 1,000 in digits, whose words in 8 languages are right
or wrong; `names` are those of CLDR in 26 languages, which are hard to guess. All models train on the same samples in
the same order, with as many steps. Quality is that of numbers or names that were held out in all languages. Speeds are
measured at the end, all models in turn, so that a busy machine slows all alike. A run in --runs that is complete is not
made again. `--models dense sparse wide:3` makes three seeds of `wide`, and --seeds of the others; `dense` has the most.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.build import build
from penstock.config.decoding import Decoding
from penstock.config.load import load
from penstock.config.model import stacks, title
from penstock.config.recipes import load_run
from penstock.config.run import RunConfig
from penstock.data.text.build import TextRow
from penstock.data.toy.words import DIGITS, names, numbers
from penstock.decode.sample import sample
from penstock.decode.texts import Prompts
from penstock.models import create
from penstock.models.convert import load_weights
from penstock.planner.describe import totals
from penstock.planner.loads import imbalance, read_loads
from penstock.report.record import environment
from penstock.tasks import Translation
from penstock.tasks.text import first_samples, tokenizer_of
from penstock.tasks.translation import PrepareTranslation
from penstock.train import train
from penstock.train.metrics import read_metrics

NUMBERS = {"Semitic": "ar he", "Germanic": "de en", "Romance": "fr pt", "others": "id tr"}
NAMES = {
    "Indo-European and Malagasy": "af en fr mg",
    "Bantu": "ki lg ln nd rn sn sw xh zu",
    "Afro-Asiatic": "am ha om so ti",
    "other Niger-Congo and Nilotic": "ak bm ee ff ig luo wo yo",
}
"""Languages that share an expert."""
SIZES = {
    "numbers": {"width": 64, "heads": 2, "narrow": 128},
    "names": {"width": 128, "heads": 4, "narrow": 512},
}
"""Sizes of the models for each kind of data; `narrow` is the width of the narrowest perceptron."""
EVALUATED = 320
"""Held-out rows that are translated at the end of a run."""
DIGITS_OF_NUMBERS = 3
LONGEST = 64
"""Tokens of a target; a token is a byte."""
MODELS = ("dense", "sparse", "families", "dealt", "wide", "deep")
TEXTS, TOKENS = 64, 24
"""Texts that are decoded at once, and tokens of each."""


def families_of(data: str) -> dict[str, str]:
    """Languages by the family that they are counted to."""
    return NUMBERS if data == "numbers" else NAMES


def languages_of(data: str) -> tuple[str, ...]:
    """All languages, in the order of their labels."""
    return tuple(sorted(code for codes in families_of(data).values() for code in codes.split()))


def stack_changes(name: str, data: str) -> dict[str, Any]:
    """Changes of both sides of `marian-moe-tiny` that make a model of it."""
    sizes, families, codes = SIZES[data], families_of(data), languages_of(data)
    dense = {"experts": 0, "experts_per_token": 1, "mlp_width": sizes["narrow"]}
    sparse = {**dense, "experts": len(families)}
    given = {**sparse, "router": "given", "labels": len(codes)}
    own: dict[str, dict[str, Any]] = {
        "dense": dense,
        "sparse": sparse,
        "families": {
            **given,
            "expert_of": [
                next(n for n, each in enumerate(families.values()) if code in each.split()) for code in codes
            ],
        },
        "dealt": {**given, "expert_of": [place % len(families) for place in range(len(codes))]},
        "wide": {**dense, "mlp_width": len(families) * sizes["narrow"]},
        "deep": {**dense, "depth": 4},
    }
    return {"width": sizes["width"], "heads": sizes["heads"], "depth": 2, **own[name]}


def write_rows(data: str, folder: Path) -> Path:
    """The rows of the data as tables, of which that of held-out ones has `EVALUATED`, evenly taken."""
    languages = languages_of(data)
    content = numbers("translation", (DIGITS, *languages)) if data == "numbers" else names(languages)
    folder.mkdir(parents=True, exist_ok=True)
    for split, part in zip(("train", "val"), content.parts):
        rows = [row for row in part if isinstance(row, TextRow) and len(row.texts[1].encode()) < LONGEST]
        if data == "numbers":
            rows = [row for row in rows if len(row.texts[0].rpartition(" ")[2]) <= DIGITS_OF_NUMBERS]
        if split == "val":
            rows = random.Random(0).sample(rows, min(EVALUATED, len(rows)))
        lines = ["\t".join((*row.texts, row.label or "")) for row in rows]
        (folder / f"{split}.tsv").write_text(
            "\n".join(["source\ttarget\tlanguage", *lines]), encoding="utf-8"
        )
    return folder


def settings(name: str, data: str, rows: Path, seed: int, steps: int, output: Path) -> RunConfig:
    """The run of a model."""
    sides = {
        f"model.{side}.{field}": value
        for side in ("encoder", "decoder")
        for field, value in stack_changes(name, data).items()
    }
    more = {
        "model": "marian-moe-tiny", "model.decoder_sequence": LONGEST, "seed": seed, "recipe.steps": steps,
        "recipe.lr": 3e-3, "data.source": f"pairs:{rows}", "data.columns": ["source", "target", "language"],
        "output": str(output),
    }  # fmt: skip
    return load_run(overrides={**more, **sides})


def trained(config: RunConfig) -> dict[str, Any]:
    """What a run reached; made or continued if it is not complete."""
    output = Path(config.output)
    file = output / "metrics.jsonl"
    if not (file.exists() and any(record["event"] == "summary" for record in read_metrics(file))):
        train(config)
    last = [record for record in read_metrics(file) if record["event"] == "evaluation"][-1]
    reached = {name: last[name] for name in ("chrf", "exact_match", "loss")} | {"unseen": last["samples"]}
    if (output / "experts").is_dir():
        reached["largest_over_mean_load"] = [imbalance(row) for row in read_loads(output).totals]
    return reached


class Contestant:
    """A trained model whose speeds are measured."""

    def __init__(self, output: Path) -> None:
        config = load(RunConfig, file=output / "run.toml")
        task, none = Translation(), torch.device("cpu")
        rows = {split: task.open(config.data, config.model, split) for split in ("train", "val")}
        tokenizer = tokenizer_of(rows["val"])
        prepare = PrepareTranslation(tokenizer, 0.0, labelled=config.model.graph.labelled)
        self.batch = prepare(first_samples(rows["train"], config.plan.micro_batch), none)
        self.built = build(config.model, config.plan, recipe=config.recipe, loss=task)
        self.model: Any = create(config.model)
        load_weights(self.model, str(output / "export"))
        self.model.eval()
        inputs = prepare(first_samples(rows["val"], TEXTS), none).inputs
        routes = inputs[7] if config.model.graph.routed else None
        self.prompts = Prompts.translating(inputs[0], inputs[2], tokenizer.start, routes=routes)

    def step(self) -> float:
        """Tokens of a training step."""
        self.built.step([self.batch])
        return self.batch.tokens

    def decode(self) -> float:
        """Tokens that are made for `TEXTS` texts, whatever they say."""
        sample(self.model, self.prompts, Decoding(max_tokens=TOKENS, ignore_end=True), ends=())
        return TEXTS * TOKENS


def speeds(contestants: dict[str, Contestant], rounds: int = 15) -> dict[str, dict[str, float]]:
    """Tokens per second of processor time, of each model in training and in decoding: medians of rounds in which all
    take turns."""
    seconds: dict[str, dict[str, list[float]]] = {
        name: {"training": [], "decoding": []} for name in contestants
    }
    for turn in range(rounds + 1):
        for name, one in contestants.items():
            for kind, work in (("training", one.step), ("decoding", one.decode)):
                begun = time.process_time()
                tokens = work()
                if turn:  # the first one warms up
                    seconds[name][kind].append((time.process_time() - begun) / tokens)
    return {
        name: {f"{kind}_tokens_per_second": 1.0 / statistics.median(each) for kind, each in kinds.items()}
        for name, kinds in seconds.items()
    }


def summary(results: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Means over seeds with their standard deviations, and the differences from `dense` seed by seed."""
    told: dict[str, Any] = {}
    for name, runs in results.items():
        told[name] = {}
        for metric in ("chrf", "exact_match", "loss"):
            values = np.array([run[metric] for run in runs])
            differences = values - np.array([run[metric] for run in results["dense"][: len(runs)]])
            told[name][metric] = {
                "mean": float(values.mean()),
                "deviation": float(values.std(ddof=1)) if len(values) > 1 else None,
                "over_dense": [round(float(one), 6) for one in differences],
            }
    return told


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--data", choices=tuple(SIZES), default="numbers")
    parser.add_argument("--models", nargs="+", default=MODELS, help="NAME or NAME:SEEDS, dense among them")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=350)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    rows = write_rows(options.data, options.runs / "rows")
    asked = dict(model.partition(":")[::2] for model in options.models)
    seeds = {name: int(own or options.seeds) for name, own in asked.items()}
    if not seeds.keys() <= set(MODELS) or seeds.get("dense", 0) < max(seeds.values()):
        parser.error(f"--models takes some of {', '.join(MODELS)}, with dense, which has the most seeds.")
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in seeds}
    for seed in range(max(seeds.values())):
        # In turn, so that a machine that grows slower does so for all.
        for name in (name for name, count in seeds.items() if seed < count):
            config = settings(name, options.data, rows, seed, options.steps, options.runs / f"{name}-{seed}")
            results[name].append(trained(config))
            print(name, seed, json.dumps(results[name][-1]), flush=True)
    first = {name: options.runs / f"{name}-0" for name in seeds}
    measured = speeds({name: Contestant(output) for name, output in first.items()})
    models = {}
    for name, output in first.items():
        config = load(RunConfig, file=output / "run.toml")
        work = totals(config.model)
        models[name] = {
            "model": title(config.model),
            "experts": stacks(config.model)[0].experts,
            "parameters": work.parameters,
            "flops_per_token": work.model_flops / sum(config.model.graph.lengths),
            **measured[name],
        }
    data = {
        "data": options.data, "seeds": seeds, "steps": options.steps, "families": families_of(options.data),
        "models": models, "summary": summary(results), "runs": results, "environment": environment(),
    }  # fmt: skip
    options.output.write_text(json.dumps(data, indent=1) + "\n")
    print(json.dumps({"models": models, "summary": data["summary"]}, indent=1))


if __name__ == "__main__":
    main()
