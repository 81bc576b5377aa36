"""Penstock's GPU kernels beside eager torch, its compiler and other libraries: forward and backward, in one go.

    python benchmarks/kernels_gpu.py --minutes 25 --output benchmarks/results/kernels_h100.json
    python benchmarks/kernels_gpu.py --dry

What is timed is the compiled caller of a kernel, not the kernel alone. Baselines are torch's operators, eager and
compiled by default and with max-autotune; attention in cuDNN; for the loss of a large vocabulary Inductor's
auto-chunker and `F.linear_cross_entropy`; QuACK and Liger where they are installed. A way that does not run is listed
with its error.

Sections take turns, their most telling shapes first, so that all have some when the time is over. The ways of one cell
are measured in rounds whose order is reversed each time, each call with a cold cache; figures are medians. `--dry` goes
through everything on a CPU with tiny shapes, uncompiled, with a clock that always says a millisecond.

Transformer, BERT, GPT-2 and ViT are the models of LightSeq (Wang et al., SC 2022) in its batches: training steps in
fp16, eager, compiled, and as Penstock trains. The versions of torch and Triton are in `environment`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from language_train import batch_of, by_plan, sized
from penstock.config.model import PRESETS, ViTConfig
from penstock.config.plan import Plan
from penstock.kernels.adamw import Batch, Hyper, adamw_
from penstock.kernels.linear_cross_entropy import linear_cross_entropy
from penstock.kernels.residual_norm import add_norm, seed_of
from penstock.models import create
from penstock.optim.clip import clipping_divisor, grad_norm
from penstock.report.record import environment
from vit_train import penstock_loop

Run = Callable[[], Any]
GIB = 1 << 30
ROUNDS = 5
OURS = "penstock"
HELD = 24 * GIB
"""Bytes of fp32 logits up to which a way that holds them all is tried."""


class CudaClock:
    """Seconds of a call on the GPU, whose cache is filled with something else before."""

    def __init__(self) -> None:
        self.other = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
        self.ahead = 10_000_000
        """Cycles, about 5 ms: more than the host takes for a call, but for one of a whole step."""

    def __call__(self, run: Run) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.other.zero_()
        torch.cuda._sleep(
            self.ahead
        )  # so that the host is ahead, as in a step: launches are no part of a kernel
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3


def fake_clock(run: Run) -> float:
    """A millisecond, whatever the call takes."""
    run()
    return 1e-3


@dataclass
class Bench:
    """Where and how everything is measured."""

    device: torch.device
    clock: Callable[[Run], float]
    dry: bool

    def compiled(
        self, function: Callable[..., Any], mode: str | None = None, **config: Any
    ) -> Callable[..., Any]:
        """A function compiled for its shapes, with settings of Inductor; itself in a dry run."""
        if self.dry:
            return function
        made = torch.compile(function, mode=mode, dynamic=False)
        if not config:
            return made
        import torch._inductor.config as inductor

        def run(*inputs: Any) -> Any:
            with inductor.patch(config):
                return made(*inputs)

        return run

    def drawn(self, *sizes: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> Tensor:
        return torch.randn(sizes, device=self.device, dtype=dtype).requires_grad_(grad)

    def gradients(self, function: Callable[..., Any], leaves: list[Tensor], into: list[Tensor]) -> Run:
        """A forward and a backward pass under given gradients of the results."""

        def run() -> None:
            made = function(*leaves)
            made = made if isinstance(made, tuple) else (made,)
            torch.autograd.grad(made, leaves, into)

        return run


@dataclass
class Cell:
    """One shape, and the ways to compute it."""

    section: str
    shape: dict[str, Any]
    ways: dict[str, Callable[[], Run]]
    """Makes each way when its turn comes."""
    bytes: int = 0
    """Moved at the least, forward and backward."""
    flops: int = 0
    milliseconds: dict[str, list[float]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def measure(self, bench: Bench) -> None:
        runs: dict[str, Run] = {}
        for name, make in self.ways.items():
            try:
                run = make()
                for _ in range(3):
                    bench.clock(run)
                runs[name], self.milliseconds[name] = run, []
            except Exception as error:  # a library that is not there, or a shape that it does not take
                self.failed[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
        for turn in range(ROUNDS):
            for name in list(runs) if turn % 2 else reversed(list(runs)):
                self.milliseconds[name].append(1e3 * bench.clock(runs[name]))
        torch.compiler.reset()

    def report(self, copied: float) -> dict[str, Any]:
        """Plain values; `copied` are the bytes per second of a copy."""
        medians = {name: statistics.median(times) for name, times in self.milliseconds.items()}
        others = {name: time for name, time in medians.items() if not name.startswith(OURS)}
        mine = min((time for name, time in medians.items() if name.startswith(OURS)), default=None)
        best = min(others, key=lambda name: others[name], default=None)
        return {
            "section": self.section, **self.shape, "milliseconds": medians,
            "spread": {name: [min(times), max(times)] for name, times in self.milliseconds.items()},
            "failed": self.failed, "bytes": self.bytes, "flops": self.flops, "best_other": best,
            "speedup": None if mine is None or best is None else others[best] / mine,
            "copy_share": self.bytes / (mine * 1e-3) / copied if mine and self.bytes else None,
        }  # fmt: skip


# -- dropout, residual and norm


def norms(bench: Bench) -> Iterator[Cell]:
    shapes = [
        (16384, 4096),
        (16384, 768),
        (16384, 8192),
        (4096, 1024),
        (65536, 2048),
        (1024, 4096),
        (65536, 768),
    ]
    for rows, columns in [(8, 16)] if bench.dry else shapes:
        for kind, p in (("layer", 0.1), ("rms", 0.0)):
            yield norm_cell(bench, rows, columns, kind, p)


def norm_cell(bench: Bench, rows: int, columns: int, kind: str, p: float) -> Cell:
    x, residual = (bench.drawn(rows, columns, grad=True) for _ in range(2))
    weight, bias = (bench.drawn(columns, grad=True) for _ in range(2))
    into = [bench.drawn(rows, columns) for _ in range(2)]
    leaves = [x, residual, weight, bias] if kind == "layer" else [x, residual, weight]

    def plain(
        x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        total = residual + F.dropout(x, p)
        if kind == "layer":
            return F.layer_norm(total, (columns,), weight, bias), total
        return F.rms_norm(total, (columns,), weight, 1e-5), total

    def ours(
        x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        kept, scale = seed_of(x.device, p) if p else (None, 1.0)
        total, normed = add_norm(residual, x, weight, bias, 1e-5, rms=kind != "layer", kept=kept, scale=scale)
        return normed, total

    def liger(
        x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        from liger_kernel.transformers.functional import liger_fused_add_rms_norm, liger_layer_norm

        if kind == "layer":
            total = residual + F.dropout(x, p)
            return liger_layer_norm(total, weight, bias, 1e-5), total
        return liger_fused_add_rms_norm(x, residual, weight, 1e-5)  # type: ignore[no-any-return]

    def quack(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        from quack import rmsnorm

        return rmsnorm(x, weight, residual=residual, eps=1e-5, prenorm=True)  # type: ignore[no-any-return]

    made = partial(bench.gradients, leaves=leaves, into=into)
    ways: dict[str, Callable[[], Run]] = {
        "eager": lambda: made(plain),
        "compiled": lambda: made(bench.compiled(plain)),
        "compiled max-autotune": lambda: made(bench.compiled(plain, "max-autotune-no-cudagraphs")),
        OURS: lambda: made(bench.compiled(ours)),
        "liger": lambda: made(liger),
    }
    if kind == "rms":
        ways["quack"] = lambda: made(quack)
    moved = (4 + (5 if p else 4)) * rows * columns * 2
    return Cell("norm", {"rows": rows, "columns": columns, "kind": kind, "dropout": p}, ways, moved)


# -- the loss of a large vocabulary


def losses(bench: Bench) -> Iterator[Cell]:
    shapes = [
        (8192, 4096, 131072), (8192, 768, 50257), (16384, 2048, 131072), (1024, 8192, 262144), (65536, 768, 32768),
        (65536, 4096, 262144), (1024, 768, 32768),
    ]  # fmt: skip
    for rows, width, words in [(12, 8, 30)] if bench.dry else shapes:
        yield loss_cell(bench, rows, width, words)


def loss_cell(bench: Bench, rows: int, width: int, words: int) -> Cell:
    x, weight = bench.drawn(rows, width, grad=True), bench.drawn(words, width, grad=True)
    targets = torch.randint(0, words, (rows,), device=bench.device)
    into = [torch.ones((), device=bench.device)]

    def whole(x: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight).float(), targets)

    def held() -> None:
        if 4 * rows * words > HELD:
            raise MemoryError(f"logits take {4 * rows * words / GIB:.0f} GiB in fp32")

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(x, weight, None, targets, budget=GIB) / rows

    def of_torch(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear_cross_entropy(x, weight, targets)  # type: ignore[attr-defined,no-any-return]

    def liger(x: Tensor, weight: Tensor) -> Tensor:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        return liger_fused_linear_cross_entropy(x, weight, targets)  # type: ignore[no-any-return]

    def quack(x: Tensor, weight: Tensor) -> Tensor:
        from quack.linear_cross_entropy import chunked_linear_cross_entropy

        return chunked_linear_cross_entropy(x, weight, targets)  # type: ignore[no-any-return]

    def made(function: Callable[..., Any], *, holds: bool = False) -> Run:
        if holds:
            held()
        return bench.gradients(lambda *leaves: function(*leaves).float(), [x, weight], into)

    ways: dict[str, Callable[[], Run]] = {
        "eager": lambda: made(whole, holds=True),
        "compiled": lambda: made(bench.compiled(whole), holds=True),
        "compiled auto-chunker": lambda: made(bench.compiled(whole, **{"auto_chunker.enable": True})),
        "torch linear_cross_entropy": lambda: made(of_torch),
        OURS: lambda: made(bench.compiled(ours)),
        "liger": lambda: made(liger),
        "quack": lambda: made(quack),
    }
    shape = {"rows": rows, "width": width, "words": words}
    return Cell("loss", shape, ways, flops=6 * rows * width * words)


# -- the optimizer


def optimizers(bench: Bench) -> Iterator[Cell]:
    named = {"gpt2": PRESETS["gpt2"], "llama3-1b": PRESETS["llama3-1b"]}
    for name, config in named.items():
        sizes = [5, 300] if bench.dry else [p.numel() for p in create(config, device="meta").parameters()]
        yield optimizer_cell(bench, name, sizes)


def optimizer_cell(bench: Bench, name: str, sizes: list[int]) -> Cell:
    def tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
        return [bench.drawn(size, dtype=dtype).mul_(0.01) for size in sizes]

    gradients = tensors()
    scale, found = torch.ones((), device=bench.device), torch.zeros((), device=bench.device)

    def of_torch() -> Run:
        weights, averages, copies = tensors(), tensors(), tensors(torch.bfloat16)
        parameters = [torch.nn.Parameter(weight) for weight in weights]
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = gradient
        optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)

        def run() -> None:
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, scale)
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            torch._foreach_lerp_(averages, weights, 1e-4)
            torch._foreach_copy_(copies, weights)

        return run

    def ours() -> Run:
        batch = Batch(
            tensors(), gradients, tensors(), [t.abs() for t in tensors()],
            [torch.zeros((), device=bench.device) for _ in sizes], tensors(torch.bfloat16), tensors(),
        )  # fmt: skip
        hyper = Hyper(1e-4, 0.9, 0.999, 1e-8, 0.01)

        def run() -> None:
            norm = grad_norm(gradients)
            divisor = clipping_divisor(norm, 1.0, scale)
            adamw_(batch, hyper, form="auto", grad_scale=divisor, found_inf=found, average_part=1e-4)

        return run

    moved = sum(sizes) * (4 + 16 + 12 + 2 + 8)
    return Cell("adamw", {"model": name, "elements": sum(sizes)}, {"torch": of_torch, OURS: ours}, moved)


# -- attention, which is torch's: which of its kernels pays


def attentions(bench: Bench) -> Iterator[Cell]:
    shapes = [(128, 12, 197, 64), (8, 16, 4096, 128)]
    for shape in [(2, 2, 8, 16)] if bench.dry else shapes:
        leaves = [bench.drawn(*shape, grad=True) for _ in range(3)]
        kinds = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}
        kinds[OURS + " attention=cudnn"] = SDPBackend.CUDNN_ATTENTION
        if bench.dry:
            kinds = dict.fromkeys(kinds, SDPBackend.MATH)

        def way(kind: SDPBackend, leaves: list[Tensor] = leaves) -> Run:
            # Not compiled: compiled code keeps the kernel of its first call, whichever is asked for later.
            run = bench.gradients(F.scaled_dot_product_attention, leaves, [leaves[0].detach()])

            def inside() -> None:
                with sdpa_kernel(kind):
                    run()

            return inside

        ways: dict[str, Callable[[], Run]] = {name: partial(way, kind) for name, kind in kinds.items()}
        samples, heads, count, features = shape
        flops = 14 * samples * heads * count * count * features
        yield Cell("attention", {"shape": list(shape)}, ways, flops=flops)


# -- LightSeq's models


def models(bench: Bench) -> Iterator[Cell]:
    if bench.dry:
        yield model_cell(bench, "marian-tiny", 16, 8)
        yield vit_cell(bench, "vit-digits", 2)
        return
    # So many tokens in texts of 32, or texts of 128, or of 1,024.
    yield model_cell(bench, "marian-base", 4096, 32)
    yield model_cell(bench, "bert-base", 32 * 128, 128)
    yield vit_cell(bench, "vit-b32", 128)
    yield model_cell(bench, "gpt2-large", 4096, 1024)
    for tokens in (512, 15000 // 32 * 32, 1024, 8192, 2048):
        yield model_cell(bench, "marian-base", tokens, 32)
    for samples in (8, 256, 16, 128, 64):
        yield model_cell(bench, "bert-base", samples * 128, 128)


def plans(bench: Bench, **options: Any) -> dict[str, Plan]:
    """Steps in fp16 as they come, compiled, and with what Penstock adds."""
    if bench.dry:
        return {"eager fp16": Plan(**options), OURS: Plan(optimizer="contiguous", **options)}
    plain = Plan(precision="O1", dtype="fp16", optimizer="fused", **options)
    compiled = replace(plain, compile="whole")
    best = replace(plain, precision="O2", loss="chunked", compile="blocks", optimizer="contiguous")
    return {
        "eager fp16": plain,
        "compiled fp16": compiled,
        OURS: best,
        OURS + " attention=cudnn": replace(best, attention="cudnn"),
    }


def model_cell(bench: Bench, name: str, tokens: int, sequence: int) -> Cell:
    config = sized(PRESETS[name], sequence)

    def way(plan: Plan) -> Run:
        batch = batch_of(config, tokens // sequence, bench.device)
        step = by_plan(config, batch, bench.device, plan)
        return lambda: step(1)

    ways: dict[str, Callable[[], Run]] = {
        name: partial(way, plan) for name, plan in plans(bench, micro_batch=tokens // sequence).items()
    }
    return Cell("step", {"model": name, "tokens": tokens, "sequence": sequence}, ways)


def vit_cell(bench: Bench, name: str, samples: int) -> Cell:
    config = PRESETS[name]
    assert isinstance(config, ViTConfig)

    def way(plan: Plan) -> Run:
        size = config.image_size
        images = torch.rand(samples, config.channels, size, size, device=bench.device)
        labels = torch.randint(0, config.classes, (samples,), device=bench.device)
        step = penstock_loop(config, plan, bench.device)(0)
        return lambda: step(images, labels)

    ways: dict[str, Callable[[], Run]] = {
        name: partial(way, plan) for name, plan in plans(bench, micro_batch=samples).items()
    }
    return Cell("step", {"model": name, "samples": samples}, ways)


SECTIONS = (norms, losses, optimizers, attentions, models)


def in_turns(bench: Bench) -> Iterator[Cell]:
    """The first cell of each section, then the second of each, and so on."""
    for row in zip_longest(*(section(bench) for section in SECTIONS)):
        yield from (cell for cell in row if cell is not None)


def copy_rate(bench: Bench) -> float:
    """Bytes per second that a copy of a GiB reads and writes."""
    x = torch.empty(1 << 10 if bench.dry else GIB, dtype=torch.int8, device=bench.device)
    y = torch.empty_like(x)
    return 2 * len(x) / min(bench.clock(lambda: y.copy_(x)) for _ in range(10))


def table(cells: list[dict[str, Any]]) -> str:
    """One line for each cell: the fastest other way, and how many times as fast ours is."""
    lines = [
        f"{'section':14} {'shape':44} {'ours, ms':>9} {'best other':>28} {'ms':>9} {'times':>6} {'copy':>6}"
    ]
    for cell in cells:
        known = {
            "section",
            "milliseconds",
            "spread",
            "failed",
            "bytes",
            "flops",
            "best_other",
            "speedup",
            "copy_share",
        }
        shape = " ".join(f"{value}" for name, value in cell.items() if name not in known)
        times = cell["milliseconds"]
        mine = min((value for name, value in times.items() if name.startswith(OURS)), default=float("nan"))
        best, share = cell["best_other"], cell["copy_share"]
        lines.append(
            f"{cell['section']:14} {shape[:44]:44} {mine:9.3f} {best or '—':>28} {times.get(best, float('nan')):9.3f} "
            f"{cell['speedup'] or float('nan'):6.2f} {'' if share is None else f'{share:6.0%}':>6}"
        )
    return "\n".join(lines)


def main(words: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=25.0, help="no cell begins after 85 %% of these")
    parser.add_argument("--output", type=Path)
    parser.add_argument(
        "--dry", action="store_true", help="tiny shapes on a CPU, and a clock that is not one"
    )
    options = parser.parse_args(words)
    end = time.monotonic() + 51 * options.minutes
    if options.dry:
        bench = Bench(torch.device("cpu"), fake_clock, True)
    elif torch.cuda.is_available():
        bench = Bench(torch.device("cuda"), CudaClock(), False)
    else:
        raise SystemExit("There is no GPU here; add --dry to go through the script on a CPU.")
    copied = copy_rate(bench)
    report: dict[str, Any] = {"environment": environment(), "copy_bytes_per_second": copied, "cells": []}
    for cell in in_turns(bench):
        if time.monotonic() > end:
            report["ended_before"] = {"section": cell.section, **cell.shape}
            break
        cell.measure(bench)
        report["cells"].append(cell.report(copied))
        cell.ways.clear()  # and with them the tensors
        if options.output:
            options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"torch {torch.__version__}, copy {copied / 1e9:.0f} GB/s")
    print(table(sorted(report["cells"], key=lambda cell: str(cell["section"]))))
    return report


if __name__ == "__main__":
    main()
