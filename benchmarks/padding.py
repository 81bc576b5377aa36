"""What leaving padding out of attention gains on a CPU, beside attention that keeps it.

    python benchmarks/padding.py --output benchmarks/results/padding_cpu.json

Samples have lengths drawn evenly between two bounds, and are padded to the longest. Attention of 12 heads of 64
features, forward and backward: with padding put back and a mask, and from sample to sample. Then a whole step of
BERT-base on pairs of number words: padding kept, left out but for attention, and left out. Forms take turns. Of each
the median over rounds is kept, and ratios are medians within a round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.config.load import load
from penstock.config.plan import AttentionBackend, Plan
from penstock.kernels.attention import Scores, split_heads, token_attention
from penstock.kernels.choices import UNPADDED_MEAN
from penstock.kernels.documents import Documents
from penstock.kernels.padding import Real, Unpadded, within
from penstock.ladder.measure import Bench
from penstock.ladder.own import subject_of
from penstock.ladder.settings import LadderConfig
from penstock.models.masks import added
from penstock.planner.prediction import predict_workload
from penstock.probe import machine_for
from penstock.report.record import environment

HEADS, WIDTH = 12, 64
LENGTHS = ((64, 4, 32), (32, 8, 64), (8, 16, 128), (32, 8, 128), (32, 16, 384), (8, 64, 512))
"""Samples, and the bounds of their lengths."""
TYPES: tuple[tuple[torch.dtype, AttentionBackend], ...] = (
    (torch.float32, "sdpa"), (torch.float32, "plain"), (torch.bfloat16, "plain"), (torch.bfloat16, "sdpa"),
)  # fmt: skip
PLANS = ("baseline", "precision=O2 optimizer=fused attention=auto")


def race(forms: dict[str, Callable[[], float]], rounds: int) -> dict[str, Any]:
    """Milliseconds of each form, and how much faster the last is than the others."""
    taken: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(rounds):
        for name, form in forms.items():
            taken[name].append(form() * 1e3)
    last = taken[list(forms)[-1]]
    ratios = {f"over {name}": statistics.median(map(lambda a, b: a / b, taken[name], last)) for name in forms}
    return {**{name: statistics.median(times) for name, times in taken.items()}, **ratios}


def attention_of(
    samples: int, low: int, high: int, dtype: torch.dtype, backend: AttentionBackend
) -> dict[str, Any]:
    """Both forms of one case."""
    generator = torch.Generator().manual_seed(samples + high)
    lengths = torch.randint(low, high + 1, (samples,), generator=generator)
    tokens = int(lengths.max())
    real = Real.of(lengths, torch.arange(tokens), sequence_first=False)
    assert real is not None
    mask = added(within(lengths, tokens), dtype)
    alone = Documents.of(Unpadded(real, lengths.tolist(), varlen=False), causal=False)
    packed = torch.randn(1, len(real.rows), 3 * HEADS * WIDTH, dtype=dtype).requires_grad_()
    gradient = torch.randn(1, len(real.rows), HEADS * WIDTH).to(dtype)

    def attend(x: Tensor, sight: Any) -> Tensor:
        q, k, v = split_heads(x, WIDTH)
        return token_attention(q, k, v, backend, sequence_first=False, scores=Scores(sight))

    def timed(form: Callable[[], Tensor]) -> Callable[[], float]:
        def once() -> float:
            start = time.perf_counter()
            form().backward(gradient)  # type: ignore[no-untyped-call]
            packed.grad = None
            return time.perf_counter() - start

        return once

    forms = {
        "padded": timed(lambda: real.take(attend(real.put(packed), mask))),
        "sample by sample": timed(lambda: attend(packed, alone)),
    }
    race(forms, 2)
    return {
        "samples": samples, "lengths": [low, high], "mean": float(lengths.float().mean()),
        "dtype": str(dtype).removeprefix("torch."), "attention": backend, "ms": race(forms, 20),
    }  # fmt: skip


def step_of(line: str) -> dict[str, Any]:
    """A step of BERT-base under a Plan, with each way to treat padding, and what is predicted."""
    device = torch.device("cpu")
    given = {"model": "bert-base", "task": "pairs", "batch": 16}
    subject = subject_of(load(LadderConfig, overrides=given, origin="this benchmark"), None, device)
    kept = replace(subject.first, plan=replace(Plan.parse(line), micro_batch=16))
    removed = replace(kept, plan=replace(kept.plan, padding="remove"))
    bench, usual = Bench(subject), dict(UNPADDED_MEAN)
    for setting in (kept, removed):
        bench.contend(setting, 0)

    def padded_attention() -> float:
        UNPADDED_MEAN.update(dict.fromkeys(usual, 1 << 30))
        try:
            return bench.timed(removed, 1).wall
        finally:
            UNPADDED_MEAN.update(usual)

    forms = {
        "padding kept": lambda: bench.timed(kept, 1).wall,
        "but for attention": padded_attention,
        "left out": lambda: bench.timed(removed, 1).wall,
    }
    machine = machine_for(device)
    predicted = [
        predict_workload(subject.workload(setting), machine, setting.plan).iteration_seconds
        for setting in (kept, removed)
    ]
    return {
        "model": "bert-base, 16 pairs", "plan": line, "padding": subject.padding_share, "ms": race(forms, 7),
        "predicted over padding kept": predicted[0] / predicted[1],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    found: dict[str, Any] = {"environment": environment(), "attention": [], "steps": []}
    for lengths in LENGTHS:
        for dtype, backend in TYPES:
            found["attention"].append(attention_of(*lengths, dtype, backend))
            print(json.dumps(found["attention"][-1]), flush=True)
    for line in PLANS:
        found["steps"].append(step_of(line))
        print(json.dumps(found["steps"][-1]), flush=True)
    options.output.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
