"""Generation on a GPU against transformers' `generate`, eager and compiled, and vLLM if it is installed: seconds of a
batch of texts, side by side.

    python benchmarks/generate_gpu.py --models gpt2,marian-base --output benchmarks/results/generate_h200.json

As `generate.py`, whose models and prompts these are, but in one process: what is compiled stays on the GPU. All ways
compute in bf16 and take turns in rounds whose order is reversed each time. vLLM reads the same folder in a process of
its own (`generate_vllm.py`), gets the same tokens and makes as many, greedily; without it a cell says why.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from generate import Case
from generate_vllm import Vllm, obstacle
from penstock.report.record import environment


def seconds(run: Callable[[], Any], device: str) -> float:
    """Seconds of one call, until the device is done."""
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    wait()
    start = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - start


def cell(case: Case, name: str, batch: int, options: argparse.Namespace, vllm: Vllm | str) -> dict[str, Any]:
    """All ways for one model and batch. One that does not work is left out, and the cell says why."""
    rows = case.prompts(batch, options.prompt)
    found: dict[str, Any] = {
        "model": name, "batch": batch, "prompt": options.prompt, "new": options.new, "type": "bf16",
        "beams": case.beams, "seconds": {}, "failed": {},
    }  # fmt: skip
    ways: dict[str, Callable[[], Any]] = {}
    for kind, make in (("penstock", case.ours), ("transformers", case.theirs)):
        for compiled in (False, True):
            way = kind + " compiled" * compiled
            try:
                run = make("bf16", rows, options.new, compiled=compiled, device=options.device)
                assert not isinstance(run, str)
                for _ in range(2):
                    seconds(run, options.device)
                ways[way], found["seconds"][way] = run, []
            except (RuntimeError, ValueError, TypeError) as error:
                found["failed"][way] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    clocks = {way: partial(seconds, run, options.device) for way, run in ways.items()}
    if isinstance(vllm, str):
        found["failed"]["vllm"] = vllm
    else:
        try:
            clock = partial(vllm.seconds, rows, options.new)
            for _ in range(2):
                clock()
            clocks["vllm"], found["seconds"]["vllm"] = clock, []
        except RuntimeError as error:
            found["failed"]["vllm"] = str(error)
    for turn in range(options.rounds):
        for way in list(clocks) if turn % 2 else reversed(list(clocks)):
            found["seconds"][way].append(clocks[way]())
    torch.compiler.reset()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="gpt2,marian-base,qwen2-0.5b", type=lambda text: text.split(","))
    parser.add_argument("--batches", default="8,32", type=lambda text: [int(one) for one in text.split(",")])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the longest prompt or source")
    parser.add_argument("--new", type=int, default=128, help="tokens to generate")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    cells: list[dict[str, Any]] = []
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            case = Case(name, Path(folder), threads=1)
            why = obstacle(options.device) or ("vllm has no beam search here" if case.beams > 1 else "")
            vllm = why or Vllm(Path(folder), options.prompt + options.new)
            for batch in options.batches:
                cells.append(cell(case, name, batch, options, vllm))
                record = {"cells": cells, "environment": environment()}
                options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
                for way, taken in cells[-1]["seconds"].items():
                    print(f"{name} × {batch} {way:<24}{1e3 * statistics.median(taken):9.0f} ms", flush=True)
                for way, words in cells[-1]["failed"].items():
                    print(f"{name} × {batch} {way:<24}{words}", flush=True)
            if isinstance(vllm, Vllm):
                vllm.close()


if __name__ == "__main__":
    main()
