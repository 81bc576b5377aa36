"""Dropout that draws 16 bits for each element in all threads, beside the form without a C++ compiler, which draws in
one, and torch's: by itself, forward and backward, and in training steps.

    python benchmarks/dropout.py --threads 2 --output benchmarks/results/dropout_cpu.json
    python benchmarks/dropout.py --threads 1 --output benchmarks/results/dropout_one_thread_cpu.json

All run in one process in rounds whose order is reversed each time; ratios are medians of the ratios within a round. A
step is that of `benchmarks/language_train.py`, eager, with a dropout of 0.1. Times of one thread are of the
processor, so that other work on the machine counts little.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from language_train import SEQUENCE, batch_of, by_plan, sized
from penstock.config.model import PRESETS
from penstock.config.plan import Plan
from penstock.kernels import attention, dropout
from penstock.report.record import environment

SHAPES = ((512, 768), (4096, 768), (96, 512, 512))
"""Tokens of GPT-2 and their features, and attention weights."""
OURS = dropout.dropout
PLAN = "precision=O3 matmul=medium optimizer=fused attention=auto host_memory=keep"


def without_kernel(x: Tensor, p: float, training: bool = True) -> Tensor:
    """Ours as it is where there is no C++ compiler."""
    with patch.object(dropout, "library", lambda _: None):
        return OURS(x, p, training)


WAYS: dict[str, Callable[..., Tensor]] = {"ours": OURS, "without_kernel": without_kernel, "torch": F.dropout}


@contextmanager
def drawn_by(draw: Callable[..., Tensor]) -> Iterator[None]:
    """Models draw their dropout so."""
    dropout.dropout = attention.dropout = draw
    yield
    dropout.dropout = attention.dropout = OURS


def raced(work: Callable[[Callable[..., Tensor]], float], rounds: int) -> dict[str, Any]:
    """Seconds of the work each way, and how many times as fast it is with ours."""
    taken: dict[str, list[float]] = {name: [] for name in WAYS}
    for draw in WAYS.values():  # warm up
        work(draw)
    for turn in range(rounds):
        for name in list(WAYS)[:: -1 if turn % 2 else 1]:
            taken[name].append(work(WAYS[name]))
    result: dict[str, Any] = {f"{name}_seconds": statistics.median(every) for name, every in taken.items()}
    for name, key in (("torch", "times_as_fast"), ("without_kernel", "times_as_fast_as_without_kernel")):
        ratios = [theirs / mine for mine, theirs in zip(taken["ours"], taken[name])]
        result |= {key: statistics.median(ratios), f"{key}_between": [min(ratios), max(ratios)]}
    return result


def alone(
    shape: tuple[int, ...], dtype: torch.dtype, clock: Callable[[], float]
) -> Callable[[Callable[..., Tensor]], float]:
    """A forward and a backward pass through dropout alone."""
    x, gradient = torch.randn(shape, dtype=dtype).requires_grad_(), torch.randn(shape, dtype=dtype)

    def work(draw: Callable[..., Tensor]) -> float:
        start = clock()
        draw(x, 0.1, True).backward(gradient)
        x.grad = None
        return clock() - start

    return work


def step(name: str, tokens: int, clock: Callable[[], float]) -> Callable[[Callable[..., Tensor]], float]:
    """A training step of a preset."""
    config = sized(PRESETS[name], SEQUENCE[tokens])
    batch = batch_of(config, tokens // SEQUENCE[tokens], torch.device("cpu"))
    run = by_plan(config, batch, torch.device("cpu"), Plan.parse(PLAN))

    def work(draw: Callable[..., Tensor]) -> float:
        with drawn_by(draw):
            start = clock()
            run(1)
            return clock() - start

    return work


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, help="of torch; as many as there are cores by default")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--models", nargs="*", default=["gpt2", "bert-base", "marian-base"])
    parser.add_argument("--tokens", type=int, default=512, choices=SEQUENCE)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    found: list[dict[str, Any]] = []
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            count = torch.Size(shape).numel()
            one = raced(alone(shape, dtype, clock), options.rounds)
            each = {f"{name}_ns": 1e9 * one[f"{name}_seconds"] / count for name in WAYS}
            found.append({"shape": shape, "dtype": str(dtype), **one, **each})
            print(f"{shape} {dtype}: " + ", ".join(f"{key} {value:.2f}" for key, value in each.items()))
    for name in options.models:
        one = raced(step(name, options.tokens, clock), options.rounds)
        found.append({"model": name, "tokens": options.tokens, "plan": PLAN, **one})
        print(
            f"{name}: {one['ours_seconds']:.3f} s a step, {one['times_as_fast']:.3f} times as fast as with torch's, "
            f"{one['times_as_fast_as_without_kernel']:.3f} times as without the kernel"
        )
    if options.output:
        record = {**environment(), "threads": torch.get_num_threads(), "cases": found}
        options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
