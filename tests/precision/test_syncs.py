"""A training step never waits for the device.

A CPU has nothing to wait for, so what is counted here are the operators that on a GPU would: those whose result the
host must see before it can go on. Two things that the same code does on a GPU without waiting are let pass by name:

- `scaler.stuck`, which is read by a non-blocking copy there some steps late, and by `float()` here;
- the step counts of optimizers that are neither fused nor capturable, which live in host memory on a GPU too.

The test marked `gpu` lets CUDA itself be the judge.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import penstock
from helpers.watched import Waits, host_counters
from penstock.precision import scalers_of


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 4))


def make(form: str, model: nn.Module) -> Optimizer:
    if form == "contiguous":
        return penstock.contiguous(torch.optim.AdamW, model.parameters(), lr=1e-3)
    return torch.optim.AdamW(
        model.parameters(), lr=1e-3, **({"foreach": True} if form == "foreach" else {form: True})
    )


def step(model: nn.Module, optimizer: Optimizer, x: Tensor, target: Tensor, clip: bool = True) -> None:
    """Two micro-batches."""
    optimizer.zero_grad()
    for _ in range(2):
        loss = nn.functional.cross_entropy(model(x), target)
        with penstock.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
    if clip:
        penstock.clip_grad_norm_(optimizer, 1.0)
    optimizer.step()


def counted(
    form: str, *, clip: bool = True, overflow: bool = False, **properties: Any
) -> tuple[Counter[str], Optimizer]:
    """What three steps wait for, after two that make the optimizer's state; and how often they look at the scale."""
    model = net()
    model, optimizer = penstock.accelerate(model, make(form, model), **properties)
    x, target = torch.randn(6, 8), torch.randint(0, 4, (6,))
    for _ in range(2):
        step(model, optimizer, x, target, clip)
    with Waits(partial(known, optimizer)) as waits:
        for _ in range(3):
            step(model, optimizer, x * (1e6 if overflow else 1.0), target, clip)
    return waits.counts, optimizer


def known(optimizer: Any) -> dict[int, str]:
    scalers = optimizer.__dict__["_penstock"].session.scalers
    return host_counters(optimizer) | {scaler.stuck.data_ptr(): "poll" for scaler in scalers}


@pytest.mark.parametrize("clip", [True, False], ids=["clip", "no-clip"])
@pytest.mark.parametrize("form", ["fused", "contiguous"])
@pytest.mark.parametrize("precision", ["O1", "O2", "O3"])
def test_a_step_of_a_fused_optimizer_never_waits(precision: str, form: str, clip: bool) -> None:
    for scale in ("dynamic", None) if precision == "O3" else ("dynamic", 1024.0):
        waits, _ = counted(form, clip=clip, precision=precision, dtype="fp16", loss_scale=scale)
        assert waits == ({"poll": 3} if scale else {}), "once a step, where there is a scale"


@pytest.mark.parametrize("form", ["fused", "contiguous"])
def test_nor_does_one_that_is_skipped(form: str) -> None:
    waits, optimizer = counted(form, precision="O1", dtype="fp16", overflow=True)
    assert waits == {"poll": 3}
    assert scalers_of(optimizer)[0].overflows.item() == 3


def test_other_optimizers_wait_once_a_step_where_there_is_a_scale() -> None:
    assert not counted("foreach", precision="O1", dtype="bf16")[0]
    waits, optimizer = counted("foreach", precision="O1", dtype="fp16")
    assert waits == {"_local_scalar_dense": 3, "poll": 3}
    with Waits(partial(known, optimizer)) as seen:
        chosen = torch.ones(3)
        assert chosen[chosen > 0].sum() > 0
    assert seen.counts == {"index": 1, "_local_scalar_dense": 1}


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["fused", "contiguous"])
@pytest.mark.parametrize("precision", ["O1", "O2", "O3"])
def test_cuda_finds_no_wait(precision: str, form: str) -> None:
    model = net().cuda()
    model, optimizer = penstock.accelerate(
        model, make(form, model), precision=precision, dtype="fp16", loss_scale="dynamic"
    )
    x, target = torch.randn(6, 8, device="cuda"), torch.randint(0, 4, (6,), device="cuda")
    for _ in range(6):  # makes the optimizer's state, and the places where `lost` is copied to
        step(model, optimizer, x, target)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            step(model, optimizer, x, target)
    finally:
        torch.cuda.set_sync_debug_mode("default")
