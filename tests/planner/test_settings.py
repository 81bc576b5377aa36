"""What each setting of a Plan does to the prediction: at least the direction, and the arithmetic where it is exact."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from helpers.equality import TINY
from penstock.config.machine import load_machine
from penstock.config.model import PRESETS
from penstock.config.plan import Plan
from penstock.models import create
from penstock.models.anatomy import anatomy_of
from penstock.planner import predict, search
from penstock.planner.describe import describe
from penstock.planner.prediction import Prediction
from penstock.products.convert import convert_linears

A100, H100 = load_machine("a100-80g"), load_machine("h100")
GPT = PRESETS["gpt-22b"]
BASE = Plan(
    precision="O2", optimizer="fused", compile="blocks", attention="flash", tp=8, sp=True, dp=8, accumulate=8,
    sharding="zero1",
)  # fmt: skip


def at(**changes: object) -> Prediction:
    return predict(GPT, A100, replace(BASE, **changes))  # type: ignore[arg-type]


def test_states_are_shared_out_step_by_step() -> None:
    """Bytes per weight of the device that holds a stage: half weights beside fp32 masters, until the shards of the
    weights are the masters."""
    held = at(sharding="ddp").memory["weights"] / 2
    for sharding, sizes in (
        ("ddp", (2, 4, 8, 2)), ("zero1", (2, 4 / 8, 8 / 8, 4)), ("zero2", (2, 4 / 8, 8 / 8, 4 / 8)),
        ("fsdp", (4 / 8, 0, 8 / 8, 4 / 8)), ("hsdp", (4 / 4, 0, 8 / 4, 4 / 4)),
    ):  # fmt: skip
        for precision in ("O2",) if sharding == "ddp" else ("O1", "O2"):
            one = at(precision=precision, sharding=sharding, shard=4 if sharding == "hsdp" else 1)
            found = [
                one.memory[name] / held for name in ("weights", "master_weights", "optimizer", "gradients")
            ]
            assert found == pytest.approx(sizes, rel=1e-6), (sharding, precision)


def test_autocast_keeps_a_copy_of_weights_that_are_not_shared_out() -> None:
    whole, shards = at(precision="O1", sharding="ddp"), at(precision="O1", sharding="fsdp")
    products = sum(
        count * op.n * op.k
        for count, op in describe(GPT, BASE).operators()
        if op.kind == "gemm" and op.forward and op.name != "head"
    )
    assert whole.activations["cast_weights"] == pytest.approx(2 * products)
    assert "cast_weights" not in shards.activations
    assert shards.memory["gathered_weights"] == at(sharding="fsdp").memory["gathered_weights"]


@pytest.mark.parametrize("compiled", [False, True])
def test_linears_in_fp8_keep_a_byte_a_weight_and_no_half_copy(compiled: bool) -> None:
    """As the layers do at O1, whose fp32 weights they round directly: eager code keeps them for the backward pass, and
    compiled code rounds them again."""
    line = "precision=O1 products=fp8_tensorwise" + " compile=blocks" * compiled
    (block,) = describe(TINY, Plan.parse(line)).blocks
    planned = sum(op.kept for op in block.forward if op.group == "cast_weights")
    assert all(op.name != "cast.gradients" for op in block.backward if op.linear)

    model = create(TINY)
    convert_linears(model, "fp8_tensorwise", emulate=True)
    layer = anatomy_of(model).block_modules(model)[0]
    shapes, kept = {p.shape for p in layer.parameters() if p.ndim == 2}, []

    def keep(saved: Tensor) -> Tensor:
        if saved.shape in shapes and not isinstance(saved, nn.Parameter):
            kept.append(saved.nbytes)
        return saved

    x = torch.randn(2, 5, TINY.width, requires_grad=True)
    call = torch.compile(layer, backend="aot_eager_decomp_partition") if compiled else layer
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved), torch.autocast("cpu"):
        call(x)
    assert sum(kept) == planned == (not compiled) * sum(p.numel() for p in layer.parameters() if p.ndim == 2)


def test_bytes_per_parameter_are_sixteen_and_what_else_is_asked_for() -> None:
    """Weights and gradients in half, master weights and two moments in fp32: 2 + 2 + 12."""
    # Gradients stay from one micro-batch to the next.
    plan = Plan(precision="O2", optimizer="fused", attention="flash", accumulate=2)
    for changes, size in (
        ({}, 16.0), ({"gradients": "fp32"}, 18.0), ({"algorithm": "sgd"}, 12.0),
        ({"precision": "O3"}, 8.0), ({"precision": "O1"}, 16.0),
    ):  # fmt: skip
        one = predict(GPT, A100, replace(plan, **changes))  # type: ignore[arg-type]
        states = sum(one.memory[name] for name in ("weights", "gradients", "optimizer", "master_weights"))
        assert states / one.parameters == pytest.approx(size, rel=1e-5), changes


def test_activations_by_kind_are_all_of_them() -> None:
    for changes in (
        {}, {"recompute": "full", "recompute_every": 2}, {"recompute": "full"}, {"attention": "plain"},
        {"tp": 2, "pp": 4, "dp": 1, "sharding": "ddp", "sp": False},
    ):  # fmt: skip
        one = at(**changes)
        assert sum(one.activations.values()) == pytest.approx(one.memory["activations"], rel=1e-6), changes
    assert set(at(recompute="full").activations) == {"checkpoints", "masks"}  # of the embeddings' dropout
    assert at(attention="plain").activations["scores"] > at().memory["activations"] / 4
    assert "scores" not in at().activations
    assert at(tp=2, pp=4, dp=1, sharding="ddp", sp=False).micro_batches_held == 4
    vit = predict(PRESETS["vit-b16"], A100, Plan(micro_batch=64))
    assert sum(vit.activations.values()) == vit.memory["activations"]


def test_what_is_not_hidden_is_paid_for() -> None:
    assert at(overlap=False).seconds["data"] > at().seconds["data"]
    exposed = [at(tp_overlap=kind).seconds["tensor"] for kind in ("none", "weights", "all")]
    assert exposed == sorted(exposed, reverse=True)
    assert exposed[0] > 1.3 * exposed[1] > 1.3 * exposed[2]


def test_compilation_merges_memory_bound_operators() -> None:
    assert at(compile="none").seconds["pointwise"] > at().seconds["pointwise"]
    assert at(compile="whole").seconds["output"] < at().seconds["output"]


def test_context_parallelism_splits_tokens() -> None:
    model = replace(PRESETS["llama3-8b"], sequence=131072)
    plan = Plan(precision="O1", sharding="fsdp", attention="flash", compile="blocks", recompute="full", dp=8)
    whole = predict(model, H100, plan)
    split = predict(model, H100, replace(plan, dp=1, cp=8))
    assert split.memory["activations"] == pytest.approx(whole.memory["activations"] / 8, rel=0.01)
    assert split.gpus == whole.gpus
    best = search(model, H100, 16, global_batch=4)[0]
    assert best.plan.cp > 1
