"""Shows what each part of mixed precision does, by training on real data with parts left out.

Two tasks use data that every installation has: scikit-learn's handwritten digits with a small Vision
Transformer, and the standard library's source text with a byte-level decoder. Both use AdamW and a cosine.
Each variant runs with several seeds, because a difference must be compared with the noise between seeds.

Gradients vanish in fp16 because a loss is a mean over very many samples. To show this with a small model,
each step's loss is divided by 1,024, as for one of 1,024 micro-batches of a step: 65,536 images, or half a
million bytes, as large models train with. The other 1,023 are left out. In fp32 that changes nothing that is
compared, because AdamW's update does not depend on the scale of gradients (its eps is 1e-12 here, below all
of them).

    python benchmarks/precision_ablation.py --output benchmarks/results/precision_ablation.json

An existing output is continued: runs that it holds are not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.errors import NumericError
from penstock.precision import scalers_of
from penstock.report.record import environment

backward: Any = Tensor.backward

# name → precision, dtype, overrides
VARIANTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "O0": ("O0", "auto", {}),
    "O1 bf16": ("O1", "bf16", {}),
    "O1 fp16": ("O1", "fp16", {}),
    "O2 bf16": ("O2", "bf16", {}),
    "O2 fp16": ("O2", "fp16", {}),
    "O3 bf16": ("O3", "bf16", {}),
    "O3 fp16": ("O3", "fp16", {}),
    "O2 fp16, no loss scale": ("O2", "fp16", {"loss_scale": 1.0}),
    "O2 fp16, no master weights": ("O2", "fp16", {"master": "none"}),
    "O2 bf16, no master weights": ("O2", "bf16", {"master": "none"}),
}


SHARE = 1024
"""Micro-batches that a step would have; see the module's docstring."""


