"""The operations of a foreign model, as recorded, against what is known of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.utils.flop_counter import FlopCounterMode

from penstock.config.activations import ACTIVATIONS, Mlp
from penstock.config.machine import Machine
from penstock.config.model import PRESETS, ViTConfig
from penstock.config.plan import Plan
from penstock.ladder.trace import trace
from penstock.models import create
from penstock.models.experts import MixtureOfExperts
from penstock.models.sublayers import MLP
from penstock.parallel.experts import Visits
from penstock.planner.describe import describe, totals
from penstock.planner.memory import pass_bytes
from penstock.planner.operators import Workload
from penstock.planner.prediction import predict, predict_workload
from penstock.planner.traced import as_planned

CPU = Machine(
    name="toy", device="cpu", source="measured", peak_flops={"fp32": 1e11}, memory_bytes_per_second=1e10,
    launch_seconds=1e-6,
)  # fmt: skip


def _square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


def _flops(work: Workload) -> float:
    return sum(count * op.flops for count, op in work.operators())


def test_a_perceptron_is_its_products_and_their_gradients() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    work = trace(model, torch.randn(4, 16), _square, 4)
    products = [(op.forward, op.m, op.n, op.k) for _, op in work.operators() if op.kind == "gemm"]
    # The input asks for no gradient, so the first layer has one product backward and the second has two.
    assert products[:2] == [(True, 4, 32, 16), (True, 4, 8, 32)]
    assert sorted(products[2:]) == [(False, 4, 32, 8), (False, 8, 32, 4), (False, 32, 16, 4)]
    assert (work.parameters, work.tensors, work.samples) == (16 * 32 + 32 + 32 * 8 + 8, 4, 4)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_roles_tell_what_a_product_is_for() -> None:
    """Fewer rows than columns, so that sizes say nothing: gradients of weights, and what fp8 multiplies."""
    config = ViTConfig(image_size=16, patch_size=8, width=48, depth=1, heads=2, mlp_width=96, classes=80)
    work = trace(create(config), torch.randn(1, 3, 16, 16), _square, 1)
    products = [op for _, op in work.operators() if op.kind == "gemm"]
    learning = [(int(op.m), op.n) for op in products if op.weights]
    assert sorted(learning) == sorted([(48, 192), (48, 48), (96, 48), (48, 96), (144, 48), (80, 48)])
    # The embedding of patches and the head are no linears of a block.
    sides = {frozenset((int(op.m), op.n)) for op in products if op.narrow and op.weights}
    assert sides == {frozenset(pair) for pair in ((144, 48), (48, 48), (96, 48))}


def test_views_cost_nothing_and_in_place_work_does() -> None:
    class Views(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(2, 8).t().unsqueeze(0)[0].mul_(2.0) + 0.0

    work = trace(nn.Sequential(Views(), nn.Linear(2, 1)), torch.randn(16), _square, 1)
    forward = [op.name for _, op in work.operators() if op.forward]
    assert not {"view", "t", "unsqueeze", "select", "detach"} & set(forward)
    assert "mul_" in forward


@pytest.mark.parametrize("attention", ["sdpa", "plain"])
def test_flops_are_those_of_torch_and_of_the_planner(attention: str) -> None:
    config = ViTConfig(image_size=16, patch_size=4, width=32, depth=2, heads=2, mlp_width=64, classes=10)
    model = create(config)
    model.set_attention(attention)
    images = torch.randn(3, 3, 16, 16)
    work = trace(model, images, _square, 3)
    assert _flops(work) == pytest.approx(3 * totals(config).model_flops, rel=0.02)
    counter = FlopCounterMode(display=False)
    with counter:
        _square(model, images).backward()
    if attention == "plain":
        assert _flops(work) == counter.get_total_flops()
    assert work.parameters == totals(config).parameters
    assert work.tensors == describe(config, Plan()).tensors


def test_a_traced_model_is_predicted_like_a_counted_one() -> None:
    config = ViTConfig(image_size=64, patch_size=8, width=128, depth=3, heads=4, mlp_width=512, classes=100)
    plan = Plan(micro_batch=4, attention="plain")
    model = create(config)
    model.set_attention("plain")
    traced = trace(model, torch.randn(4, 3, 64, 64), _square, 4)
    counted = pass_bytes(describe(config, plan, "cpu"), plan).kept
    assert traced.kept_bytes == pytest.approx(counted, rel=0.05)
    seconds = predict_workload(traced, CPU, plan).iteration_seconds
    assert seconds == pytest.approx(predict(config, CPU, plan).iteration_seconds, rel=0.15)


def test_lookups_read_rows_and_what_allocates_moves_nothing() -> None:
    table = nn.Embedding(1000, 8)
    ids = torch.tensor([1, 2, 3])

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        found: Tensor = model(ids)
        return (found * torch.empty_like(found).fill_(2.0)).sum()

    operators = [op for _, op in trace(table, ids, loss, 1).operators()]
    lookup = next(op for op in operators if op.name == "embedding")
    assert (lookup.read, lookup.written) == (4.0 * 24, 4.0 * 24)
    assert not any("empty" in op.name for op in operators)
    # The gradient is a whole table.
    assert next(op for op in operators if op.name == "embedding_dense_backward").written == 4.0 * 8000


def test_softmax_that_masks_may_hide_rows_from_is_four_kernels() -> None:
    """Of N scores in fp32: softmax reads and writes 8 N bytes; the comparison reads 4 N and writes N, which each row is
    reduced from; the choice reads and writes 8 N. Rows are as long as their dimension, and activations known."""

    def loss(model: nn.Module, scores: Tensor) -> Tensor:
        shares = torch.ops.aten._safe_softmax(model(scores), -1)
        shares = torch.softmax(shares.transpose(0, 1).contiguous(), 0)
        return nn.functional.silu(
            nn.functional.gelu(shares, approximate="tanh") * nn.functional.gelu(shares)
        ).sum()

    work = trace(nn.Linear(12, 24), torch.randn(6, 12), loss, 6)
    operators = [op for _, op in work.operators()]
    size = 6 * 24
    safe, plain = ([op for op in operators if op.name == name] for name in ("_safe_softmax", "_softmax"))
    assert [(op.read, op.written, op.launches) for op in safe] == [
        ((4 + 4 + 1 + 4) * size, (4 + 1 + 4) * size, 4)
    ]
    assert [(op.read, op.written, op.launches) for op in plain] == [(4 * size, 4 * size, 1)]
    assert {op.row for op in operators if op.kind == "softmax"} == {24}
    assert len([op for op in operators if op.kind == "softmax" and not op.forward]) == 2
    for forward in (True, False):
        activations = sorted(
            op.function for op in operators if op.kind == "activation" and op.forward == forward
        )
        assert activations == ["gelu", "gelu_tanh", "silu"]


@pytest.mark.parametrize("mlp", [name for name, row in ACTIVATIONS.items() if row.passes])
def test_activations_of_several_operators_are_counted_as_they_run(mlp: Mlp) -> None:
    """As they are listed of our own models, and GELU by tanh as libraries write it: operators of a tensor each, of
    which one computes tanh."""
    config = replace(PRESETS["gpt-tiny"], mlp=mlp)
    stack = config.graph.runs[0].stack
    rows = config.sequence
    work = trace(MLP(stack, stack.layers[0]), torch.randn(rows, stack.width), _square, 1)
    (block,) = describe(config, Plan(micro_batch=1), "cpu").blocks
    size = rows * stack.layers[0].perceptron.width
    traced = [op for _, op in work.operators() if op.elements == size and op.kind != "gemm"]
    listed = [op for op in (*block.forward, *block.backward) if op.name.startswith("mlp.activation")]
    for forward in (True, False):
        ours, theirs = ([op for op in each if op.forward == forward] for each in (listed, traced))
        assert sum(op.read + op.written for op in theirs) == pytest.approx(
            sum(op.read + op.written for op in ours)
        )
        assert (
            {op.function for op in theirs}
            == {op.function for op in ours}
            == {one.function for one in ACTIVATIONS[mlp].passes}
        )
    assert len(traced) == sum(op.launches for op in listed)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        x = model(x)
        return (0.5 * x * (1.0 + torch.tanh(0.79788 * (x + 0.044715 * torch.pow(x, 3.0))))).sum()

    work = trace(nn.Linear(8, 16), torch.randn(4, 8), loss, 1)
    tanhs = [op for _, op in work.operators() if op.function]
    assert [(op.name, op.function, op.kind, op.elements) for op in tanhs] == [
        ("tanh", "tanh", "activation", 64), ("tanh_backward", "tanh", "activation", 64),
    ]  # fmt: skip
    # Compiled, one kernel moves what the largest of them moves, and computes the tanh.
    compiled = as_planned(work, Plan(compile="whole"))
    (kernel, tanh) = [op for _, op in compiled.operators() if op.forward and op.kind != "gemm"]
    assert (kernel.kind, kernel.read, kernel.written) == ("pointwise", 2 * 4 * 64.0, 4 * 64.0)
    assert (tanh.function, tanh.elements, tanh.read, tanh.written, tanh.launches) == ("tanh", 64, 0, 0, 0)


@pytest.mark.parametrize(
    "changes",
    [{}, {"balance": 0.0}, {"z_loss": 0.1}, {"experts_per_token": 4}, {"shared_experts": 1}, {"router": "sigmoid"},
     {"router": "sigmoid", "router_normalised": True}, {"router_normalised": True}, {"mlp": "gelu"}, {"ranks": 2}],
)  # fmt: skip
def test_a_mixture_launches_what_is_listed_of_it(changes: dict[str, Any]) -> None:
    """Router, choice, visits and experts, forward and backward; and what sorts tokens that ranks exchange."""
    ranks, sizes = changes.get("ranks", 1), {name: one for name, one in changes.items() if name != "ranks"}
    config = replace(PRESETS["mixtral-tiny"], **sizes)
    stack, plan = config.graph.runs[0].stack, Plan(micro_batch=2, dp=ranks, ep=ranks)
    mixture = MixtureOfExperts(stack, stack.layers[-1])
    if ranks > 1:  # this process sends to itself what it would send to others
        distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
        assert distributed.group.WORLD is not None
        mixture.exchange = Visits(distributed.group.WORLD)
    x = torch.randn(2, config.sequence, stack.width, requires_grad=True)
    try:
        work = trace(mixture, x, lambda model, x: model(x).sum(), 2)
    finally:
        if ranks > 1:
            distributed.destroy_process_group()
    launched = [op.forward for _, op in work.operators()]
    (block,) = describe(config, plan, "cpu").blocks
    # A CPU does not copy counts to the host, and a range of numbers reads nothing that is recorded.
    unseen = 3 * (ranks > 1)
    for forward, ops, others in ((True, block.forward, 1 - unseen), (False, block.backward, 1)):
        listed = sum(op.launches for op in ops if op.module in ("router", "experts", "perceptron"))
        assert launched.count(forward) - others == listed, forward


def test_the_loss_of_half_logits_is_fp32() -> None:
    """Casts to it and back, and its own traffic, are those of fp32; compiled they are part of one kernel."""
    labels = torch.arange(4)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x), labels)

    work = trace(nn.Linear(16, 500), torch.randn(4, 16), loss, 4)
    size = 4 * 500
    half = as_planned(work, Plan(precision="O1", dtype="bf16"))
    moved = {(op.name, op.forward): (op.read, op.written) for _, op in half.operators()}
    assert moved["cast.logits", True] == (2.0 * size, 4.0 * size)
    assert moved["_log_softmax", True] == (4.0 * size, 4.0 * size)
    assert moved["_log_softmax_backward_data", False][1] == 4.0 * size
    assert moved["cast.logits", False] == (4.0 * size, 2.0 * size)
    assert half.kept_bytes is not None
    assert work.kept_bytes is not None
    assert half.kept_bytes == (work.kept_bytes + 4.0 * size) / 2
    names = {
        op.name for _, op in as_planned(work, Plan(precision="O1", dtype="bf16", compile="whole")).operators()
    }
    assert "cast.logits" not in " ".join(names)
    assert not any(op.name == "cast.logits" for _, op in as_planned(work, Plan()).operators())


def test_a_convolution_is_the_product_it_equals() -> None:
    work = trace(nn.Conv2d(3, 8, 3, padding=1), torch.randn(2, 3, 10, 10), _square, 2)
    convolution = next(op for _, op in work.operators() if op.kind == "conv")
    assert (convolution.m, convolution.n, convolution.k) == (2 * 10 * 10, 8, 3 * 9)
