"""Diffusion models are predicted as they are built: FLOPs, and the bytes that autograd keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from helpers.kept import kept_blocks
from penstock.config.model import PRESETS, DiffusionConfig
from penstock.config.plan import Plan
from penstock.config.stack import Stack
from penstock.cpu import this_cpu
from penstock.models import create
from penstock.planner.describe import describe, totals
from penstock.planner.memory import pass_bytes
from penstock.tasks.denoise import NoisyBatch

TINY: Any = PRESETS["ddigits-tiny"]
CONFIGS = {
    "classes": TINY, "experts": PRESETS["ddigits-moe-tiny"],
    "blocks": replace(TINY, experts=2, experts_in="block", expert_every=2),
    "texts": replace(
        TINY, classes=0, sequence=16, text=Stack(width=96, depth=2, heads=3, mlp_width=384, mlp="gelu_tanh")),
}  # fmt: skip
CONFIGS["blocks and texts"] = replace(CONFIGS["texts"], experts=2, experts_in="block")


def _inputs(config: DiffusionConfig, samples: int, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    zero = torch.zeros(samples, dtype=torch.int64)
    images = torch.zeros(samples, config.channels, config.image_size, config.image_size, dtype=dtype)
    routes = torch.arange(samples) % max(1, config.experts)  # as even as they are counted
    given = {"tokens": zero[:, None].expand(-1, config.sequence), "classes": zero, "routes": routes}
    return NoisyBatch.of(config.graph, images, images=images, times=zero.double(), **given).inputs


@pytest.mark.parametrize("name", CONFIGS)
def test_flops_equal_torchs(name: str) -> None:
    # Of grouped products torch counts nothing, so experts multiply one after the other, in fp64.
    config, dtype = CONFIGS[name], torch.float64
    model = create(config, dtype=dtype)
    model.set_attention("plain")
    with FlopCounterMode(display=False) as counter:
        model(*_inputs(config, 2, dtype)).sum().backward()
    assert 2 * totals(config).model_flops == pytest.approx(counter.get_total_flops(), rel=0.005)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("line", ["O0 attention=plain", "O1 attention=plain", "O3", "O0", "O1"])
def test_activation_bytes_are_what_autograd_keeps(name: str, line: str) -> None:
    config, plan = CONFIGS[name], Plan.parse(f"micro_batch=8 precision={line}")
    model = create(config, dtype=torch.bfloat16 if plan.precision == "O3" else torch.float32)
    model.set_attention(plan.attention)
    inputs = _inputs(config, 8, next(model.parameters()).dtype)
    with kept_blocks(*model.parameters(), autocast=plan.precision == "O1") as kept:
        made = model(*inputs)
        (made.float() - inputs[0]).square().mean()
    predicted = pass_bytes(describe(config, plan, "cpu", avx512=this_cpu().avx512), plan).kept
    assert predicted == pytest.approx(sum(kept.values()), rel=0.03)
