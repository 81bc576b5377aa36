"""Attention of small models on a CPU: Penstock's plain form beside torch's kernel, forward and backward.

    python benchmarks/small_heads.py --output benchmarks/results/small_heads_cpu.json

Heads of 16 features, as in models for digits, up to 64. Times are of the processor on one thread, so that other work on
the machine counts little; the forms take turns. A ratio above 1 means that torch's kernel, the default, is faster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Literal

import torch

from penstock.kernels.attention import Scores, attention
from penstock.report.record import environment

# Samples, heads, tokens, features of a head, and whether attention is causal.
SHAPES = (
    (64, 4, 17, 16, False), (8, 4, 17, 16, False), (64, 4, 65, 16, False), (16, 4, 32, 16, True),
    (32, 4, 65, 32, False), (8, 4, 64, 32, True), (64, 3, 50, 64, False), (8, 3, 50, 64, False),
    (8, 6, 65, 64, False), (8, 6, 197, 64, False), (16, 8, 32, 64, False), (8, 12, 128, 64, False),
    (8, 12, 128, 64, True),
)  # fmt: skip
FORMS: tuple[Literal["plain", "sdpa"], ...] = ("plain", "sdpa")
WORK = 4e7
"""Multiplications of one turn, about."""


def measured(shape: tuple[int, int, int, int, bool], rounds: int) -> dict[str, float]:
    """Median milliseconds of each form, and the median ratio of plain to torch's within a round."""
    samples, heads, tokens, features, causal = shape
    q, k, v = (
        torch.randn(samples, tokens, heads, features).transpose(1, 2).requires_grad_() for _ in range(3)
    )
    calls = max(1, int(WORK / (samples * heads * tokens * tokens * features)))
    taken: dict[str, list[float]] = {form: [] for form in FORMS}
    for turn in range(rounds + 1):
        for form in FORMS if turn % 2 else FORMS[::-1]:
            began = time.process_time()
            for _ in range(calls):
                attention(q, k, v, form, Scores(causal=causal)).sum().backward()
            if turn:  # the first one warms up
                taken[form].append((time.process_time() - began) / calls)
    ratios = [plain / theirs for plain, theirs in zip(*taken.values(), strict=True)]
    row = {f"{form}_milliseconds": 1e3 * statistics.median(times) for form, times in taken.items()}
    return row | {"plain_over_torch": statistics.median(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows = []
    for shape in SHAPES:
        rows.append({"shape": shape, **measured(shape, options.rounds)})
        print(rows[-1], flush=True)
    if options.output:
        names = ("samples", "heads", "tokens", "features of a head", "causal")
        record = {"shape": names, "rounds": options.rounds, "rows": rows, "environment": environment()}
        options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
