"""Costs and gains of the levels of mixed precision: whole training steps, beside a bare loop.

    OMP_NUM_THREADS=1 python benchmarks/precision_levels.py --model vit-s16 --batch 8 --compile \
        --output benchmarks/results/precision_levels_vit_s16_cpu.json
    python benchmarks/precision_levels.py --model vit-h16 --batch 64 --compile
    python benchmarks/precision_levels.py --model gpt-1.5b --batch 8 --compile --levels bare O0 O1-bf16 O2-bf16

The bare loop is what one writes without a library: fp32 with the fast setting of its matrix products, torch's
fused AdamW, no clipping. Every other contestant is the same loop with the three lines; `bare-autocast` is
autocast to bf16 by hand. All have the same weights and batch, and take turns in one process, in an order that
is reversed each round; ratios are medians of the ratios within a round. On a CPU with one thread the ratios
use the process's own processor time, which other processes affect little. Bytes are those of the tensors that
persist between steps, and the peak within a step.

What does not run on this machine (fp8 without units for it) is reported and left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from eight_bits import SHAPES, SMOKE, Block, Shape
from penstock.config.model import PRESETS
from penstock.config.plan import Plan
from penstock.config.tasks import require_vision
from penstock.errors import PenstockError
from penstock.ladder.trace import TensorMemory
from penstock.models import create
from penstock.precision import matmul_precision
from penstock.probe import machine_for
from penstock.report.record import environment

WARM_UP = 3
BARE = "bare"
STACKS = {shape.name: shape for shape in (*SHAPES, *SMOKE) if shape.causal}
DEPTH = {"gpt-1.5b": 48, "smoke-causal": 2}

# name → precision, dtype, overrides; the bare loops are not levels
LEVELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "O0": ("O0", "auto", {}),
    "O1-bf16": ("O1", "bf16", {}),
    "O1-fp16": ("O1", "fp16", {}),
    "O2-bf16": ("O2", "bf16", {}),
    "O2-fp16": ("O2", "fp16", {}),
    "O3-bf16": ("O3", "bf16", {}),
    "O1-fp8-tensorwise": ("O1", "bf16", {"products": "fp8_tensorwise"}),
    "O1-fp8-rowwise": ("O1", "bf16", {"products": "fp8"}),
}
# the planner's names
PLANS = {
    "O0": "precision=O0",
    "O1-bf16": "precision=O1",
    "O1-fp16": "precision=O1 dtype=fp16",
    "O2-bf16": "precision=O2",
    "O2-fp16": "precision=O2 dtype=fp16",
    "O3-bf16": "precision=O3",
    "O1-fp8-tensorwise": "precision=O1 products=fp8_tensorwise",
}

Step = Callable[[], Tensor]
"""One training step, for its detached loss."""


@dataclass
class Contestant:
    """A loop, and what was measured of it."""

    name: str
    step: Step
    held: Callable[[], list[Tensor]]
    seconds: list[float] = field(default_factory=list)
    wall_seconds: list[float] = field(default_factory=list)
    held_bytes: int = 0
    peak_bytes: int = 0
    first_loss: float = 0.0


class Stack(nn.Module):
    """A decoder's blocks with a norm and a head, without embedding: inputs are (B, N, D) already."""

    def __init__(self, shape: Shape, depth: int, classes: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(shape) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(shape.width), nn.Linear(shape.width, classes)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, -1]))  # type: ignore[no-any-return]


def task(name: str, batch: int, device: torch.device) -> tuple[Callable[[], nn.Module], Tensor, Tensor]:
    """How to make the model, and one batch for it."""
    generator = torch.Generator().manual_seed(0)
    if name in STACKS:
        shape = STACKS[name]
        inputs = torch.randn(batch, shape.tokens, shape.width, generator=generator)
        classes = 16
        make: Callable[[], nn.Module] = lambda: Stack(shape, DEPTH[name], classes)  # noqa: E731
    else:
        config = require_vision(PRESETS[name])
        inputs = torch.randn(
            batch, config.channels, config.image_size, config.image_size, generator=generator
        )
        classes = config.classes
        make = lambda: create(config)  # noqa: E731
    targets = torch.randint(0, classes, (batch,), generator=generator)
    return make, inputs.to(device), targets.to(device)


