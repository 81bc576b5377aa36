"""Training steps of a Vision Transformer: Penstock's Plan compared with hand-written loops.

    python benchmarks/vit_train.py --model vit-s16 --batch 8 --output benchmarks/results/vit_train_cpu.json
    python benchmarks/vit_train.py --model vit-b16 --batch 64 --compile --output benchmarks/results/vit_train_h200.json

All contestants train the same architecture from the same weights, in one process, in rounds A B C, B C A, …
so that drift of the machine cancels. Ratios are medians of the ratios within a round. The reference model is
timm's if it can be imported (on a GPU machine), otherwise transformers'.

The fair baseline is the plain loop with the fast fp32 matrix products. The best hand-written loop is the
fastest of those that a careful user would try here: half precision by autocast or throughout if the machine
is faster in it, fused AdamW, and with `--compile` torch.compile.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.build import build
from penstock.config.machine import Machine
from penstock.config.model import PRESETS, ViTConfig
from penstock.config.plan import Plan
from penstock.config.run import Augment, DataConfig, Recipe
from penstock.config.tasks import require_vision
from penstock.config.theirs.backbones import hf_config
from penstock.data import image_loader, open_source
from penstock.models import create
from penstock.models.convert import to_hf, to_timm
from penstock.planner.describe import totals
from penstock.precision import matmul_precision
from penstock.probe import machine_for, resolve_device
from penstock.report.record import environment

WARM_UP = 3
LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.05
HALF_PAYS_FROM = 1.1
"""A half type is tried where its measured matrix products are this much faster than fp32's."""

Step = Callable[[Tensor, Tensor], Tensor]
"""One optimizer step on images (B, C, S, S) and targets (B,); returns the detached loss without waiting for it."""


@dataclass
class Contestant:
    """A way to train, and its measurements."""

    name: str
    kind: str
    """`baseline`, `hand` or `penstock`."""
    about: str
    make: Callable[[int], Step]
    """Makes a new training step from the seed of its weights."""
    config: ViTConfig
    seconds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    """Throughput relative to the fair baseline, per round."""
    compile_seconds: float | None = None
    peak_bytes: int | None = None
    losses: list[float] = field(default_factory=list)
    error: str | None = None


def reference_model(config: ViTConfig, seed: int, device: torch.device) -> nn.Module:
    """timm's or transformers' model of this shape, with the weights Penstock draws for the seed."""
    torch.manual_seed(seed)
    state = create(config).state_dict()
    if importlib.util.find_spec("timm") is not None:
        from timm.models.vision_transformer import VisionTransformer

        model = VisionTransformer(
            img_size=config.image_size, patch_size=config.patch_size, embed_dim=config.width, depth=config.depth,
            num_heads=config.heads, mlp_ratio=config.mlp_width / config.width, num_classes=config.classes,
        )  # fmt: skip
        model.load_state_dict(to_timm(state, config))
    else:
        from transformers import ViTConfig as HFConfig
        from transformers import ViTForImageClassification

        model = ViTForImageClassification.from_pretrained(
            None, config=HFConfig(**hf_config(config)), state_dict=to_hf(state, config)
        )
    return model.to(device).train()


def logits_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits


