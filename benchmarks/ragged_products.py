"""Whether products over a vocabulary gain on a CPU if rows of logits begin at whole vectors.

    python benchmarks/ragged_products.py --output benchmarks/results/ragged_products_cpu.json

The three products of a layer that makes logits, over as many rows as a batch of 512 tokens has: the logits, and the
gradients of its input and of its weight. Logits lie one after the other; or each row begins at a multiple of 64
elements (`spaced`), of which torch's products write and read the vocabulary alone; or there are so many more logits of
weights that are zero (`padded`), for which weights would have to be copied in each step, which is not counted. Times
are of the processor on one thread, so that other work on the machine counts little; rounds are interleaved.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from penstock.report.record import environment

ROWS, MULTIPLE = 512, 64
LAYERS = {"marian-base": (512, 58101), "gpt2": (768, 50257), "bert-base": (768, 30522)}
"""Features and entries of the vocabulary."""
PRODUCTS = ("logits", "gradient of the input", "gradient of the weight")


def forms(features: int, entries: int, dtype: torch.dtype) -> dict[tuple[str, str], Callable[[], Tensor]]:
    """Each product in each form, into memory that is there."""
    wide = -(-entries // MULTIPLE) * MULTIPLE
    x, into_x = torch.randn(ROWS, features).to(dtype), torch.empty(ROWS, features, dtype=dtype)
    weight = torch.randn(wide, features).to(dtype)
    weight[entries:] = 0.0
    calls: dict[tuple[str, str], Callable[[], Tensor]] = {}
    for form, size, columns in (
        ("plain", entries, entries), ("spaced", wide, entries), ("padded", wide, wide),
    ):  # fmt: skip
        out = torch.empty(ROWS, size, dtype=dtype)[:, :columns]
        given = torch.randn(ROWS, size).to(dtype)[:, :columns]
        w, into_w = weight[:columns], torch.empty(columns, features, dtype=dtype)
        calls[PRODUCTS[0], form] = lambda w=w, out=out: torch.mm(x, w.t(), out=out)
        calls[PRODUCTS[1], form] = lambda w=w, given=given: torch.mm(given, w, out=into_x)
        calls[PRODUCTS[2], form] = lambda into_w=into_w, given=given: torch.mm(given.t(), x, out=into_w)
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = []
    for model, (features, entries) in LAYERS.items():
        for dtype in (torch.bfloat16, torch.float32):
            calls = forms(features, entries, dtype)
            taken: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
            for turn in range(-1, options.rounds):
                for key in list(calls)[:: -1 if turn % 2 else 1]:
                    start = time.process_time()
                    calls[key]()
                    if turn >= 0:
                        taken[key].append(time.process_time() - start)
            for product in PRODUCTS:
                plain = taken[product, "plain"]
                gains = {
                    form: statistics.median(a / b for a, b in zip(plain, taken[product, form], strict=True))
                    for form in ("spaced", "padded")
                }
                ms = 1e3 * statistics.median(plain)
                name = str(dtype).removeprefix("torch.")
                cases.append(
                    {"model": model, "dtype": name, "product": product, "plain_ms": ms, "gains": gains}
                )
                words = ", ".join(f"{form} {gain:.3f}x" for form, gain in gains.items())
                print(f"{model:12} {name:9} {product:23} {ms:7.1f} ms  {words}", flush=True)
    if options.output:
        record = {
            "clock": "processor time of one thread; rounds interleaved, medians", "rounds": options.rounds,
            "rows": ROWS, "cases": cases, "environment": environment(),
        }  # fmt: skip
        options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