class Block(nn.Module):
    """A pre-norm decoder block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return result


class Bytes(nn.Module):
    """A byte-level decoder: (B, T) bytes to (B, T, 256) logits of the next byte."""

    def __init__(self, width: int = 64, depth: int = 2, heads: int = 2, length: int = 64) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        y = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            y = block(y)
        logits: Tensor = self.head(self.norm(y))
        return logits


class Task:
    """A model, its batches and its test: `train(generator)` yields (inputs, targets) for ever."""

    lr: float
    steps: int
    model: Callable[[], nn.Module]
    train: Callable[[torch.Generator], Iterator[tuple[Tensor, Tensor]]]
    test: tuple[Tensor, Tensor]


class ByteTask(Task):
    """Next bytes of the standard library's source; every tenth file is in the test set."""

    lr, steps = 2e-3, 200

    def __init__(self, length: int = 32, batch: int = 16) -> None:
        self.length, self.batch = length, batch
        self.model = lambda: Bytes(width=32, length=length)
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = [
            b"".join(f.read_bytes() for i, f in enumerate(files) if (i % 10 == 0) == held)
            for held in (False, True)
        ]
        self.data, held = (torch.frombuffer(bytearray(t), dtype=torch.uint8).long() for t in text)
        starts = torch.linspace(0, len(held) - length - 1, 64).long()
        self.test = self._windows(held, starts)

    def _windows(self, data: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        windows = torch.stack([data[s : s + self.length + 1] for s in starts.tolist()])
        return windows[:, :-1], windows[:, 1:]

    def train(self, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            starts = torch.randint(len(self.data) - self.length - 1, (self.batch,), generator=generator)
            yield self._windows(self.data, starts)


class DigitsTask(Task):
    """Handwritten digits, 8 × 8, by a Vision Transformer."""

    lr, steps = 2e-3, 300

    def __init__(self, batch: int = 64) -> None:
        self.batch = batch
        config = penstock.ViTConfig(
            image_size=8, patch_size=4, channels=1, width=32, depth=2, heads=2, mlp_width=128, classes=10
        )
        self.model = lambda: penstock.create(config)
        train, test = (
            penstock.open_source(penstock.DataConfig(source="digits"), split=split, channels=1)
            for split in ("train", "val")
        )
        (self.images, self.labels), self.test = self._all(train), self._all(test)

    def _all(self, source: Any) -> tuple[Tensor, Tensor]:
        images, labels = source.read(range(len(source)))
        stacked = torch.stack([torch.as_tensor(image) for image in images])
        return stacked.permute(0, 3, 1, 2).float() / 127.5 - 1.0, torch.as_tensor(labels)

    def train(self, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            chosen = torch.randint(len(self.labels), (self.batch,), generator=generator)
            yield self.images[chosen], self.labels[chosen]


def run(task: Task, variant: str, seed: int) -> dict[str, Any]:
    """Train once. Losses are in nats; the history of the scale shows overflows in fp16."""
    level, dtype, overrides = VARIANTS[variant]
    torch.manual_seed(seed)
    model: nn.Module = task.model()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(
        model.parameters(), lr=task.lr, weight_decay=0.05, eps=1e-12, fused=True
    )
    warm = max(task.steps // 20, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda i: min((i + 1) / warm, 0.5 * (1.0 + math.cos(math.pi * min(i / task.steps, 1.0)))),
    )
    model, optimizer = penstock.accelerate(model, optimizer, precision=level, dtype=dtype, **overrides)
    batches = task.train(torch.Generator().manual_seed(seed))
    losses, ended, started = [], None, time.thread_time()
    for _ in range(task.steps):
        inputs, targets = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        try:
            with penstock.scale_loss(loss / SHARE, optimizer) as scaled:
                backward(scaled)
        except NumericError as error:  # nothing was learned for a while: the run is lost
            ended = str(error)
            break
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    model.eval()
    with torch.no_grad():
        logits = model(task.test[0])
        test = F.cross_entropy(logits.flatten(0, -2), task.test[1].flatten()).item()
        right = (logits.argmax(-1) == task.test[1]).float().mean().item()
    scalers = scalers_of(optimizer)
    return {
        "variant": variant,
        "seed": seed,
        "test_loss": test if math.isfinite(test) else None,
        "test_accuracy": right,
        "losses": [round(v, 5) if math.isfinite(v) else None for v in torch.stack(losses).tolist()],
        "skipped": scalers[0].overflows.item() if scalers else 0.0,
        "scale": scalers[0].scale.item() if scalers else 1.0,
        "ended": ended,
        "processor_seconds": time.thread_time() - started,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--tasks", nargs="+", default=["digits", "bytes"])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    kinds: dict[str, Callable[[], Task]] = {"digits": DigitsTask, "bytes": ByteTask}
    tasks = {name: kinds[name]() for name in args.tasks}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in kinds}
    if args.output and args.output.exists():
        found |= json.loads(args.output.read_text(encoding="utf-8"))["runs"]
    for seed in range(args.seeds):
        for name, task in tasks.items():
            task.steps, task.lr = args.steps or task.steps, args.lr or task.lr
            for variant in args.variants:
                if any(r["variant"] == variant and r["seed"] == seed for r in found[name]):
                    continue
                found[name].append(run(task, variant, seed))
                told = found[name][-1]
                print(
                    f"{name:7} {variant:28} seed {seed}  test loss {told['test_loss'] or math.nan:8.4f}  "
                    f"accuracy {told['test_accuracy']:6.2%}  skipped {told['skipped']:3.0f}  "
                    f"{told['processor_seconds']:6.1f} s",
                    flush=True,
                )
                if args.output:
                    settings = {n: {"lr": t.lr, "steps": t.steps} for n, t in tasks.items()}
                    record = {"environment": environment(), "share": SHARE, "tasks": settings, "runs": found}
                    args.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for name in tasks:
        table(name, found[name], args.variants)


def table(name: str, runs: list[dict[str, Any]], variants: list[str]) -> None:
    """Mean and standard deviation over seeds, and the mean difference from O0 with the same seed."""
    base = {r["seed"]: r["test_loss"] for r in runs if r["variant"] == "O0"}
    for variant in variants:
        found = {r["seed"]: r["test_loss"] for r in runs if r["variant"] == variant}
        mine = {seed: loss for seed, loss in found.items() if loss is not None}
        if len(mine) < 2:
            print(f"{name:7} {variant:28} lost {len(found) - len(mine)} of {len(found)}")
            continue
        apart = [loss - base[seed] for seed, loss in mine.items() if seed in base]
        print(
            f"{name:7} {variant:28} {statistics.fmean(mine.values()):8.4f} ± {statistics.stdev(mine.values()):.4f}  "
            f"{statistics.fmean(apart) if apart else math.nan:+8.4f}  lost {len(found) - len(mine)} of {len(found)}"
        )


if __name__ == "__main__":
    main()
