"""Compares the speed of two versions of Penstock, to see what a refactoring cost or gained.

    git worktree add ../before v0.1.0
    python benchmarks/two_versions.py ../before/src src --output benchmarks/results/two_versions_cpu.json

Each version is measured in processes of its own, which take turns: before, after, after, before, … so that
drift of the machine cancels. A ratio is that of one pair of turns; the table shows median and quartiles.
Above 1 the second version is faster. The workload uses only what both versions have.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from penstock.report.record import environment

TIMED = """
import json, statistics, sys, time
import torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
found = {}

def timed(step, times, warm=2):
    for _ in range(warm):
        step()
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        step()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)
"""
WORK = (
    TIMED
    + """
import penstock
from penstock.build import build
from penstock.data import Batch

images, targets = torch.randn(4, 3, 96, 96), torch.randint(0, 1000, (4,))
batch = (images, targets)
from dataclasses import replace
model = replace(penstock.PRESETS["vit-ti16"], image_size=96)
LINES = {
    "step O0 loop": "micro_batch=4",
    "step O0 fused": "optimizer=fused matmul=medium micro_batch=4",
    "step O1 fused": "precision=O1 optimizer=fused micro_batch=4",
    "step O2 fused": "precision=O2 optimizer=fused micro_batch=4",
    "step O3 contiguous": "precision=O3 optimizer=contiguous micro_batch=4",
    "step recompute full": "recompute=full optimizer=fused micro_batch=4",
}
for name, line in LINES.items():
    built = build(model, penstock.Plan.parse(line))
    found[name] = timed(lambda: built.step([batch]), 12)

def mine(level):
    net = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.LayerNorm(1024), nn.Linear(1024, 10))
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    net, optimizer = penstock.accelerate(net, optimizer, precision=level)
    x, y = torch.randn(64, 256), torch.randint(0, 10, (64,))
    def step():
        loss = F.cross_entropy(net(x), y)
        with penstock.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
    return step

for level in ("O1", "O2"):
    found[f"accelerate {level}"] = timed(mine(level), 60, 10)

machine = penstock.load_machine("h100")
vit, gpt = penstock.PRESETS["vit-b16"], getattr(penstock, "TRANSFORMERS", penstock.PRESETS)["gpt-22b"]
one = penstock.Plan.parse("precision=O1 optimizer=fused compile=blocks micro_batch=64")
many = penstock.Plan.parse("precision=O2 optimizer=fused compile=blocks attention=flash tp=8 pp=2 dp=4 accumulate=32")
found["predict one device"] = timed(lambda: [penstock.predict(vit, machine, one) for _ in range(20)], 30) / 20
found["predict a layout"] = timed(lambda: [penstock.predict(gpt, machine, many) for _ in range(20)], 30) / 20
found["search 64 devices"] = timed(lambda: penstock.search(gpt, machine, 64, global_batch=512), 3, 1)
print(json.dumps(found))
"""
)
WHOLE = (
    TIMED
    + """
from dataclasses import replace
import penstock
from penstock.build import build
from language_train import batch_of, by_plan

images, targets = torch.randn(8, 3, 224, 224), torch.randint(0, 1000, (8,))
built = build(penstock.PRESETS["vit-s16"], penstock.Plan.parse("matmul=medium optimizer=fused micro_batch=8"))
found["vit-s16 8 images"] = timed(lambda: built.step([(images, targets)]), 5, 1)
for name, samples, length in (("gpt2", 1, 256), ("bert-base", 2, 128)):
    model = replace(penstock.PRESETS[name], sequence=length)
    plan = penstock.Plan.parse(f"matmul=medium optimizer=fused micro_batch={samples}")
    step = by_plan(model, batch_of(model, samples, torch.device("cpu")), torch.device("cpu"), plan)
    found[f"{name} {samples} x {length} tokens"] = timed(lambda: step(1), 5, 1)
print(json.dumps(found))
"""
)
"""The steps that `vit_train.py` and `language_train.py` time, by a Plan each."""
STARTS = {
    "import penstock": [sys.executable, "-c", "import penstock"],
    "penstock --help": [sys.executable, "-m", "penstock", "--help"],
    "penstock train --help": [sys.executable, "-m", "penstock", "train", "--help"],
}


def turn(source: Path, *, whole: bool) -> dict[str, float]:
    """All figures of one version, seconds each."""
    paths = os.pathsep.join(map(str, (source, source.parent / "benchmarks")))
    environment = {**os.environ, "PYTHONPATH": paths}
    found = {}
    for name, words in ({} if whole else STARTS).items():
        taken = []
        for _ in range(3):
            began = time.perf_counter()
            subprocess.run(words, env=environment, check=True, stdout=subprocess.DEVNULL)
            taken.append(time.perf_counter() - began)
        found[name] = min(taken)
    done = subprocess.run(
        [sys.executable, "-c", WHOLE if whole else WORK],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    return found | json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, help="folder that holds the package of the first version")
    parser.add_argument("after", type=Path, help="the same of the second version")
    parser.add_argument("--whole", action="store_true", help="only steps of whole models, seconds each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    sources = {"before": options.before.resolve(), "after": options.after.resolve()}
    turns: dict[str, list[dict[str, float]]] = {"before": [], "after": []}
    for number in range(options.rounds):
        for version in ("before", "after") if number % 2 == 0 else ("after", "before"):
            turns[version].append(turn(sources[version], whole=options.whole))
            print(f"round {number + 1}: {version} measured", file=sys.stderr)
        if options.output:  # after each round, so that an interrupted call keeps what it measured
            record = {"rounds": number + 1, "figures": table_of(turns), "environment": environment()}
            options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for name, row in table_of(turns).items():
        low, high = row["quartiles"]
        print(
            f"{name:24} {1e3 * row['before_seconds']:10.3f} ms {1e3 * row['after_seconds']:10.3f} ms   "
            f"{row['ratio']:5.2f}× ({low:.2f} to {high:.2f})"
        )


def table_of(turns: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Median seconds of each version and quartiles of the ratio within a round, by figure."""
    table = {}
    for name in turns["before"][0]:
        ratios = [old[name] / new[name] for old, new in zip(turns["before"], turns["after"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else 3 * ratios
        seconds = {
            f"{version}_seconds": statistics.median(one[name] for one in rows)
            for version, rows in turns.items()
        }
        table[name] = {**seconds, "ratio": middle, "quartiles": [low, high]}
    return table


if __name__ == "__main__":
    main()
