"""One decision on all ranks: an overflow on one skips the same step on every one."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import penstock
from helpers.spawn import spawn
from penstock.precision import LossScaler, agree_over, scalers_of

backward: Any = Tensor.backward


def independent(form: str, level: str) -> tuple[list[float], list[bool], float]:
    """Ranks whose gradients nobody adds up, as of shards: only the decision is common. One rank overflows at step 2."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model: nn.Module = nn.Linear(4, 4)
    optimizer: torch.optim.Optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-2, foreach=form == "foreach", fused=form == "fused"
    )
    model, optimizer = penstock.accelerate(model, optimizer, precision=level, dtype="fp16")
    moved = []
    for step in range(5):
        before = model.state_dict()["weight"].clone()
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        if step == 2 and rank == world - 1:
            loss = loss * float("nan")
        with penstock.scale_loss(loss, optimizer) as scaled:
            backward(scaled)
        optimizer.step()
        moved.append(not torch.equal(before, model.state_dict()["weight"]))
    (scaler,) = scalers_of(optimizer)
    return [scaler.scale.item()], moved, scaler.overflows.item()


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("form", "level"), [("fused", "O1"), ("foreach", "O2")])
def test_all_ranks_skip_the_same_step(world: int, form: str, level: str) -> None:
    results = spawn(independent, world, form, level)
    assert list(results) == [([2.0**15], [True, True, False, True, True], 1.0)] * world


def replicated(level: str) -> tuple[list[bool], list[Tensor], list[float]]:
    """Only the gradients of the last micro-batch of a step are averaged. Rank 0 overflows at the last step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    inner: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-2, fused=True)
    dtype = "auto" if level == "O0" else "fp16"
    inner, optimizer = penstock.accelerate(inner, optimizer, precision=level, dtype=dtype)
    model = nn.parallel.DistributedDataParallel(inner)
    moved, norms = [], []
    for step in range(4):
        before = inner.state_dict()["0.weight"].clone()
        optimizer.zero_grad()
        whole = torch.randn(8, 4, generator=torch.Generator().manual_seed(step * world + rank))
        for last, x in enumerate(whole.split(4)):
            with contextlib.nullcontext() if last else model.no_sync():
                loss = model(x).square().mean() / 2
                if step == 3 and rank == 0 and level != "O0":
                    loss = loss * float("inf")
                with penstock.scale_loss(loss, optimizer) as scaled:
                    backward(scaled)
        norms.append(float(penstock.clip_grad_norm_(optimizer, 1.0)))
        optimizer.step()
        moved.append(not torch.equal(before, inner.state_dict()["0.weight"]))
    return moved, [value.clone() for value in inner.state_dict().values()], norms[:3]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_replicas_stay_equal_under_ddp(world: int, level: str) -> None:
    results = spawn(replicated, world, level)
    exact = spawn(replicated, world, "O0")[0][2]
    for moved, weights, norms in results:
        assert moved == [True, True, True, False]
        assert norms == pytest.approx(exact, rel=0.05)
        assert all(torch.equal(a, b) for a, b in zip(weights, results[0][1]))


def mismatched() -> float:
    rank = dist.get_rank()
    flag = torch.tensor(float(rank == 1))
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    scaler = LossScaler(agree=agree_over(groups[rank // 2]))
    assert scaler.agree is not None
    scaler.agree(flag)
    return flag.item()


def test_the_hook_agrees_within_its_group() -> None:
    assert spawn(mismatched, 4) == [1.0, 1.0, 0.0, 0.0]


def test_alone_there_is_nothing_to_agree_on() -> None:
    flag = torch.tensor(1.0)
    agree_over()(flag)
    assert flag.item() == 1.0
