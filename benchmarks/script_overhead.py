"""The overhead of `penstock run`, compared with the three lines that it replaces.

    OMP_NUM_THREADS=1 python benchmarks/script_overhead.py --output benchmarks/results/script_overhead_cpu.json

The training step has 24 residual blocks of width 32 (168 parameters), so small that the host dominates, not
arithmetic. `three lines` calls penstock.accelerate and scale_loss; `run` is plain code under `Interception`.
Each contestant has its own model in one process. They take turns in rounds, with the order reversed each
time, and ratios are medians of the ratios within a round. Times are processor time, which a busy machine
lengthens least. `graph` is the time of the look through the autograd graph in an fp16 step, once per backward
pass.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.report.record import environment
from penstock.script import Interception
from penstock.script.backward import leaves_behind

STEPS = 5


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gate = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.down(F.gelu(self.up(self.norm(x))))


def _pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(32) for _ in range(24)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def plain(dtype: str) -> Callable[[], None]:
    model, optimizer = _pair()
    x = torch.randn(8, 32)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def three_lines(level: str, dtype: str) -> Callable[[], None]:
    model, optimizer = penstock.accelerate(*_pair(), precision=level, dtype=dtype)
    x = torch.randn(8, 32)

    def step() -> None:
        optimizer.zero_grad()
        with penstock.scale_loss(model(x).square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    return step


def under_run(level: str, dtype: str) -> Callable[[], None]:
    interception = Interception(precision=level, dtype=dtype, say=lambda _: None)
    step: list[Callable[[], None]] = []

    def inside() -> None:
        with interception:
            if not step:
                step.append(plain(dtype))
            step[0]()

    # Steps are timed inside one interception, as in a script; see `seconds`.
    inside.interception, inside.step = interception, step  # type: ignore[attr-defined]
    inside()
    return inside


def seconds(step: Any) -> float:
    """Processor seconds of one step."""
    interception = getattr(step, "interception", None)
    if interception is not None:
        interception.install()
        step = step.step[0]
    try:
        start = time.process_time()
        for _ in range(STEPS):
            step()
        return (time.process_time() - start) / STEPS
    finally:
        if interception is not None:
            interception.remove()


def compare(level: str, dtype: str, rounds: int) -> dict[str, Any]:
    steps = {"three lines": three_lines(level, dtype), "run": under_run(level, dtype)}
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 2):
        for name in list(steps)[:: 1 if turn % 2 else -1]:
            found = seconds(steps[name])
            if turn >= 2:
                taken[name].append(found)
    ratios = sorted(b / a for a, b in zip(taken["three lines"], taken["run"]))
    return {
        "level": level,
        "dtype": dtype,
        "milliseconds": {name: statistics.median(times) * 1e3 for name, times in taken.items()},
        "ratio": statistics.median(ratios),
        "quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
    }


def graph_milliseconds() -> float:
    model, _ = _pair()
    loss = model(torch.randn(8, 32)).square().mean()
    start = time.process_time()
    for _ in range(50):
        leaves_behind([loss.grad_fn])
    return (time.process_time() - start) / 50 * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = [
        compare(level, dtype, arguments.rounds)
        for level, dtype in (("O1", "bf16"), ("O2", "bf16"), ("O1", "fp16"), ("O2", "fp16"))
    ]
    result = {
        "command": "OMP_NUM_THREADS=1 python benchmarks/script_overhead.py",
        "environment": environment(),
        "rounds": arguments.rounds,
        "steps_per_round": STEPS,
        "graph_milliseconds": graph_milliseconds(),
        "contestants": found,
    }
    for one in found:
        print(
            f"{one['level']} {one['dtype']}: {one['milliseconds']['three lines']:.2f} ms by three lines, "
            f"{one['milliseconds']['run']:.2f} ms under run, ratio {one['ratio']:.3f} {one['quartiles']}"
        )
    print(f"graph: {result['graph_milliseconds']:.2f} ms")
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
