"""Images and texts in one space: recall, captions and translations of digits in 38 languages, by seed.

    python benchmarks/multimodal_digits.py --runs runs/multimodal --seeds 2 --output multimodal_digits_cpu.json

Each seed is one `penstock train multimodal-tiny`. A run in --runs that is complete is not made again.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from penstock.config.recipes import load_run
from penstock.data.captions import LANGUAGES, trained_pairs
from penstock.report.record import environment
from penstock.train import train
from penstock.train.metrics import read_metrics

SCORES = ("image_to_text", "text_to_image", "unseen_words", "captions", "translations", "unseen_pairs")


def evaluated(output: Path, seed: int, steps: int | None) -> dict[str, Any]:
    """The last evaluation of a run, which is made first if it is not there."""
    config = load_run(overrides={
        "model": "multimodal-tiny", "seed": str(seed), "output": str(output),
        **({} if steps is None else {"recipe.steps": str(steps)}),
    })  # fmt: skip
    file = output / "metrics.jsonl"
    records = read_metrics(file) if file.is_file() else []
    done = [r for r in records if r.get("event") == "evaluation" and r["step"] == config.recipe.steps]
    if not done:
        train(config)
        done = [record for record in read_metrics(file) if record.get("event") == "evaluation"]
    return {"seed": seed, **done[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/multimodal-digits"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    runs = [evaluated(options.runs / f"seed-{n}", n, options.steps) for n in range(options.seeds)]
    scores = {name: [run[name] for run in runs] for name in SCORES}
    alone = [one for one, pairs in zip(LANGUAGES, trained_pairs(LANGUAGES)) if not pairs.any()]
    data = {
        "chance": 0.1,
        "languages": len(LANGUAGES),
        "captions_alone": alone,
        "mean": {name: statistics.mean(values) for name, values in scores.items()},
        "deviation": {n: statistics.stdev(v) if len(v) > 1 else None for n, v in scores.items()},
        "runs": runs,
        "environment": environment(),
    }
    options.output.write_text(json.dumps(data, indent=1) + "\n")
    print(json.dumps({"mean": data["mean"], "deviation": data["deviation"]}, indent=1))


if __name__ == "__main__":
    main()
