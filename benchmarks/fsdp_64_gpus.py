"""The predicted gain of sharding over replicas on 64 GPUs, beside the published figure. Nothing is run.

    python benchmarks/fsdp_64_gpus.py --output benchmarks/results/fsdp_64_gpus.json

The published figure is 1.83 times the speed of the DDP baseline for a large vision transformer on 64 GPUs
(Meta AI, "Significantly faster Vision Transformer training", 2022). The accessible text does not give the
batch, precision and GPU memory of either side, so the planner predicts under several assumptions.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.config.machine import load_machine
from penstock.config.model import PRESETS
from penstock.config.plan import Plan
from penstock.planner.prediction import Prediction, predict
from penstock.report.record import environment

MODEL = "vit-h16"
GPUS = 64
PUBLISHED = 1.83
MACHINES = ("a100-40g", "a100-80g")
SHARDED = "precision=O2 dtype=fp16 optimizer=fused sharding=fsdp"
"""Half weights are gathered from fp32 shards, as in FSDP's mixed precision."""


@dataclass(frozen=True)
class Baseline:
    """Possible settings of the replicas."""

    name: str
    line: str


BASELINES = (
    Baseline("the same precision", "precision=O2 dtype=fp16 optimizer=fused"),
    Baseline("autocast", "precision=O1 dtype=fp16 optimizer=fused"),
    Baseline("autocast, no overlap", "precision=O1 dtype=fp16 optimizer=fused overlap=false"),
    Baseline("autocast, plain optimizer", "precision=O1 dtype=fp16 optimizer=loop"),
    Baseline("TF32, plain optimizer", "matmul=high optimizer=loop"),
)


def predicted(machine: str, line: str, micro_batch: int) -> Prediction:
    """One step of the model on all GPUs."""
    plan = replace(Plan.parse(line), dp=GPUS, micro_batch=micro_batch)
    return predict(PRESETS[MODEL], load_machine(machine), plan)


def largest(machine: str, line: str) -> Prediction:
    """The same with the largest micro-batch, in steps of 8, that fits."""
    fitting = [found for size in range(8, 513, 8) if (found := predicted(machine, line, size)).fits]
    return fitting[-1]


def compare(machine: str, baseline: Baseline) -> dict[str, Any]:
    """FSDP over one baseline: at its micro-batch, and with each side's largest."""
    replicas, shards = largest(machine, baseline.line), largest(machine, SHARDED)
    same = predicted(machine, SHARDED, replicas.plan.micro_batch)
    return {
        "machine": machine,
        "baseline": baseline.name,
        "same_micro_batch": same.samples_per_second / replicas.samples_per_second,
        "largest_micro_batch": shards.samples_per_second / replicas.samples_per_second,
        "ddp": _side(replicas),
        "fsdp_same": _side(same),
        "fsdp_largest": _side(shards),
    }


def _side(found: Prediction) -> dict[str, Any]:
    return {
        "plan": found.plan.line(),
        "samples_per_second": found.samples_per_second,
        "memory_bytes": found.memory_bytes,
        "seconds": found.seconds,
    }


def results() -> list[dict[str, Any]]:
    """Every machine with every baseline."""
    return [compare(machine, baseline) for machine in MACHINES for baseline in BASELINES]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    found = results()
    for row in found:
        print(
            f"{row['machine']}  {row['baseline']:<26} same micro-batch {row['same_micro_batch']:.2f}×  "
            f"largest {row['largest_micro_batch']:.2f}×"
        )
    record = {**environment(), "model": MODEL, "gpus": GPUS, "published": PUBLISHED, "results": found}
    arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
