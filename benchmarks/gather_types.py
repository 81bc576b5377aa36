"""Types in which FSDP gathers. O1: matrices in half precision, compared with fp32 for autocast to cast; with `--fp8`
O2: fp8 layers in fp8, compared with half precision.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/gather_types.py \\
        --output benchmarks/results/gather_types_cpu.json
    … --fp8 --rounds 3 --output benchmarks/results/gather_types_fp8_cpu.json

Both compute the same bits (checked first, over the losses of the warm-up). Autocast keeps each of its copies
for the backward pass, so fp32 gathering leaves a half copy of the whole model on every rank: 2 bytes per
weight, which is the predicted difference of `held`. `sent` is the bytes that each rank gets from the
all-gathers of one step, predicted as twice the weights (forward and backward) in 4 or 2 bytes. Steps of both
take turns, in rounds whose order is reversed each time; the ratio is the median of the ratios within a round. With
`--fp8` on a CPU, products are emulated in fp32, so that only bytes carry over to GPUs; layers that gather in half keep
their rounded weights, 1 byte each, for the backward pass.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from penstock import apply
from penstock.build import Built, build
from penstock.config.model import PRESETS, ViTConfig
from penstock.config.plan import Plan
from penstock.config.run import Recipe
from penstock.config.tasks import require_vision
from penstock.optim.tensors import local
from penstock.parallel import ParallelDims, dims_of, fsdp
from penstock.products.convert import convert_linears
from penstock.products.eight_bits import Fp8Linear
from penstock.report.record import environment

SMALL = ViTConfig(
    image_size=8, patch_size=4, channels=1, width=512, depth=12, heads=8, mlp_width=2048, classes=10
)
"""38 million weights and 5 tokens, so that weights dominate even where half precision is slow."""
WARM_UP = 2


@dataclass
class Contestant:
    """One way to gather, on its own copy of the model."""

    name: str
    built: Built
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    held: int = 0
    sent: int = 0

    def step(self, batch: Any) -> float:
        """Seconds of one optimizer step, of the slower rank."""
        distributed.barrier()
        start = time.perf_counter()
        self.losses.append(self.built.step([batch]).loss.item())
        taken = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        everywhere = taken.to(self.built.device)
        distributed.all_reduce(everywhere, distributed.ReduceOp.MAX)
        return float(everywhere)


def whole(model: ViTConfig, plan: Plan, dims: ParallelDims, device: torch.device) -> Built:
    """The model with every parameter gathered as it is stored, and gradients reduced so."""
    mixed_policy, gather_mixed = fsdp.mixed_policy, fsdp.gather_mixed
    try:
        fsdp.mixed_policy = lambda plan: mixed_policy(replace(plan, precision="O0"))
        fsdp.gather_mixed = lambda model, units, plan: None
        return build(model, plan, recipe=Recipe(lr=1e-4), device=device, dims=dims)
    finally:
        fsdp.mixed_policy, fsdp.gather_mixed = mixed_policy, gather_mixed


def held_bytes(built: Built, batch: Any) -> int:
    """Bytes kept for the backward pass; each storage counts once, and this rank's weights do not count."""
    own = {local(parameter).untyped_storage().data_ptr() for parameter in built.model.parameters()}
    held: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = built.loss(built.model, batch)
    alive = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}
    loss.backward()
    built.optimizer.zero_grad()
    return sum(size for place, size in alive.items() if place not in own)


def sent_bytes(built: Built, batch: Any) -> int:
    """Bytes that this rank gets from the all-gathers of one step."""
    received = 0
    newer = hasattr(distributed, "all_gather_single")  # since torch 2.13
    name = "all_gather_single" if newer else "all_gather_into_tensor"
    original = getattr(distributed, name)

    def counted(output_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal received
        received += output_tensor.nbytes
        return original(output_tensor, *args, **kwargs)

    setattr(distributed, name, counted)
    try:
        built.step([batch])
    finally:
        setattr(distributed, name, original)
    assert received, "all-gathers go another way"
    return received


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--model", choices=["small", *PRESETS], default="small")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--fp8", action="store_true")
    arguments = parser.parse_args()
    config = SMALL if arguments.model == "small" else require_vision(PRESETS[arguments.model])
    ranks, cuda = int(os.environ["WORLD_SIZE"]), torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    plan = Plan(precision="O1", optimizer="fused", sharding="fsdp", dp=ranks, micro_batch=arguments.batch)
    distributed.init_process_group("nccl" if cuda else "gloo")
    dims = dims_of(plan, device)
    if arguments.fp8:
        plan = replace(plan, precision="O2", products="fp8_tensorwise")
        if not cuda:
            apply.convert_linears = partial(convert_linears, emulate=True)
    half = build(config, plan, recipe=Recipe(lr=1e-4), device=device, dims=dims)
    if arguments.fp8:
        plan = replace(plan, gather="products")
        fp8 = build(config, plan, recipe=Recipe(lr=1e-4), device=device, dims=dims)
        contestants = [Contestant("half", half), Contestant("fp8", fp8)]
    else:
        contestants = [Contestant("fp32", whole(config, plan, dims, device)), Contestant("half", half)]
    generator = torch.Generator().manual_seed(dims.rank)
    shape = (arguments.batch, config.channels, config.image_size, config.image_size)
    images = torch.randn(shape, generator=generator).to(device)
    batch = (images, torch.arange(arguments.batch).to(device) % config.classes)

    for contestant in contestants:
        for _ in range(WARM_UP):
            contestant.step(batch)
        contestant.held = held_bytes(contestant.built, batch)
        contestant.sent = sent_bytes(contestant.built, batch)
    assert contestants[0].losses == contestants[1].losses, "both ways compute the same bits"
    for number in range(arguments.rounds):
        for contestant in contestants if number % 2 == 0 else reversed(contestants):
            contestant.seconds.append(contestant.step(batch))
    if dims.main:
        report(contestants, arguments.output, plan)
    distributed.destroy_process_group()


def report(contestants: list[Contestant], output: Path, plan: Plan) -> None:
    wide, narrow = contestants
    weights = sum(parameter.numel() for parameter in wide.built.model.parameters())
    linears = [module for module in wide.built.model.modules() if isinstance(module, Fp8Linear)]
    rounded = sum(linear.weight.numel() for linear in linears)
    predicted: dict[str, Any] = {
        "held_difference": 2 * weights,
        "sent": {"fp32": 8 * weights, "half": 4 * weights},
    }
    if rounded:
        sent = {"half": 4 * weights, "fp8": 4 * weights - 2 * rounded}
        predicted = {"held_difference": rounded, "sent": sent}
    ratios = [a / b for a, b in zip(wide.seconds, narrow.seconds, strict=True)]
    results = {
        "plan": str(plan),
        "weights": weights,
        "speedup": {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)},
        "predicted": predicted,
        "contestants": {
            c.name: {
                "held": c.held,
                "sent": c.sent,
                "seconds": c.seconds,
                "median": statistics.median(c.seconds),
            }
            for c in contestants
        },
    }
    output.write_text(json.dumps({**environment(), "results": results}, indent=1) + "\n", encoding="utf-8")
    for c in contestants:
        print(
            f"{c.name:5} {statistics.median(c.seconds):.3f} s a step, {c.held / 2**20:7.1f} MiB held for the backward "
            f"pass, {c.sent / 2**20:7.1f} MiB gathered"
        )
    print(
        f"{narrow.name} is {statistics.median(ratios):.2f}× as fast ({min(ratios):.2f} to {max(ratios):.2f})"
    )


if __name__ == "__main__":
    main()
