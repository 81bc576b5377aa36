"""What the choices of a Plan that are about text gain in transformers' own modules.

    python benchmarks/transformers_text.py --output benchmarks/results/transformers_text_cpu.json

A training step of each model of `transformers_models.py`, under a Plan and with each choice on top. Forms take turns.
Of each the median over rounds is kept, and ratios are medians within a round. On a GPU the batch is --repeat times as
large.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import transformers_models
from penstock.config.plan import Plan
from penstock.ladder.measure import Bench
from penstock.ladder.own import Own
from penstock.ladder.settings import LadderConfig
from penstock.planner.prediction import predict_workload
from penstock.probe import machine_for
from penstock.report.record import environment

PLANS = {
    "cpu": ("optimizer=fused matmul=medium", "precision=O2 optimizer=fused attention=auto"),
    "cuda": ("precision=O1 optimizer=fused", "precision=O1 optimizer=fused attention=efficient"),
}
CHOICES: dict[str, tuple[dict[str, Any], ...]] = {
    "bert_classes": ({"padding": "remove"},),
    "bert_words": ({"loss": "chunked"}, {"padding": "remove"}, {"loss": "chunked", "padding": "remove"}),
    "gpt2": ({"loss": "chunked"},),
}


def raced(name: str, line: str, device: torch.device, repeat: int, rounds: int) -> dict[str, Any]:
    """Medians of a model's steps in ms, each over that without a choice, and what is predicted."""
    subject = Own(getattr(transformers_models, name), name, LadderConfig(), device)
    plan = replace(Plan.parse(line), micro_batch=subject.first.plan.micro_batch * repeat)
    settings = [replace(subject.first, plan=replace(plan, **change)) for change in ({}, *CHOICES[name])]
    bench, machine = Bench(subject), machine_for(device)
    for setting in settings:
        bench.contend(setting, 0)
        bench.timed(setting, 1)
    taken = [[bench.timed(setting, 1).wall * 1e3 for setting in settings] for _ in range(rounds)]
    forecast = [
        predict_workload(subject.workload(setting), machine, setting.plan).iteration_seconds
        for setting in settings
    ]
    return {
        "model": name, "samples": plan.micro_batch, "plan": line, "padding": subject.padding_share,
        "forms": [
            {
                "with": {key: str(value) for key, value in change.items()},
                "ms": statistics.median(round_[i] for round_ in taken),
                "faster": statistics.median(round_[0] / round_[i] for round_ in taken),
                "least": min(round_[0] / round_[i] for round_ in taken),
                "most": max(round_[0] / round_[i] for round_ in taken),
                "predicted": forecast[0] / forecast[i],
            }
            for i, change in enumerate(({}, *CHOICES[name]))
        ],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeat", type=int, default=32 if torch.cuda.is_available() else 1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    found: dict[str, Any] = {"environment": environment(), "rounds": options.rounds, "steps": []}
    for name in CHOICES:
        for line in PLANS[options.device]:
            step = raced(name, line, torch.device(options.device), options.repeat, options.rounds)
            found["steps"].append(step)
            for form in step["forms"]:
                print(
                    f"{name:14}{line:46}{json.dumps(form['with']):46}{form['ms']:9.1f}{form['faster']:7.2f}x",
                    flush=True,
                )
            options.output.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
