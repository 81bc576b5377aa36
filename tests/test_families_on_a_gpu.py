"""Every enrolled family learns on a GPU what it learns on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.families import ENROLLED, batches, loss
from penstock.build import build
from penstock.config.model import stacks
from penstock.config.plan import Plan
from penstock.config.run import Recipe
from penstock.containers import replaced

STEPS = 4
PLANS = (
    "optimizer=fused",
    "optimizer=fused precision=O1 attention=sdpa recompute=operators",
    "optimizer=fused precision=O2 attention=auto",
    "optimizer=contiguous precision=O3",
    "optimizer=fused precision=O1 dtype=fp16 compile=blocks",
)


def _losses(name: str, plan: Plan, device: str) -> list[float]:
    torch.manual_seed(0)
    built = build(ENROLLED[name].config, plan, device=device, recipe=Recipe(lr=1e-3), loss=loss, seed=0)
    losses = []
    for step in range(STEPS):
        batch: Any = replaced(batches(ENROLLED[name].config, step, 4), lambda tensor: tensor.to(device))
        losses.append(float(built.step([batch]).loss))
    return losses


@pytest.mark.gpu
@pytest.mark.parametrize("line", PLANS)
@pytest.mark.parametrize("name", ENROLLED)
def test_a_gpu_learns_what_a_cpu_learns(name: str, line: str) -> None:
    plan = Plan.parse(f"micro_batch=4 {line}")
    mixed = any(stack.experts for stack in stacks(ENROLLED[name].config))
    if mixed and plan.compile != "none":
        pytest.skip("mixtures are not compiled")
    expected = _losses(name, Plan(micro_batch=4), "cpu")
    tolerance = 1e-4 if plan.precision == "O0" else 0.05
    assert _losses(name, plan, "cuda") == pytest.approx(expected, rel=tolerance)
    assert len(set(expected)) == STEPS, "the model learns"
