"""The loss over a vocabulary of all logits at once, and in chunks of several budgets: time and memory of a forward and
backward pass through a linear layer and cross entropy.

    python benchmarks/linear_cross_entropy.py --threads 1 --output benchmarks/results/linear_cross_entropy_cpu.json

All forms run in one process in rounds whose order is reversed each time; ratios are medians of the ratios within a
round. Memory is that of tensors at the worst moment, beyond inputs and weights; gradients are counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from penstock.kernels.linear_cross_entropy import linear_cross_entropy
from penstock.report.record import environment

MIB = 1 << 20
BUDGETS: tuple[int | None, ...] = (None, 64 * MIB, 256 * MIB)
SHAPES = {"gpt2": (768, 50257), "llama3-1b": (2048, 128256), "marian-base": (512, 58104)}
"""Width and vocabulary."""


class Case:
    """One shape in one type."""

    def __init__(self, rows: int, width: int, words: int, dtype: torch.dtype, device: torch.device) -> None:
        torch.manual_seed(0)
        kind: dict[str, Any] = {"dtype": dtype, "device": device}
        self.x = torch.randn(rows, width, **kind).requires_grad_()
        self.weight = (torch.randn(words, width, **kind) * width**-0.5).requires_grad_()
        self.targets = torch.randint(0, words, (rows,), device=device)

    def run(self, budget: int | None) -> Tensor:
        """The loss; gradients are left in `x` and `weight`."""
        self.x.grad = self.weight.grad = None
        loss = linear_cross_entropy(self.x, self.weight, None, self.targets, budget=budget)
        (loss / len(self.x)).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def seconds(self, budget: int | None) -> float:
        """Of one pass."""
        _wait(self.x.device)
        start = time.perf_counter()
        self.run(budget)
        _wait(self.x.device)
        return time.perf_counter() - start

    def peak_bytes(self, budget: int | None) -> int:
        """Of tensors, beyond what there is between passes."""
        self.x.grad = self.weight.grad = None
        if self.x.is_cuda:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self.run(budget)
            return torch.cuda.max_memory_allocated() - before
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would write to stderr
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            self.run(budget)
        assert recorded.profiler is not None
        assert recorded.profiler.kineto_results is not None
        held = peak = 0
        events = recorded.profiler.kineto_results.events()
        for _, change in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
            held += change
            peak = max(peak, held)
        return peak


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _name(budget: int | None) -> str:
    return "whole" if budget is None else f"{budget // MIB} MiB"


def compare(case: Case, rounds: int) -> dict[str, Any]:
    """Every form, each beside the whole loss of the same round."""
    seconds: dict[int | None, list[float]] = {budget: [] for budget in BUDGETS}
    losses = {budget: float(case.run(budget)) for budget in BUDGETS}  # and warms up
    for turn in range(rounds):
        for budget in BUDGETS if turn % 2 else reversed(BUDGETS):
            seconds[budget].append(case.seconds(budget))
    return {
        _name(budget): {
            "median_ms": statistics.median(taken) * 1e3,
            "least_ms": min(taken) * 1e3,
            "times_as_fast_as_whole": statistics.median(a / b for a, b in zip(seconds[None], taken)),
            "peak_bytes": case.peak_bytes(budget),
            "loss_differs_by": abs(losses[budget] / losses[None] - 1),
        }
        for budget, taken in seconds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--shapes", nargs="+", default=["gpt2"], choices=SHAPES)
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="threads of torch; as many as there are cores by default")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    results = []
    for shape in arguments.shapes:
        for dtype in arguments.dtypes:
            for rows in arguments.rows:
                case = Case(rows, *SHAPES[shape], getattr(torch, dtype), torch.device(arguments.device))
                found = compare(case, arguments.rounds)
                results.append({"shape": shape, "dtype": dtype, "rows": rows, "forms": found})
                print(f"\n{shape}, {rows} rows, {dtype}")
                for name, one in found.items():
                    print(
                        f"{name:>9}{one['median_ms']:10.0f} ms{one['times_as_fast_as_whole']:8.2f}×"
                        f"{one['peak_bytes'] / MIB:9.0f} MiB"
                    )
    if arguments.output:
        record = {**environment(), "rounds": arguments.rounds, "results": results}
        arguments.output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
