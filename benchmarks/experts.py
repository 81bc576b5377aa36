"""A mixture of experts on a CPU: its grouped products beside one expert after the other, transformers' and a dense MLP.

    OMP_NUM_THREADS=1 python benchmarks/experts.py --output benchmarks/results/experts_cpu.json

| contestant | what it is |
|---|---|
| ours | the mixture as it is built, with grouped products, in Penstock's kernels where the CPU has AVX-512 |
| torch | the same with torch's grouped products |
| loop | the same with one product for each expert (`Plan.experts`) |
| transformers | `MixtralSparseMoeBlock` with the same weights, eager |
| dense | a perceptron with as many FLOPs for each token: `CHOSEN` times as wide as an expert |

A *step* is a forward and a backward pass, *forward* a pass without gradients, as when text is generated. All
contestants of a cell take turns within short rounds whose order is reversed each time; times are processor time, and
ratios medians of the ratios within a round. Results of ours and of transformers' are compared first. With
`--host_memory keep` the allocator keeps freed memory, as it does under the Plan's setting of that name: gradients of
many experts are large blocks, which would be mapped again page by page in each step. Cells that --output has already
are not measured again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.config.model import PRESETS, stacks
from penstock.kernels.native_grouped import takes_grouped
from penstock.models import expert_linear as products
from penstock.models.experts import MixtureOfExperts
from penstock.models.sublayers import MLP
from penstock.process import set_host_memory
from penstock.report.record import environment

EXPERTS, TOKENS = (4, 16, 64, 128), (64, 512, 4096, 8192)
FEW = 512
"""Tokens of a forward pass at most: more come in training, or in prompts, which are as quick as its forward passes."""
WIDTH, HIDDEN, CHOSEN = 128, 256, 2
LEAST_ROUNDS, SECONDS = 5, 0.4
"""Rounds of a cell: so many, and more until they have taken so long."""
SLOW = 4.0
"""A contestant that takes so many times as long as ours after its warm-up is timed that once."""
Work = Callable[[], None]


def mixture_of(experts: int, dtype: torch.dtype) -> MixtureOfExperts:
    """A mixture of Mixtral's form."""
    changes = {"experts": experts, "experts_per_token": CHOSEN, "expert_width": HIDDEN, "balance": 0.0}
    (sizes,) = stacks(replace(PRESETS["mixtral-tiny"], width=WIDTH, **changes))
    mixture = MixtureOfExperts(sizes, sizes.layers[0])
    for parameter in mixture.parameters():
        nn.init.normal_(parameter, std=0.05)
    return mixture.to(dtype)


def transformers_of(mixture: MixtureOfExperts, dtype: torch.dtype) -> nn.Module:
    """transformers' mixture with the same weights."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=WIDTH, intermediate_size=HIDDEN, num_local_experts=mixture.experts,
        num_experts_per_tok=CHOSEN, router_jitter_noise=0.0,
    )  # fmt: skip
    config._experts_implementation = "eager"
    block = MixtralSparseMoeBlock(config).to(dtype)
    assert mixture.router is not None
    with torch.no_grad():
        block.gate.weight.copy_(mixture.router.weight)
        block.experts.gate_up_proj.copy_(mixture.up.weight)
        block.experts.down_proj.copy_(mixture.down.weight)
    return block


def contestants(experts: int, tokens: int, dtype: torch.dtype, kind: str) -> dict[str, Work]:
    """One step or forward pass of each."""
    torch.manual_seed(0)
    mixture = mixture_of(experts, dtype)
    (sizes,) = stacks(replace(PRESETS["mixtral-tiny"], width=WIDTH))
    dense = MLP(sizes, sizes.layers[0], hidden=CHOSEN * HIDDEN).to(dtype)
    theirs = transformers_of(mixture, dtype)
    x = torch.randn(1, tokens, WIDTH, dtype=dtype)
    for module in (mixture, dense, theirs):
        module.train(kind == "step")
    with torch.no_grad():
        ours, other = mixture(x), theirs(x)
        other = other[0] if isinstance(other, tuple) else other
        # Of half precision, transformers' router chooses other experts for some tokens, whose best are nearly ties.
        far = ((ours - other.view_as(ours)).abs() > 0.02 + 0.05 * ours.abs()).float().mean()
        assert far <= (0.0 if dtype == torch.float32 else 0.03), (experts, tokens, dtype, far)
    gradient = torch.randn_like(x)

    def work(module: nn.Module, way: str = "") -> Work:
        def run() -> None:
            if way:
                products.takes_grouped = takes_grouped if way == "ours" else lambda *_: False
                for linear in mixture.linears:
                    linear.plain = way == "loop"
            if kind == "forward":
                with torch.no_grad():
                    module(x)
                return
            read = x.clone().requires_grad_()
            out = module(read)
            (out[0] if isinstance(out, tuple) else out).view_as(gradient).backward(gradient)
            module.zero_grad(set_to_none=True)

        return run

    ways = {way: work(mixture, way) for way in ("ours", "torch", "loop")}
    return {**ways, "transformers": work(theirs), "dense": work(dense)}


def timed(work: Work) -> float:
    """Milliseconds of processor time, which other work on a busy machine does not lengthen."""
    start = time.process_time()
    work()
    return (time.process_time() - start) * 1e3


def race(works: dict[str, Work]) -> dict[str, Any]:
    """Milliseconds of each, and those of the others over ours."""
    for work in works.values():
        work()
    first = {name: timed(work) for name, work in works.items()}
    taken: dict[str, list[float]] = {name: [first[name]] for name in works}
    begun, turn = time.process_time(), 0
    while turn < LEAST_ROUNDS or time.process_time() - begun < SECONDS:
        for name in list(works)[:: -1 if turn % 2 else 1]:
            if first[name] < SLOW * first["ours"]:
                taken[name].append(timed(works[name]))
        turn += 1
    return {
        "rounds": turn,
        "milliseconds": {name: statistics.median(each) for name, each in taken.items()},
        "over_ours": {
            name: statistics.median([a / b for a, b in zip(each, taken["ours"])])
            for name, each in taken.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="written after each cell")
    parser.add_argument("--experts", type=int, nargs="*", default=EXPERTS)
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    parser.add_argument("--types", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--host_memory", choices=("release", "keep"), default="release")
    options = parser.parse_args()
    set_host_memory(keep=options.host_memory == "keep")
    before = json.loads(options.output.read_text()) if options.output and options.output.exists() else {}
    cells = before.get("cells", [])
    names = ("type", "pass", "experts", "tokens")
    done = {
        tuple(cell[name] for name in names)
        for cell in cells
        if cell.get("host_memory", "release") == options.host_memory
    }
    for one in itertools.product(options.types, ("step", "forward"), options.experts, options.tokens):
        dtype, kind, experts, tokens = one
        if one in done or (kind == "forward" and tokens > FEW):
            continue
        raced = race(contestants(experts, tokens, getattr(torch, dtype), kind))
        cell = dict(zip(names, one)) | {"host_memory": options.host_memory}
        cells.append({**cell, **raced})
        ratios = " ".join(f"{name} {ratio:.2f}" for name, ratio in raced["over_ours"].items())
        print(f"{dtype} {kind} {experts} experts, {tokens} tokens: {ratios}", flush=True)
        if options.output:
            data = {
                "processor": "shared with other work", "native": takes_grouped(torch.empty(0), 1, WIDTH, HIDDEN),
                "width": WIDTH, "hidden": HIDDEN, "experts_per_token": CHOSEN, "threads": torch.get_num_threads(),
                "cells": cells, "environment": environment(),
            }  # fmt: skip
            options.output.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
