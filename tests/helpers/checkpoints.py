"""A small model in training on any layout, and snapshots by number: what the tests of checkpoints save and read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from penstock.checkpoint import Checkpoint, Snapshot, by_index, by_name, find
from penstock.checkpoint.manifest import MANIFEST, manifest_text, read_manifest
from penstock.disk import Written, digest_file
from penstock.shards import whole_of

BATCH = 12
"""Samples per step over all ranks: divisible by 1, 2, 3 and 4."""


class Trainee:
    """Two hidden layers, dropout off, AdamW; the same on every layout up to rounding.

    `layout` is "single", "ddp", "fsdp" or "hsdp" (two replicas). A width of 6 leaves some of 4 ranks with an uneven
    share, and one bias of 3 leaves one with none.
    """

    def __init__(self, layout: str = "single", dtype: torch.dtype = torch.float64) -> None:
        torch.manual_seed(1)
        self.rank, self.world = (0, 1) if layout == "single" else (dist.get_rank(), dist.get_world_size())
        self.model = nn.Sequential(
            nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)
        ).to(dtype)
        self.dtype = dtype
        self.forward: nn.Module = self.model
        if layout == "ddp":
            self.forward = DistributedDataParallel(self.model)
        elif layout in ("fsdp", "hsdp"):
            shape = (self.world,) if layout == "fsdp" else (2, self.world // 2)
            names = ("shard",) if layout == "fsdp" else ("replicate", "shard")
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            for layer in self.model:
                if isinstance(layer, nn.Linear):
                    fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        named = list(self.model.named_parameters())
        decayed, others = ([(n, p) for n, p in named if (p.ndim > 1) is wanted] for wanted in (True, False))
        groups: list[dict[str, Any]] = [
            {"params": [p for _, p in group], "param_names": [n for n, _ in group], "weight_decay": decay}
            for group, decay in ((decayed, 0.1), (others, 0.0))
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2)
        self.step = 0

    def train(self, steps: int) -> list[float]:
        """Take `steps` steps; the loss of each, over all ranks."""
        losses = []
        for _ in range(steps):
            generator = torch.Generator().manual_seed(1000 + self.step)
            x = torch.randn(BATCH, 5, generator=generator, dtype=torch.float64).to(self.dtype)
            y = torch.randn(BATCH, 3, generator=generator, dtype=torch.float64).to(self.dtype)
            share = slice(self.rank * BATCH // self.world, (self.rank + 1) * BATCH // self.world)
            loss = nn.functional.mse_loss(self.forward(x[share]), y[share])
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            total = loss.detach().clone()
            if self.world > 1:
                dist.all_reduce(total)
            losses.append(float(total / self.world))
            self.step += 1
        return losses

    def snapshot(self) -> Snapshot:
        """All of it, the generator of this rank included."""
        return Snapshot(
            step=self.step,
            weights={"weights": self.model.state_dict()},
            state={
                "optimizer": by_name(self.optimizer.state_dict()),
                "progress": {"seen": self.step * BATCH},
            },
            config={"seed": 1},
            plan="precision=O0",
            local={"random": {"torch": torch.get_rng_state(), "rank": self.rank}},
        )

    def restore(self, stored: Checkpoint) -> Snapshot:
        """Become what was saved, whatever layout saved it."""
        parameters: dict[str, Tensor] = dict(self.model.named_parameters())
        snapshot = stored.load(parameters, rank=self.rank, world=self.world)
        self.model.load_state_dict(snapshot.weights["weights"])
        self.optimizer.load_state_dict(by_index(snapshot.state["optimizer"], self.optimizer.state_dict()))
        self.step = snapshot.step
        return snapshot

    def resume(self, folder: Path) -> Snapshot:
        """Go on from the newest checkpoint in `folder`."""
        return self.restore(newest(folder))

    def whole(self) -> dict[str, Tensor]:
        """All weights and moments, whole, by name."""
        state = by_name(self.optimizer.state_dict())["state"]
        tensors = {f"{n}.{k}": t for n, entry in state.items() for k, t in entry.items()}
        tensors |= self.model.state_dict()
        return {name: whole_of(tensor).detach().clone() for name, tensor in tensors.items()}


def newest(folder: Path) -> Checkpoint:
    """The newest checkpoint that verifies."""
    stored = find(folder)
    assert stored is not None
    return stored


def numbered(step: int, *, rows: int = 3, rank: int = 0) -> Snapshot:
    """A snapshot whose every value follows from `step`, with all that a checkpoint may hold; two matrices of `rows`."""
    generator = torch.Generator().manual_seed(step)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    weights = {"weights": {"a": some(rows, 4), "b": some(5).to(torch.bfloat16)}, "ema": {"a": some(rows, 4)}}
    return Snapshot(
        step=step,
        weights=weights,
        state={
            "optimizer": {
                "state": {"a": {"step": torch.tensor(float(step)), "exp_avg": some(rows, 4)}},
                "param_groups": [{"lr": 1e-3 / 3, "betas": (0.9, 0.999), "params": ["a"]}],
            },
            "random": {"torch": torch.arange(16, dtype=torch.uint8), "numpy": np.arange(4, dtype=np.uint32)},
            "position": step * 8,
        },
        config={"seed": 0},
        plan="precision=O1",
        local={"own": torch.tensor([step, rank]), "rank": rank},
    )


def alike(left: object, right: object) -> bool:
    """Whether two trees are the same, bit for bit and type by type."""
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return isinstance(right, np.ndarray) and left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, dict):
        return (
            isinstance(right, dict)
            and list(left) == list(right)
            and all(alike(left[k], right[k]) for k in left)
        )
    if isinstance(left, list | tuple):
        return (
            isinstance(right, list | tuple)
            and type(left) is type(right)
            and len(left) == len(right)
            and all(map(alike, left, right))
        )
    return type(left) is type(right) and left == right


def same_snapshot(left: Snapshot, right: Snapshot) -> bool:
    """Whether two snapshots hold the same."""
    return (
        (left.step, left.plan) == (right.step, right.plan)
        and alike(dict(left.weights), dict(right.weights))
        and alike(dict(left.state), dict(right.state))
        and alike(dict(left.local), dict(right.local))
        and alike(dict(left.config), dict(right.config))
    )


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.marker,))


def seal(path: Path) -> None:
    """Make the manifest say what is there now, as whoever can write the files can."""
    manifest = read_manifest(path)
    files = {
        file.name: Written(file.stat().st_size, digest_file(file))
        for file in path.iterdir()
        if file.name in manifest.files
    }
    (path / MANIFEST).write_bytes(manifest_text(replace(manifest, files=files)))
