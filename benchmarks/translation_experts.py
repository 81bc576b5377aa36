"""Dense, sparse and hard-gated translators between 26 languages, at equal FLOPs of a token and at equal parameters.

    python benchmarks/translation_experts.py --runs runs/experts --output translation_experts.json

| model | perceptrons | what it shares with `dense` |
|---|---|---|
| dense | one of 512 features | |
| sparse | 4 experts of 512, a learned router sends a token to one | FLOPs but for the router; more parameters |
| families | the same, the target language's family chooses (`FAMILIES`) | FLOPs; parameters of sparse |
| dealt | the same, languages are dealt to experts without regard to families | FLOPs; parameters of sparse |
| wide | one of 2,048 features | parameters of sparse; more FLOPs |

All train on the same samples in the same order, with as many steps. Quality is that of names that were held out in all
languages. Training speed is the median of the run's logs; decoding speed is measured at the end, all models in turn, so
that a busy machine slows all alike. A run in --runs that is complete is not made again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.config.decoding import Decoding
from penstock.config.load import load
from penstock.config.model import stacks, title
from penstock.config.recipes import load_run
from penstock.config.run import RunConfig
from penstock.data.text.names import LANGUAGES
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

CODES = tuple(sorted(LANGUAGES))
FAMILIES = {
    "Indo-European and Malagasy": "af en fr mg",
    "Bantu": "ki lg ln nd rn sn sw xh zu",
    "Afro-Asiatic": "am ha om so ti",
    "other Niger-Congo and Nilotic": "ak bm ee ff ig luo wo yo",
}
"""Languages that share an expert."""
OF_FAMILY = tuple(
    next(i for i, each in enumerate(FAMILIES.values()) if code in each.split()) for code in CODES
)
DEALT = tuple(place % len(FAMILIES) for place in range(len(CODES)))
_SPARSE: dict[str, Any] = {"experts": 4, "experts_per_token": 1, "mlp_width": 512}


def _gated(expert_of: tuple[int, ...]) -> dict[str, Any]:
    return {**_SPARSE, "router": "given", "labels": len(CODES), "expert_of": list(expert_of)}


MODELS: dict[str, dict[str, Any]] = {
    "dense": {"experts": 0, "experts_per_token": 1, "mlp_width": 512},
    "sparse": _SPARSE,
    "families": _gated(OF_FAMILY),
    "dealt": _gated(DEALT),
    "wide": {"experts": 0, "experts_per_token": 1, "mlp_width": 2048},
}
"""Changes of both sides of `marian-moe-tiny`."""
TEXTS, TOKENS = 128, 16
"""Texts that are decoded at once, and tokens of each."""


def settings(name: str, seed: int, steps: int, output: Path) -> RunConfig:
    """The run of a model."""
    sides = {
        f"model.{side}.{field}": value
        for side in ("encoder", "decoder")
        for field, value in MODELS[name].items()
    }
    more = {"model": "marian-moe-tiny", "seed": seed, "recipe.steps": steps, "output": str(output)}
    return load_run(overrides={**more, **sides})


def trained(name: str, seed: int, steps: int, output: Path) -> dict[str, Any]:
    """What a run reached, and how fast; made or continued if it is not complete."""
    file = output / "metrics.jsonl"
    if not (file.exists() and any(record["event"] == "summary" for record in read_metrics(file))):
        train(settings(name, seed, steps, output))
    records = read_metrics(file)
    last = [record for record in records if record["event"] == "evaluation"][-1]
    rates = [record["tokens_per_second"] for record in records if record["event"] == "steps"]
    found = {name: last[name] for name in ("chrf", "exact_match", "loss")}
    found |= {"unseen": last["samples"], "training_tokens_per_second": statistics.median(rates)}
    if (output / "experts").is_dir():
        found["largest_over_mean_load"] = [imbalance(row) for row in read_loads(output).totals]
    return found


def opened(output: Path) -> tuple[Any, Prompts]:
    """The model of a run, and sources that it translates."""
    config = load(RunConfig, file=output / "run.toml")
    model: Any = create(config.model)
    load_weights(model, str(output / "export"))
    task = Translation()
    source = task.open(config.data, config.model, "val")
    tokenizer = tokenizer_of(source)
    prepare = PrepareTranslation(tokenizer, 0.0, labelled=config.model.graph.labelled)
    inputs = prepare(first_samples(source, TEXTS), torch.device("cpu")).inputs
    routes = inputs[7] if config.model.graph.routed else None
    return model.eval(), Prompts.translating(inputs[0], inputs[2], tokenizer.start, routes=routes)


def decoding_rates(runs: dict[str, Path], rounds: int = 7) -> dict[str, float]:
    """Tokens per second of each model, the median of rounds in which all take turns."""
    models = {name: opened(output) for name, output in runs.items()}
    decoding = Decoding(max_tokens=TOKENS, ignore_end=True)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(rounds + 1):
        for name, (model, prompts) in models.items():
            begun = time.perf_counter()
            sample(model, prompts, decoding, ends=())
            if turn:  # the first one warms up
                seconds[name].append(time.perf_counter() - begun)
    return {name: TEXTS * TOKENS / statistics.median(each) for name, each in seconds.items()}


def summary(results: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Means over seeds with their standard deviations, and the differences from `dense` seed by seed."""
    told: dict[str, Any] = {}
    for name, runs in results.items():
        told[name] = {}
        for metric in ("chrf", "exact_match", "loss"):
            values = np.array([run[metric] for run in runs])
            differences = values - np.array([run[metric] for run in results["dense"]])
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
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in MODELS}
    for seed in range(options.seeds):
        for name in MODELS:  # in turn, so that a machine that grows slower does so for all
            found = trained(name, seed, options.steps, options.runs / f"{name}-{seed}")
            results[name].append(found)
            print(name, seed, json.dumps(found), flush=True)
    first = {name: options.runs / f"{name}-0" for name in MODELS}
    rates = decoding_rates(first)
    models = {}
    for name, output in first.items():
        config = load(RunConfig, file=output / "run.toml").model
        work = totals(config)
        tokens = sum(config.graph.lengths)
        models[name] = {
            "model": title(config),
            "experts": stacks(config)[0].experts,
            "parameters": work.parameters,
            "flops_per_token": work.model_flops / tokens,
            "decoding_tokens_per_second": rates[name],
        }
    data = {
        "seeds": options.seeds, "steps": options.steps, "families": FAMILIES, "models": models,
        "summary": summary(results), "runs": results, "environment": environment(),
    }  # fmt: skip
    options.output.write_text(json.dumps(data, indent=1) + "\n")
    print(json.dumps({"models": models, "summary": data["summary"]}, indent=1))


if __name__ == "__main__":
    main()
