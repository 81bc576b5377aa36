"""The counts against real modules, FlopCounterMode, and what autograd really keeps."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count

from penstock.config.model import PRESETS, ViTConfig
from penstock.config.plan import Plan
from penstock.models import ViT
from penstock.planner import counts
from penstock.planner.operations import _listed

VITS = [name for name, preset in PRESETS.items() if isinstance(preset, ViTConfig)]
TINY = ViTConfig(image_size=32, patch_size=8, width=48, depth=2, heads=4, mlp_width=96, classes=10)
VARIANTS: dict[str, dict[str, Any]] = {
    "token": {},
    "pooled": {"classifier": "pooled"},
    "pooled_norm_after": {"classifier": "pooled", "pool_norm": "after"},
    "conv_stem": {"stem": "conv"},
    "qk_norm": {"qk_norm": True, "qkv_bias": False},
    "layer_scale": {"layer_scale": 0.1},
    "drop_path": {"drop_path": 0.2},
    "layer_scale_drop_path": {"layer_scale": 0.1, "drop_path": 0.2},
    "dropout": {"dropout": 0.1},
    "everything": {
        "stem": "conv", "qk_norm": True, "layer_scale": 0.1, "drop_path": 0.2, "dropout": 0.1,
        "classifier": "pooled", "mlp": "gelu_tanh",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", VITS)
def test_parameters_of_presets_are_exact(name: str) -> None:
    for change in ({}, {"classifier": "pooled"}, {"image_size": PRESETS[name].patch_size * 6}):
        config = replace(PRESETS[name], **change)
        model = ViT(config, device="meta")
        assert counts.parameters(config) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_of_variants_are_exact(variant: str) -> None:
    config = replace(TINY, **VARIANTS[variant])
    model = ViT(config, device="meta")
    assert counts.parameters(config) == sum(p.numel() for p in model.parameters())
    parts = counts.parameter_parts(config)
    assert parts["blocks"] == sum(p.numel() for p in model.blocks.parameters())
    assert parts["stem"] == sum(p.numel() for p in model.stem.parameters())


def _counted(config: ViTConfig, attention: str, layout: str) -> tuple[int, int]:
    """FLOPs of forward and backward as torch counts them, on the meta device."""
    model = ViT(config, device="meta")
    model.set_attention(attention)  # type: ignore[arg-type]
    model.set_layout(layout)  # type: ignore[arg-type]
    images = torch.empty(2, config.channels, config.image_size, config.image_size, device="meta")
    with FlopCounterMode(display=False) as forward:
        loss = model(images).sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("name", VITS)
def test_flops_of_presets_equal_torchs(name: str) -> None:
    # Every block costs the same, so two show what forty do.
    config = replace(PRESETS[name], depth=2)
    forward, backward = _counted(config, "plain", "batch_first")
    assert counts.forward_flops(config, 2) == forward
    assert counts.backward_flops(config, 2) == backward
    assert counts.model_flops_per_sample(config) * 2 == forward + backward


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", ["batch_first", "batch_second"])
def test_flops_of_variants_equal_torchs(variant: str, layout: str) -> None:
    config = replace(TINY, **VARIANTS[variant])
    forward, backward = _counted(config, "plain", layout)
    assert counts.forward_flops(config, 2) == forward
    assert counts.backward_flops(config, 2) == backward


def test_a_fused_kernel_recomputes_the_scores() -> None:
    plan, samples = Plan(attention="sdpa"), 2
    shape = (samples, TINY.heads, TINY.tokens, TINY.head_width)
    products = [op for op in counts.operations(TINY, samples, plan) if op.kind == "bmm"]
    backward = sum(op.count * op.flops for op in products if op.phase == "backward")
    recomputed = counts.recomputed_flops(TINY, samples, plan)
    assert backward + recomputed == TINY.depth * sdpa_backward_flop_count(shape, shape, shape, shape)
    assert counts.recomputed_flops(TINY, samples, Plan(attention="plain")) == 0
    # The CPU's fused kernel is not known to FlopCounterMode, which then lacks attention and nothing else.
    images = torch.randn(samples, 3, 32, 32)
    with FlopCounterMode(display=False) as counter:
        ViT(TINY)(images).sum().backward()
    attention = sum(op.count * op.flops for op in products)
    assert counter.get_total_flops() + attention == samples * counts.model_flops_per_sample(TINY)


def test_flops_do_not_depend_on_the_plan() -> None:
    plans = [Plan(attention=a, layout=b) for a in ("plain", "sdpa") for b in ("batch_first", "batch_second")]
    totals = {sum(op.count * op.flops for op in counts.operations(TINY, 3, plan)) for plan in plans}
    assert totals == {3 * counts.model_flops_per_sample(TINY)}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("line", ["attention=plain", "attention=sdpa layout=batch_second"])
def test_operations_of_any_batch_are_those_listed_for_it(variant: str, line: str) -> None:
    config, plan = replace(TINY, **VARIANTS[variant]), Plan.parse(line)
    fused, copies = plan.attention == "sdpa", plan.layout == "batch_first"
    for batch in (1, 2, 3, 7, 64):
        listed = _listed(config, batch, fused=fused, copies=copies)
        assert counts.operations(config, batch, plan) == tuple(listed)


def test_traffic_shrinks_with_fusion_and_with_sequence_first() -> None:
    def traffic(attention: str, layout: str) -> int:
        plan = Plan(attention=attention, layout=layout)  # type: ignore[arg-type]
        return sum(
            op.count * (op.read_elements + op.written_elements) for op in counts.operations(TINY, 2, plan)
        )

    assert traffic("sdpa", "batch_first") < traffic("plain", "batch_second") < traffic("plain", "batch_first")


def _kept_bytes(model: ViT, images: torch.Tensor, *, autocast: bool) -> int:
    """Bytes of the distinct blocks of memory that autograd keeps, without parameters, buffers and images."""
    others = [*model.parameters(), *model.buffers(), images]
    known = {t.untyped_storage().data_ptr() for t in others}
    kept: dict[int, int] = {}
    alive = []  # so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        alive.append(tensor)
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast),
    ):
        model(images)
    return sum(kept.values())


FORMS = list(
    itertools.product(("O0", "O1", "O3"), ("plain", "sdpa", "math"), ("batch_first", "batch_second"))
)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("precision", "attention", "layout"), FORMS)
def test_activation_bytes_are_what_autograd_keeps(
    variant: str, precision: str, attention: str, layout: str
) -> None:
    config = replace(TINY, **VARIANTS[variant])
    plan = Plan(precision=precision, attention=attention, layout=layout)  # type: ignore[arg-type]
    dtype = torch.bfloat16 if precision == "O3" else torch.float32
    model = ViT(config, dtype=dtype)
    model.set_attention(plan.attention)
    model.set_layout(plan.layout)
    kept = _kept_bytes(model, torch.randn(5, 3, 32, 32, dtype=dtype), autocast=precision == "O1")
    assert counts.activation_bytes(config, 5, plan, device="cpu") == kept
