"""Whether torch.compile's own templates for matrix products make a training step on a CPU faster.

    python benchmarks/inductor_products.py --output benchmarks/results/inductor_products_cpu.json

One block of ViT-S in bf16, forward and backward, compiled in these ways: as torch does by default; with `max_autotune`,
which times its C++ template against oneDNN's product for each shape; with each linear layer as a batched product of one
batch, for which the template takes weights that are no constants, so that it packs them and fuses the activation; and
both. Attention is plain: batched products and a softmax. Rounds are interleaved; a round is one step of each.
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
from torch import Tensor, nn

from penstock.report.record import environment

SAMPLES, TOKENS, WIDTH, HEADS, HIDDEN = 8, 197, 384, 6, 1536
Product = Callable[[Tensor, Tensor], Tensor]


def as_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x (…, K) @ weight (N, K) transposed, by a linear layer."""
    return F.linear(x, weight)


def as_batch(x: Tensor, weight: Tensor) -> Tensor:
    """The same by a batched product of one batch."""
    out = torch.bmm(x.reshape(1, -1, x.shape[-1]), weight.t()[None])
    return out.view(*x.shape[:-1], weight.shape[0])


def block(product: Product, x: Tensor, weights: list[nn.Parameter]) -> Tensor:
    """A pre-norm block with plain attention on x (B, N, D), in bf16 but for its norms and softmax."""
    qkv, out, up, down = weights
    norm = F.layer_norm(x.float(), (WIDTH,)).to(x.dtype)
    q, k, v = product(norm, qkv).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * (WIDTH // HEADS) ** -0.5
    mixed = torch.matmul(scores.softmax(-1).to(x.dtype), v).transpose(1, 2).reshape(x.shape)
    x = x + product(mixed, out)
    norm = F.layer_norm(x.float(), (WIDTH,)).to(x.dtype)
    return x + product(F.gelu(product(norm, up)), down)


def stepper(product: Product, options: dict[str, bool | str] | None) -> tuple[Callable[[], None], float]:
    """One step, and the seconds of its first call, with compilation."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    shapes = ((3 * WIDTH, WIDTH), (WIDTH, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN))
    weights = [nn.Parameter((0.02 * torch.randn(shape)).bfloat16()) for shape in shapes]
    x = torch.randn(SAMPLES, TOKENS, WIDTH).bfloat16().requires_grad_()

    def compute(x: Tensor, weights: list[nn.Parameter]) -> Tensor:
        return block(product, x, weights)

    forward = compute if options is None else torch.compile(compute, options=options)

    def step() -> None:
        forward(x, weights).float().square().mean().backward()  # type: ignore[no-untyped-call]
        for one in (x, *weights):
            one.grad = None

    start = time.perf_counter()
    step()
    return step, time.perf_counter() - start


WAYS: dict[str, tuple[Product, dict[str, bool | str] | None]] = {
    "eager": (as_linear, None),
    "compiled": (as_linear, {}),
    "compiled, max_autotune": (as_linear, {"max_autotune": True}),
    "compiled, linears as batches": (as_batch, {}),
    "compiled, linears as batches, max_autotune": (as_batch, {"max_autotune": True}),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    steps = {name: stepper(*way) for name, way in WAYS.items()}
    rounds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(options.rounds):
        order = list(steps)[number % len(steps) :] + list(steps)[: number % len(steps)]
        for name in order:
            start = time.perf_counter()
            steps[name][0]()
            rounds[name].append(time.perf_counter() - start)
    rows = {}
    for name, seconds in rounds.items():
        ratios = [usual / own for usual, own in zip(rounds["compiled"], seconds)]
        rows[name] = {
            "first_seconds": steps[name][1],
            "ms": 1e3 * statistics.median(seconds),
            "speedup_over_compiled": statistics.median(ratios),
            "speedup_interval": [
                sorted(ratios)[len(ratios) // 10],
                sorted(ratios)[-1 - len(ratios) // 10],
            ],
        }
        print(f"{name:<44}{rows[name]['ms']:8.1f} ms {rows[name]['speedup_over_compiled']:6.2f}x", flush=True)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps({"ways": rows, "environment": environment()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
