"""The loss over a vocabulary of all logits at once, as torch and as Penstock make it, and in chunks of several budgets:
time and memory of a forward and backward pass through a linear layer and cross entropy.

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
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from penstock.kernels.linear_cross_entropy import linear_cross_entropy
from penstock.report.record import environment

MIB = 1 << 20
Form = int | Literal["torch", "whole"]
FORMS: tuple[Form, ...] = ("torch", "whole", 64 * MIB, 256 * MIB)
"""Those in chunks by their budgets."""
SHAPES = {"gpt2": (768, 50257), "llama3-1b": (2048, 128256), "marian-base": (512, 58104)}
"""Width and vocabulary."""
SMOOTHING = {58104: 0.1}
"""Of labels, by vocabulary: translators are trained so."""


class Case:
    """One shape in one type."""

    def __init__(self, rows: int, width: int, words: int, dtype: torch.dtype, device: torch.device) -> None:
        torch.manual_seed(0)
        kind: dict[str, Any] = {"dtype": dtype, "device": device}
        self.x = torch.randn(rows, width, **kind).requires_grad_()
        self.weight = (torch.randn(words, width, **kind) * width**-0.5).requires_grad_()
        self.targets = torch.randint(0, words, (rows,), device=device)

    def run(self, form: Form) -> Tensor:
        """The loss; gradients are left in `x` and `weight`."""
        self.x.grad = self.weight.grad = None
        smoothing = SMOOTHING.get(len(self.weight), 0.0)
        if form == "torch":
            logits = F.linear(self.x, self.weight).float()
            loss = F.cross_entropy(logits, self.targets, reduction="sum", label_smoothing=smoothing)
        else:
            budget = None if form == "whole" else form
            loss = linear_cross_entropy(
                self.x, self.weight, None, self.targets, smoothing=smoothing, budget=budget
            )
        (loss / len(self.x)).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def seconds(self, form: Form) -> float:
        """Of one pass."""
        _wait(self.x.device)
        start = time.perf_counter()
        self.run(form)
        _wait(self.x.device)
        return time.perf_counter() - start

    def peak_bytes(self, form: Form) -> int:
        """Of tensors, beyond what there is between passes."""
        self.x.grad = self.weight.grad = None
        if self.x.is_cuda:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self.run(form)
            return torch.cuda.max_memory_allocated() - before
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would write to stderr
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            self.run(form)
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


def _name(form: Form) -> str:
    return form if isinstance(form, str) else f"{form // MIB} MiB"


def compare(case: Case, rounds: int) -> dict[str, Any]:
    """Every form, each beside torch's of the same round."""
    seconds: dict[Form, list[float]] = {form: [] for form in FORMS}
    losses = {form: float(case.run(form)) for form in FORMS}  # and warms up
    for turn in range(rounds):
        for form in FORMS if turn % 2 else reversed(FORMS):
            seconds[form].append(case.seconds(form))
    return {
        _name(form): {
            "median_ms": statistics.median(taken) * 1e3,
            "least_ms": min(taken) * 1e3,
            "times_as_fast_as_torch": statistics.median(a / b for a, b in zip(seconds["torch"], taken)),
            "peak_bytes": case.peak_bytes(form),
            "loss_differs_by": abs(losses[form] / losses["torch"] - 1),
        }
        for form, taken in seconds.items()
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
                        f"{name:>9}{one['median_ms']:10.0f} ms{one['times_as_fast_as_torch']:8.2f}×"
                        f"{one['peak_bytes'] / MIB:9.0f} MiB"
                    )
    if arguments.output:
        record = {**environment(), "rounds": arguments.rounds, "results": results}
        arguments.output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
