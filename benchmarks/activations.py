"""Activations on one core of a CPU: torch's own, the same compiled, and Penstock's form of the tanh GELU compiled.

    python benchmarks/activations.py --output benchmarks/results/activations_cpu.json

Each adds a bias first, as a perceptron does, over 512 tokens of 3,072 features. Times are of the processor, so that
other work on the machine counts little; rounds are interleaved.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.bias_activation import gelu_tanh
from penstock.report.record import environment

ROWS, FEATURES = 512, 3072
FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_tanh, penstock": gelu_tanh,
    "silu": F.silu,
}


def biased(form: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """The activation of a sum."""
    return lambda x, bias: form(x + bias)


def measure(dtype: torch.dtype, rounds: int) -> dict[str, dict[str, float]]:
    """Median milliseconds of the forward and the backward pass of each way."""
    torch._dynamo.reset()
    ways = {f"{name}, eager": biased(form) for name, form in FORMS.items() if "penstock" not in name}
    ways |= {f"{name}, compiled": torch.compile(biased(form)) for name, form in FORMS.items()}
    x = (2 * torch.randn(ROWS, FEATURES)).to(dtype).requires_grad_()
    bias = torch.randn(FEATURES).to(dtype).requires_grad_()
    gradient = torch.randn(ROWS, FEATURES).to(dtype)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(rounds + 3):
        for name, way in ways.items():
            start = time.process_time()
            out = way(x, bias)
            middle = time.process_time()
            out.backward(gradient)
            end = time.process_time()
            if number >= 3:  # before, it is compiled
                times[name].append((middle - start, end - middle))
    return {
        name: {
            "forward_ms": 1e3 * statistics.median(one for one, _ in pairs),
            "backward_ms": 1e3 * statistics.median(one for _, one in pairs),
        }
        for name, pairs in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {
        str(dtype).removeprefix("torch."): measure(dtype, options.rounds)
        for dtype in (torch.bfloat16, torch.float32)
    }
    for dtype, ways in found.items():
        for name, one in ways.items():
            print(f"{dtype:<10}{name:<30}{one['forward_ms']:8.2f} ms{one['backward_ms']:8.2f} ms")
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps({"ms": found, "environment": environment()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
