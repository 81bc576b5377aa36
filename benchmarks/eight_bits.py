"""Products in 8 bits compared with bf16: linear layers and blocks of Transformers, forward and backward.

    python benchmarks/eight_bits.py --output benchmarks/results/eight_bits_h100.json
    OMP_NUM_THREADS=1 python benchmarks/eight_bits.py --device cpu --machine machine.json --rounds 7 \\
        --output benchmarks/results/eight_bits_cpu.json

Measured are forward and backward passes under autocast to bf16 over fp32 weights (`--weights bfloat16` for half
weights), of each linear layer of a block by itself and of a block: norm, attention (SDPA), norm, perceptron, with
residuals. A GPU runs ViT-B/L/H and a decoder of 1.5 billion parameters, with fp8 and int8; a CPU ViT-S, BERT-base and
GPT-2, with int8, in processor time of one thread, which leaves out other programs, and fp32 beside them. Everything is
compiled unless `--eager` is given, because the cost of scaling and casting depends on fusion. Contestants take turns in
rounds whose order is reversed each time; ratios are medians of the ratios within a round. Where 8 bits are slower, the
table says so. With a Machine of `penstock probe`, the planner's forecast for the block is beside it.

On a machine without fp8, `--emulate` shows only that the program runs; its speed means nothing.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.config.formats import PRODUCTS
from penstock.config.machine import Machine, load_machine
from penstock.config.model import preset
from penstock.config.plan import Plan
from penstock.planner.describe import describe
from penstock.planner.price import seconds
from penstock.planner.rates import rates_of
from penstock.products.convert import convert_linears
from penstock.report.record import environment

WARM_UP = 3
REFERENCE = "bf16"
WAYS: dict[str, tuple[str, ...]] = {
    "cuda": (REFERENCE, "fp8_tensorwise", "fp8", "int8", "int8_all"),
    "cpu": (REFERENCE, "fp32", "int8", "int8_all"),
}


@dataclass(frozen=True)
class Shape:
    """One model's block, and how many samples of how many tokens it is given."""

    name: str
    width: int
    mlp: int
    heads: int
    tokens: int
    samples: int
    causal: bool = False

    def linears(self) -> dict[str, tuple[int, int]]:
        """Features in and out of each linear layer of the block."""
        return {
            "qkv": (self.width, 3 * self.width),
            "out": (self.width, self.width),
            "up": (self.width, self.mlp),
            "down": (self.mlp, self.width),
        }


SHAPES = (
    Shape("vit-b16", 768, 3072, 12, 197, 128),
    Shape("vit-l16", 1024, 4096, 16, 197, 64),
    Shape("vit-h14", 1280, 5120, 16, 257, 64),
    Shape("gpt-1.5b", 1600, 6400, 25, 1024, 16, causal=True),
)
CPU_SHAPES = (
    Shape("vit-s16", 384, 1536, 6, 197, 8),
    Shape("bert-base", 768, 3072, 12, 128, 8),
    Shape("gpt2", 768, 3072, 12, 1024, 1, causal=True),
)
SMOKE = (Shape("smoke", 32, 64, 2, 5, 3), Shape("smoke-causal", 32, 64, 2, 8, 2, causal=True))