def hand_loop(
    config: ViTConfig,
    device: torch.device,
    *,
    matmul: str = "highest",
    fused: bool = False,
    autocast: torch.dtype | None = None,
    whole: torch.dtype | None = None,
    compiled: bool = False,
) -> Callable[[int], Step]:
    """A training step as one writes it without a library."""

    def make(seed: int) -> Step:
        model = reference_model(config, seed, device)
        if whole is not None:
            model = model.to(whole)
        if compiled:
            model.compile()
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=fused or None
        )

        def step(images: Tensor, targets: Tensor) -> Tensor:
            with matmul_precision(matmul):
                if whole is not None:
                    images = images.to(whole)
                with torch.autocast(device.type, dtype=autocast) if autocast else nullcontext():
                    loss = F.cross_entropy(logits_of(model(images)).float(), targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        return step

    return make


def penstock_loop(config: ViTConfig, plan: Plan, device: torch.device) -> Callable[[int], Step]:
    """The same step as in `penstock train`, but without clipping, because the loops above do not clip."""

    def make(seed: int) -> Step:
        recipe = Recipe(lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, clip_norm=None)
        built = build(config, plan, device=device, recipe=recipe, seed=seed)
        return lambda images, targets: built.step([(images, targets)]).loss

    return make


def halves(machine: Machine) -> dict[str, torch.dtype]:
    """The half types whose matrix products are faster here than the fastest fp32."""
    rates = machine.achievable_flops or machine.peak_flops
    fp32 = max(rates.get(name, 0.0) for name in ("fp32", "fp32_medium", "tf32"))
    types = {"bf16": torch.bfloat16}
    return {name: dtype for name, dtype in types.items() if rates.get(name, 0.0) > HALF_PAYS_FROM * fp32}


def contestants(
    config: ViTConfig,
    device: torch.device,
    machine: Machine,
    batch: int,
    plans: list[Plan],
    *,
    compiled: bool,
) -> list[Contestant]:
    """The baseline, the hand-written loops worth trying on this machine, and Penstock's Plans."""
    fast = "high" if device.type == "cuda" else "medium"
    token = replace(config, classifier="token")
    half = halves(machine)
    entries: list[Contestant] = []

    def hand(name: str, about: str, kind: str = "hand", **options: Any) -> None:
        entries.append(Contestant(name, kind, about, hand_loop(token, device, **options), token))

    hand("plain fp32", "the plain loop, torch's defaults", "plain")
    hand(
        f"plain fp32, matmul {fast}",
        "the plain loop with fast fp32 products: the fair baseline",
        "baseline",
        matmul=fast,
    )
    hand("hand fp32, fused AdamW", "fast fp32 products and fused AdamW", matmul=fast, fused=True)
    for name, dtype in half.items():
        hand(
            f"hand autocast {name}", f"autocast {name}, fused AdamW", matmul=fast, fused=True, autocast=dtype
        )
        hand(f"hand pure {name}", f"all {name}, fused AdamW", matmul=fast, fused=True, whole=dtype)
    if compiled:
        hand("hand fp32, compiled", "fused AdamW, torch.compile", matmul=fast, fused=True, compiled=True)
        for name, dtype in half.items():
            hand(f"hand autocast {name}, compiled", f"autocast {name}, fused AdamW, torch.compile", matmul=fast,
                 fused=True, autocast=dtype, compiled=True)  # fmt: skip
            hand(f"hand pure {name}, compiled", f"all {name}, fused AdamW, torch.compile", matmul=fast, fused=True,
                 whole=dtype, compiled=True)  # fmt: skip
    for plan in plans:
        plan = replace(plan, micro_batch=batch)
        name = f"penstock {replace(plan, micro_batch=Plan().micro_batch).line()}"
        entries.append(Contestant(name, "penstock", plan.line(), penstock_loop(config, plan, device), config))
    return entries


def default_plans(device: torch.device, machine: Machine) -> list[Plan]:
    """The default Plans: what the ladder finds on machines of this kind."""
    if device.type == "cuda":
        base = Plan(precision="O1", matmul="high", optimizer="fused", token_order="batch_second")
        return [
            replace(base, compile="whole"),
            replace(base, compile="whole", token_order="batch_first"),
            replace(base, precision="O3", compile="whole", token_order="batch_first"),
        ]
    base = Plan(matmul="medium", optimizer="fused", token_order="batch_second", host_memory="keep")
    if "bf16" in halves(machine):
        base = replace(base, precision="O3", attention="auto")
        return [base, replace(base, compile="blocks")]
    return [base, replace(base, compile="blocks"), replace(base, matmul="probed")]


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(step: Step, batch: tuple[Tensor, Tensor], steps: int, device: torch.device) -> float:
    wait(device)
    start = time.perf_counter()
    for _ in range(steps):
        step(*batch)
    wait(device)
    return (time.perf_counter() - start) / steps


def race(
    entries: list[Contestant],
    batches: dict[int, tuple[Tensor, Tensor]],
    device: torch.device,
    rounds: int,
    steps: int,
) -> None:
    """Warm up all contestants, then time them in interleaved rounds. Those that fail (out of memory) are
    reported and left out."""
    live: list[tuple[Contestant, Step]] = []
    for entry in entries:
        batch = batches[entry.config.image_size]
        try:
            step = entry.make(0)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
                before = torch.cuda.memory_allocated(device)
            first = timed(step, batch, 1, device)
            warm = [timed(step, batch, 1, device) for _ in range(WARM_UP)][-1]
            entry.compile_seconds = max(0.0, first - warm)
            if device.type == "cuda":
                entry.peak_bytes = torch.cuda.max_memory_allocated(device) - before
            live.append((entry, step))
            print(f"  warm: {entry.name}: {1e3 * warm:.1f} ms", flush=True)
        except (RuntimeError, ValueError) as error:
            entry.error = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            print(f"  failed: {entry.name}: {entry.error}", flush=True)
            gc.collect()
    for turn in range(rounds):
        shift = turn % len(live)
        for entry, step in live[shift:] + live[:shift]:
            batch = batches[entry.config.image_size]
            timed(
                step, batch, 1, device
            )  # the previous contestant has left its own state in the caches and the allocator
            entry.seconds.append(timed(step, batch, steps, device))
    baseline = next(entry for entry, _ in live if entry.kind == "baseline")
    for entry, _ in live:
        entry.ratios = [b / s for b, s in zip(baseline.seconds, entry.seconds, strict=True)]


def learn(entry: Contestant, seed: int, steps: int, batch: int, device: torch.device) -> list[float]:
    """Losses of training on digits for `steps` steps, with weights and order of samples from the seed."""
    source = open_source(DataConfig(source="digits"), split="train", channels=entry.config.channels)
    gentle = Augment(flip=0.0, crop_scale_min=1.0)
    step = entry.make(seed)
    with image_loader(
        source,
        batch=batch,
        image_size=entry.config.image_size,
        classes=10,
        augment=gentle,
        seed=seed,
        device=device,
    ) as loader:
        losses = [step(b.images, b.targets) for b, _ in zip(loader, range(steps))]
    return [float(loss) for loss in torch.stack(losses).float().cpu()]


def profile(entry: Contestant, batch: tuple[Tensor, Tensor], device: torch.device) -> list[dict[str, Any]]:
    """The operators that take the most time in one step, which shows what can still be gained."""
    step = entry.make(0)
    for _ in range(WARM_UP):
        step(*batch)
    wait(device)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        step(*batch)
        wait(device)
    key = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    rows = sorted(profiler.key_averages(), key=lambda row: getattr(row, key), reverse=True)
    return [
        {"operator": row.key[:120], "calls": row.count, "ms": getattr(row, key) / 1e3} for row in rows[:20]
    ]


def summary(entry: Contestant, batch: int, machine: Machine) -> dict[str, Any]:
    """The JSON of one contestant."""
    found: dict[str, Any] = {
        "name": entry.name,
        "kind": entry.kind,
        "about": entry.about,
        "error": entry.error,
    }
    if not entry.seconds:
        return found
    seconds = statistics.median(entry.seconds)
    flops = totals(entry.config).model_flops * batch / seconds
    half = any(word in entry.about for word in ("bf16", "fp16", "precision=O"))
    types = ("bf16", "fp16") if half else ("tf32", "fp32_medium", "fp32")
    peak = max(machine.achievable_flops.get(name, machine.peak_flops.get(name, 0.0)) for name in types)
    return found | {
        "ms_per_step": {"median": 1e3 * seconds, "min": 1e3 * min(entry.seconds), "max": 1e3 * max(entry.seconds)},
        "images_per_second": batch / seconds,
        "model_tflops": flops / 1e12,
        "mfu_of_best_gemm": flops / peak if peak else None,
        "speedup_over_fair_baseline": {
            "median": statistics.median(entry.ratios), "min": min(entry.ratios), "max": max(entry.ratios),
        },
        "compile_seconds": entry.compile_seconds,
        "peak_bytes": entry.peak_bytes,
        "loss_curve": entry.losses,
    }  # fmt: skip


def tail(losses: list[float]) -> float:
    """Mean loss of the last quarter of the steps."""
    return statistics.mean(losses[-max(1, len(losses) // 4) :])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="vit-s16", choices=sorted(PRESETS))
    parser.add_argument(
        "--classifier", default="pooled", choices=("token", "pooled"), help="of Penstock's model"
    )
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--plan", action="append", help="a Plan to enter; may be given again")
    parser.add_argument("--compile", action="store_true", help="enter compiled hand-written loops too")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=1, help="steps timed in a round")
    parser.add_argument(
        "--loss-steps", type=int, default=0, help="also train so many steps on digits and compare losses"
    )
    parser.add_argument("--seeds", type=int, default=3, help="of the baseline, whose spread is the noise")
    parser.add_argument("--profile", action="store_true", help="add the profile of the fastest Plan")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()

    device = resolve_device(options.device)
    machine = machine_for(device)
    config = replace(require_vision(PRESETS[options.model]), classifier=options.classifier)
    plans = [Plan.parse(line) for line in options.plan or []] or default_plans(device, machine)
    entries = contestants(config, device, machine, options.batch, plans, compiled=options.compile)
    size = config.image_size
    images = torch.randn(options.batch, config.channels, size, size).to(device)
    batches = {size: (images, torch.randint(0, config.classes, (options.batch,)).to(device))}
    race(entries, batches, device, options.rounds, options.steps)

    noise: dict[str, float] = {}
    if options.loss_steps:
        baseline = next(entry for entry in entries if entry.kind == "baseline")
        ends = [
            tail(learn(baseline, seed, options.loss_steps, options.batch, device))
            for seed in range(1, options.seeds)
        ]
        for entry in entries:
            if entry.seconds:
                entry.losses = learn(entry, 0, options.loss_steps, options.batch, device)
        ends.append(tail(baseline.losses))
        noise = {
            "seeds": options.seeds,
            "mean": statistics.mean(ends),
            "standard_deviation": statistics.stdev(ends),
        }

    rows = [summary(entry, options.batch, machine) for entry in entries]
    measured = [entry for entry in entries if entry.seconds]
    best = {
        kind: min((e for e in measured if e.kind == kind), key=lambda e: statistics.median(e.seconds))
        for kind in ("baseline", "hand", "penstock")
    }
    over_hand = [h / p for h, p in zip(best["hand"].seconds, best["penstock"].seconds, strict=True)]
    result = {
        "model": options.model,
        "batch": options.batch,
        "device": str(device),
        "contestants": rows,
        "half_types_faster_here": sorted(halves(machine)),
        "gemm_flops_per_second": machine.achievable_flops,
        "best_penstock_over_fair_baseline": statistics.median(best["penstock"].ratios),
        "best_penstock_over_best_hand": {
            "hand": best["hand"].name,
            "median": statistics.median(over_hand),
            "min": min(over_hand),
            "max": max(over_hand),
        },
        "loss_noise": noise,
        "profile": profile(best["penstock"], batches[size], device) if options.profile else None,
        "environment": environment(),
    }
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    faster = ", ".join(sorted(halves(machine))) or "none"
    print(f"\n{options.model}, batch {options.batch}, {device}; half types faster here: {faster}")
    print(f"{'contestant':<66}{'ms':>9}{'img/s':>9}{'TFLOP/s':>9}{'ratio':>7}{'loss':>8}")
    for row, entry in zip(rows, entries, strict=True):
        if entry.error:
            print(f"{entry.name:<66} {entry.error}")
            continue
        loss = f"{tail(entry.losses):8.3f}" if entry.losses else ""
        print(
            f"{entry.name[:65]:<66}{row['ms_per_step']['median']:9.1f}{row['images_per_second']:9.1f}"
            f"{row['model_tflops']:9.3f}{row['speedup_over_fair_baseline']['median']:7.2f}{loss}"
        )
    if noise:
        print(f"seed-to-seed standard deviation of the baseline's loss: {noise['standard_deviation']:.3f}")
    print(f"best Plan over best hand-written loop ({best['hand'].name}): {statistics.median(over_hand):.2f}")


if __name__ == "__main__":
    main()
