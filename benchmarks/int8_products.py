"""Integer matrix products of torch on a CPU, and what rounding to int8 takes, against products in bf16 and fp32.

    OMP_NUM_THREADS=1 python benchmarks/int8_products.py --output benchmarks/results/int8_products_cpu.json

For M rows of tokens, K features in and N out: the output, the gradients of inputs and of weights; then the rounding
of each tensor, eager and compiled, and linear layers in inference. Times are processor time of one thread, which leaves
out other programs. Ways take turns in rounds whose order is reversed each time; a figure is the median of its rounds. A
way is measured once where that takes ten times as long as fp32's product, and left out where this torch does not have
it.

    int_mm          torch._int_mm, with sums in 32 bits, from factors as they lie
    qlinear         torch.ops.onednn.qlinear_pointwise with laid-out weights; of signed and unsigned inputs
    lay out         torch.ops.onednn.qlinear_prepack
    dynamic         torch.ops.quantized.linear_dynamic: fp32 in and out, one scale for all rows
    weights alone   torch._weight_int8pack_mm: inputs in bf16
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.products.int8 import integer_product, rounded, scale_sums
from penstock.products.integers import Int8, Int8Weights
from penstock.products.stored import Bf16, OneDnn
from penstock.report.record import environment

SHAPES = {
    "vit-s16 up": (512, 384, 1536), "bert up": (512, 768, 3072), "bert down": (512, 3072, 768),
    "gpt2 out": (4096, 768, 768), "gpt2 up": (4096, 768, 3072),
}  # fmt: skip
TOO_SLOW = 10
Ways = dict[str, Callable[[], Any]]


def race(ways: Ways, rounds: int) -> dict[str, float]:
    """Milliseconds of each way."""
    taken: dict[str, list[float]] = {}
    for name, way in ways.items():
        try:
            way()
            taken[name] = [_seconds(way)]
        except (RuntimeError, NotImplementedError, AttributeError):
            continue
    patience = TOO_SLOW * max(taken.get("fp32", [0.1])[0], 1e-3)
    quick = [name for name, (first,) in taken.items() if first < patience]
    for turn in range(rounds - 1):
        for name in quick if turn % 2 else reversed(quick):
            taken[name].append(_seconds(ways[name]))
    return {name: 1e3 * statistics.median(each) for name, each in taken.items()}


def _seconds(way: Callable[[], Any]) -> float:
    start = time.process_time()
    way()
    return time.process_time() - start


def _integers(*shape: int) -> Tensor:
    return torch.randint(-127, 128, shape, dtype=torch.int8)


def products(m: int, k: int, n: int) -> dict[str, Ways]:
    """Ways to make each of the three products."""
    x, w, dy = torch.randn(m, k), torch.randn(n, k), torch.randn(m, n)
    hx, hw, hdy = x.bfloat16(), w.bfloat16(), dy.bfloat16()
    qx, qw, qdy = _integers(m, k), _integers(n, k), _integers(m, n)
    unsigned, scales = (qx.int() + 128).to(torch.uint8), torch.rand(n)
    onednn: Any = torch.ops.onednn
    laid_out = onednn.qlinear_prepack(qw, None)

    def qlinear(rows: Tensor, zero: int) -> Any:
        return onednn.qlinear_pointwise.default(
            rows, 1.0, zero, laid_out, scales, None, None, 1.0, 0, torch.bfloat16, "none", [], ""
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        zeros = torch.zeros(n, dtype=torch.int64)
        quantized = torch.quantize_per_channel(w, scales.double(), zeros, 0, torch.qint8)
        packed = torch.ops.quantized.linear_prepack(quantized, None)
    return {
        "output": {
            "fp32": lambda: F.linear(x, w), "bf16": lambda: F.linear(hx, hw),
            "int_mm": lambda: torch._int_mm(qx, qw.t()), "ours": lambda: integer_product(qx, qw.t()),
            "qlinear, unsigned": lambda: qlinear(unsigned, 128),
            "qlinear, signed, 16 rows": lambda: qlinear(qx[:16], 0),
            "lay out": lambda: onednn.qlinear_prepack(qw, None),
            "dynamic": lambda: torch.ops.quantized.linear_dynamic(x, packed, False),
            "weights alone, 16 rows": lambda: torch._weight_int8pack_mm(hx[:16], qw, scales.bfloat16()),
        },
        "gradient of inputs": {
            "fp32": lambda: dy @ w, "bf16": lambda: hdy @ hw, "int_mm": lambda: torch._int_mm(qdy, qw),
        },
        "gradient of weights": {
            "fp32": lambda: dy.t() @ x, "bf16": lambda: hdy.t() @ hx, "int_mm": lambda: torch._int_mm(qdy.t(), qx),
        },
    }  # fmt: skip


def beside(m: int, k: int, n: int) -> Ways:
    """Operations that int8 adds to the products, eager and compiled."""
    x, w, dy = torch.randn(m, k).bfloat16(), torch.randn(n, k), torch.randn(m, n).bfloat16()
    columns, rows = torch.rand(1, n), torch.rand(m, 1)
    sums = torch.randint(-9999, 9999, (m, n), dtype=torch.int32)
    calls: Ways = {
        "inputs": lambda: rounded(x),
        "weights": lambda: rounded(w),
        "gradients by rows": lambda: rounded(dy, factor=columns, noisy=True),
        "gradients by columns": lambda: rounded(dy, 0, factor=rows, noisy=True),
        "sums to bf16": lambda: scale_sums(sums, columns, rows, None, torch.bfloat16),
    }
    compiled: Ways = {f"{name}, compiled": torch.compile(call, dynamic=False) for name, call in calls.items()}
    return {**calls, **compiled}


class InSteps(Int8):
    """Int8 by torch's fused operation, with the rounding of rows, scales and bias around it."""

    one_pass = False


def inference(m: int, k: int, n: int) -> Ways:
    """Stored linear layers on fp32 rows."""
    linear, x = nn.Linear(k, n).requires_grad_(False), torch.randn(m, k)
    forms = {
        "fp32": OneDnn(linear),
        "bf16": Bf16(linear),
        "int8": Int8(linear),
        "int8, in steps": InSteps(linear),
        "int8 weights": Int8Weights(linear),
    }
    return {name: lambda form=form: form(x) for name, form in forms.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES], default=[*SHAPES])
    parser.add_argument("--inference", action="store_true", help="linear layers in inference alone")
    parser.add_argument("--output", type=Path, help="what is in it and is not measured now stays")
    given = parser.parse_args()
    torch.set_num_threads(1)
    stored = given.output is not None and given.output.exists()
    results: dict[str, Any] = json.loads(given.output.read_text())["results"] if stored else {}
    for name in given.shapes:
        sizes = SHAPES[name]
        found = results[name]["milliseconds"] if name in results else {}
        if not given.inference:
            found |= {part: race(ways, given.rounds) for part, ways in products(*sizes).items()}
            found["beside"] = race(beside(*sizes), given.rounds)
        for rows in (1, 128, sizes[0]):
            with torch.inference_mode():
                found[f"inference, {rows} rows"] = race(inference(rows, *sizes[1:]), given.rounds)
        results[name] = {"sizes": sizes, "milliseconds": found}
        print(f"\n{name}: {sizes}")
        for part, each in found.items():
            print(f"  {part}: " + ", ".join(f"{way} {taken:.2f}" for way, taken in each.items()), flush=True)
    if given.output:
        given.output.write_text(json.dumps({**environment(), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