class Block(nn.Module):
    """A pre-norm Transformer block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.causal = shape.heads, shape.causal
        self.norm1, self.norm2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        for name, (features, out) in shape.linears().items():
            self.add_module(name, nn.Linear(features, out))

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, n, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


@dataclass
class Contestant:
    """One way to multiply."""

    name: str
    module: nn.Module
    run: Callable[[Tensor], Tensor]
    seconds: list[float] = field(default_factory=list)


def contestants(module: nn.Module, arguments: argparse.Namespace, device: torch.device) -> list[Contestant]:
    """Each way to multiply, on copies of one module."""
    module = module.to(device=device, dtype=getattr(torch, arguments.weights))
    found = []
    for name in WAYS[device.type]:
        # Two equal blocks around the converted layers, because conversion looks for a model's repeated
        # blocks.
        model = nn.ModuleList([nn.ModuleList([copy.deepcopy(module)]) for _ in range(2)])
        if name in PRODUCTS:
            products: Any = name
            convert_linears(model, products, emulate=arguments.emulate)
        inner = model.get_submodule("0.0")
        call = inner if arguments.eager else torch.compile(inner, fullgraph=True, dynamic=False)
        found.append(Contestant(name, inner, call))
    return found


def measure(contestant: Contestant, x: Tensor, dy: Tensor, *, keep: bool) -> None:
    """One forward and backward pass."""
    clock = time.process_time if x.device.type == "cpu" else time.perf_counter
    _wait(x.device)
    start = clock()
    with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=contestant.name != "fp32"):
        y = contestant.run(x.float() if contestant.name == "fp32" else x)
    y.backward(dy.to(y.dtype))
    _wait(x.device)
    if keep:
        contestant.seconds.append(clock() - start)
    x.grad = None
    contestant.module.zero_grad()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def race(module: nn.Module, x: Tensor, dy: Tensor, arguments: argparse.Namespace) -> dict[str, Any]:
    """Medians, ratios to bf16 and how far each result is from bf16's."""
    torch._dynamo.reset()
    everyone = contestants(module, arguments, x.device)
    for turn in range(WARM_UP + arguments.rounds):
        for contestant in everyone if turn % 2 else reversed(everyone):
            measure(contestant, x, dy, keep=turn >= WARM_UP)
    reference = everyone[0]
    with torch.no_grad(), torch.autocast(x.device.type, dtype=torch.bfloat16):
        exact = reference.module(x).float()
        errors = {c.name: float((c.module(x).float() - exact).norm() / exact.norm()) for c in everyone}
    found = {}
    for contestant in everyone:
        ratios = [theirs / mine for mine, theirs in zip(contestant.seconds, reference.seconds)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        found[contestant.name] = {
            "median_ms": statistics.median(contestant.seconds) * 1e3,
            "times_as_fast_as_bf16": middle,
            "quartile_low": low,
            "quartile_high": high,
            "relative_difference_from_bf16": errors[contestant.name],
        }
    return found


def predicted(shape: Shape, machine: Machine, *, compiled: bool) -> dict[str, float]:
    """The planner's milliseconds of the operators of one block, forward and backward, by way to multiply."""
    found = {}
    for name in WAYS[machine.device]:
        line = "precision=O0" if name == "fp32" else "precision=O1"
        if name in PRODUCTS:
            line += f" products={name}"
        plan = Plan.parse(f"{line} micro_batch={shape.samples} compile={'blocks' if compiled else 'none'}")
        config: Any = preset(shape.name)
        config = config if config.graph.vision else config.with_lengths(shape.tokens)
        (block,) = describe(config, plan, machine.device, avx512=machine.avx512).blocks
        rates = rates_of(machine, plan)
        found[name] = 1e3 * sum(seconds(op, rates) for op in (*block.forward, *block.backward))
    return found


def run(shape: Shape, arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Each linear layer of a shape, and its block."""
    torch.manual_seed(0)
    rows = shape.samples * shape.tokens
    half = torch.bfloat16
    linears = {}
    for name, (features, out) in () if arguments.blocks else shape.linears().items():
        x = torch.randn(rows, features, device=device, dtype=half, requires_grad=True)
        dy = torch.randn(rows, out, device=device, dtype=half)
        linears[name] = race(nn.Linear(features, out), x, dy, arguments)
    x = torch.randn(shape.samples, shape.tokens, shape.width, device=device, requires_grad=True)
    result = {
        "shape": asdict(shape),
        "linears": linears,
        "block": race(Block(shape), x, torch.randn_like(x), arguments),
    }
    if arguments.machine:
        result["predicted_ms"] = predicted(
            shape, load_machine(arguments.machine), compiled=not arguments.eager
        )
    return result


def save(results: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Write what is measured so far, if a file is asked for."""
    if arguments.output:
        settings = {"weights": arguments.weights, "compiled": not arguments.eager, "rounds": arguments.rounds}
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(
            json.dumps({**environment(), "settings": settings, "results": results}, indent=2) + "\n"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--weights", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument(
        "--shapes", nargs="+", choices=[shape.name for shape in (*SHAPES, *CPU_SHAPES)], help="all by default"
    )
    parser.add_argument("--blocks", action="store_true", help="leave out single linear layers")
    parser.add_argument("--eager", action="store_true", help="leave out torch.compile")
    parser.add_argument("--emulate", action="store_true", help="multiply in fp32, on a machine without fp8")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, to see that it runs")
    parser.add_argument("--machine", help="a file of penstock probe, for predictions")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    own = CPU_SHAPES if device.type == "cpu" else SHAPES
    shapes = SMOKE if arguments.smoke else own
    ways = [way for way in WAYS[device.type] if way != REFERENCE]
    results = []
    for shape in shapes:
        if arguments.shapes and shape.name not in arguments.shapes:
            continue
        result = run(shape, arguments, device)
        results.append(result)
        print(f"\n{shape.name}: {shape.samples} × {shape.tokens} tokens, width {shape.width}")
        print(f"{'':12}{'bf16 ms':>10}" + "".join(f"{way + ' ×':>18}" for way in ways))
        for name, found in [*result["linears"].items(), ("block", result["block"])]:
            ratios = (found[way]["times_as_fast_as_bf16"] for way in ways)
            milliseconds = found[REFERENCE]["median_ms"]
            print(
                f"{name:12}{milliseconds:10.3f}" + "".join(f"{ratio:18.2f}" for ratio in ratios), flush=True
            )
        if forecast := result.get("predicted_ms"):
            ratios = (forecast[REFERENCE] / forecast[way] for way in ways)
            print(f"{'predicted':12}{forecast[REFERENCE]:10.3f}" + "".join(f"{one:18.2f}" for one in ratios))
        save(results, arguments)


if __name__ == "__main__":
    main()