def enter(
    name: str, make: Callable[[], nn.Module], inputs: Tensor, targets: Tensor, *, compiled: bool
) -> Contestant:
    """A contestant with fresh weights."""
    device = inputs.device
    torch.manual_seed(0)
    model = make().to(device).train()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    bare = name.startswith(BARE)
    if not bare:
        precision, dtype, overrides = LEVELS[name]
        model, optimizer = penstock.accelerate(
            model, optimizer, precision=precision, dtype=dtype, **overrides
        )
    if compiled:
        model.compile()
    half = name == "bare-autocast"
    fast = "high" if device.type == "cuda" else "medium"

    def step() -> Tensor:
        with matmul_precision(fast):  # type: ignore[arg-type]
            with torch.autocast(device.type, dtype=torch.bfloat16) if half else nullcontext():
                outputs = model(inputs)
            loss = F.cross_entropy(outputs.float(), targets)
            if bare:
                loss.backward()
            else:
                with penstock.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def held() -> list[Tensor]:
        tensors = [*model.parameters(), *model.buffers()]
        tensors += [p for group in optimizer.param_groups for p in group["params"]]
        tensors += [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
        return tensors

    return Contestant(name, step, held)


def bytes_of(tensors: list[Tensor]) -> int:
    """Bytes of their storages, each counted once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def warm(contestant: Contestant, inputs: Tensor, targets: Tensor) -> None:
    """Compile and warm up; then measure the peak memory of one step."""
    device = inputs.device
    contestant.first_loss = float(contestant.step())
    for _ in range(WARM_UP):
        contestant.step()
    contestant.held_bytes = bytes_of(contestant.held())
    if device.type == "cuda":
        wait(device)
        torch.cuda.reset_peak_memory_stats(device)
        others = torch.cuda.memory_allocated(device) - contestant.held_bytes
        contestant.step()
        wait(device)
        contestant.peak_bytes = torch.cuda.max_memory_allocated(device) - others
    else:
        with TensorMemory(held=contestant.held(), ignored=[inputs, targets]) as memory:
            contestant.step()
        contestant.peak_bytes = memory.peak


def timed(contestant: Contestant, steps: int, device: torch.device) -> None:
    wait(device)
    wall, thread = time.perf_counter(), time.thread_time()
    for _ in range(steps):
        contestant.step()
    wait(device)
    took = time.perf_counter() - wall
    contestant.wall_seconds.append(took / steps)
    one_thread = device.type == "cpu" and torch.get_num_threads() == 1
    contestant.seconds.append((time.thread_time() - thread if one_thread else took) / steps)


def predicted(name: str, batch: int, device: torch.device) -> dict[str, float]:
    """Predicted milliseconds per step of each level; None for a stack without a model configuration."""
    if name not in PRESETS:
        return {}
    machine = machine_for(device)
    fast = "high" if device.type == "cuda" else "medium"
    said = {}
    for level, line in PLANS.items():
        try:
            plan = Plan.parse(f"{line} matmul={fast} optimizer=fused micro_batch={batch}")
            said[level] = 1e3 * penstock.predict(PRESETS[name], machine, plan).iteration_seconds
        except PenstockError as error:
            print(f"no prediction of {level}: {error}")
    return said


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="vit-s16", choices=sorted([*PRESETS, *STACKS]))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--levels", nargs="+", default=[BARE, "bare-autocast", *LEVELS])
    parser.add_argument("--compile", action="store_true", help="compile every contestant's model")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=1, help="steps timed in a round")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    make, inputs, targets = task(options.model, options.batch, device)
    entered: list[Contestant] = []
    left_out = {}
    for name in dict.fromkeys([BARE, *options.levels]):
        try:
            contestant = enter(name, make, inputs, targets, compiled=options.compile)
            warm(contestant, inputs, targets)
            entered.append(contestant)
        except (PenstockError, torch.OutOfMemoryError) as error:
            left_out[name] = str(error)
            print(f"left out: {name}: {error}", flush=True)
        gc.collect()
    for turn in range(options.rounds):
        for contestant in entered if turn % 2 else reversed(entered):
            timed(contestant, options.steps, device)
    said = predicted(options.model, options.batch, device)
    rows = [_row(one, entered[0], said) for one in entered]
    print(
        f"{'':20}{'ms':>10}{'bare ÷':>9}{'predicted':>11}{'held MiB':>10}{'peak MiB':>10}{'first loss':>12}"
    )
    for row in rows:
        thought = row["predicted_speedup_over_O0"]
        print(
            f"{row['name']:20}{row['ms_per_step']:10.2f}{row['speedup_over_bare']['median']:9.3f}"
            f"{thought if thought is None else round(thought, 3)!s:>11}"
            f"{row['held_bytes'] / 2**20:10.1f}{row['peak_bytes'] / 2**20:10.1f}{row['first_loss']:12.5f}"
        )
    if options.output:
        settings = {k: v for k, v in vars(options).items() if k != "output"} | {
            "threads": torch.get_num_threads(),
            "clock": "processor time of one thread"
            if entered[0].seconds != entered[0].wall_seconds
            else "wall",
        }
        document = {
            "settings": settings,
            "contestants": rows,
            "left_out": left_out,
            "environment": environment(),
        }
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _row(one: Contestant, bare: Contestant, said: dict[str, float]) -> dict[str, Any]:
    ratios = [theirs / mine for theirs, mine in zip(bare.seconds, one.seconds, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return {
        "name": one.name,
        "ms_per_step": 1e3 * statistics.median(one.seconds),
        "wall_ms_per_step": 1e3 * statistics.median(one.wall_seconds),
        "speedup_over_bare": {"median": middle, "quartiles": [low, high]},
        "predicted_ms_per_step": said.get(one.name),
        "predicted_speedup_over_O0": said["O0"] / said[one.name] if {"O0", one.name} <= said.keys() else None,
        "held_bytes": one.held_bytes,
        "peak_bytes": one.peak_bytes,
        "first_loss": one.first_loss,
    }


if __name__ == "__main__":
    main()
