"""What fp16 would lose of gradients, where an overflow begins, and that nothing is left behind."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.build import build
from penstock.config.model import ViTConfig
from penstock.config.plan import Plan
from penstock.errors import ConfigError
from penstock.precision import report


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(torch.tanh(self.fc1(self.norm(x))))


class Net(nn.Module):
    """Two blocks, with batch norm and dropout, which a pass changes and draws for."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.5)
        self.same = nn.Identity()
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.same(self.dropout(self.norm(x))))


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 8), torch.randint(0, 4, (6,))


@pytest.mark.parametrize("precision", ["O0", "O1", "O2", "O3"])
def test_each_level_shows(precision: str) -> None:
    model = Net()
    found = report(model, batch(), precision=precision)
    assert found.precision.startswith(f"{precision}")
    assert found.scale == 1.0
    assert found.compared_scale == 2.0**16
    assert found.loss == pytest.approx(found.loss_fp32, rel=0.05)
    assert (found.loss == found.loss_fp32) == (precision == "O0")
    assert all(p.dtype == torch.float32 for p in model.parameters())


class Scaled(nn.Module):
    """Weights whose gradients are given."""

    def __init__(self, *factors: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(len(factors)))
        self.factors = torch.tensor(factors)

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * self.factors + x * 0.0).sum()


def test_shares_of_planted_gradients() -> None:
    # Zero; lost with and without scale; lost without; kept; infinite with scale 2^4; infinite.
    model = Scaled(0.0, 2.0**-30, 2.0**-26, -(2.0**-24), 1.0, 2.0**14, -65519.0, 65536.0)
    found = report(model, torch.ones(8), loss=lambda m, x: m(x), precision="O0", scale=2.0**4)
    outputs, weights = found.gradients
    assert (weights.layer, weights.kind, weights.values) == ("Scaled", "weights", 8)
    assert (weights.zero, weights.lost, weights.lost_scaled) == (1 / 8, 2 / 8, 1 / 8)
    assert (weights.infinite, weights.infinite_scaled, weights.largest) == (1 / 8, 3 / 8, 65536.0)
    assert (outputs.kind, outputs.values, outputs.largest) == ("activations", 1, 1.0)
    assert found.total("weights") is not None
    assert found.largest_scale == 0.5
    odd = report(model, torch.ones(8), loss=lambda m, x: m(x), precision="O0", scale=31.0)
    assert (odd.scale, odd.compared_scale) == (31.0, 16.0)
    assert odd.gradients == found.gradients
    wrong = report(Scaled(float("nan"), 1.0), torch.ones(2), loss=lambda m, x: m(x), precision="O0")
    assert wrong.gradients[1].infinite == 0.5
    assert str(wrong.overflow) == "the output of Scaled"


def test_each_layer_has_its_gradients_once() -> None:
    found = report(Net(), batch())
    seen = [(one.layer, one.kind) for one in found.gradients]
    assert len(set(seen)) == len(seen)
    assert ("same", "activations") not in seen  # passes on the tensor it was given
    assert ("blocks.0", "activations") not in seen  # has no weights of its own
    sizes = {one.layer: one.values for one in found.gradients if one.kind == "activations"}
    assert sizes["blocks.0.fc1"] == 6 * 16
    assert sizes["head"] == 6 * 4
    assert [layer for layer, kind in seen if kind == "weights"] == [
        "blocks.0.norm", "blocks.0.fc1", "blocks.0.fc2", "blocks.1.norm", "blocks.1.fc1", "blocks.1.fc2", "norm",
        "head",
    ]  # fmt: skip


def state(model: nn.Module) -> Any:
    return (
        {name: value.clone() for name, value in model.state_dict().items()},
        [(p, p.grad if p.grad is None else p.grad.clone()) for p in model.parameters()],
        torch.get_rng_state(),
        [module.training for module in model.modules()],
        [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        [type(m) for m in model.modules()],
    )


def same(before: Any, after: Any) -> None:
    torch.testing.assert_close(before[0], after[0], rtol=0, atol=0)
    for (was, gradient), (now, new) in zip(before[1], after[1], strict=True):
        assert was is now
        torch.testing.assert_close(gradient, new, rtol=0, atol=0)
    assert torch.equal(before[2], after[2])
    assert before[3:] == after[3:]


@pytest.mark.parametrize("accelerated", [None, "O1", "O2", "O3"])
def test_everything_is_as_before(accelerated: str | None) -> None:
    model = Net()
    model.dropout.eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if accelerated:
        model, optimizer = penstock.accelerate(model, optimizer, precision=accelerated, dtype="fp16")
    x, target = batch()
    model(x).sum().backward()
    stepped = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(stepped.append)
    before = state(model)
    for precision in [None] if accelerated else ["O0", "O1", "O2", "O3"]:
        report(model, (x, target), precision=precision)
        same(before, state(model))
    assert not stepped
    # And it trains on as a twin does that nobody looked at.
    if accelerated is None:
        twin = copy.deepcopy(model)
        report(model, (x, target))
        torch.manual_seed(3)
        ours = model(x)
        torch.manual_seed(3)
        assert torch.equal(ours, twin(x))


def test_an_accelerated_model_is_seen_as_it_is() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = penstock.accelerate(
        model, optimizer, precision="O2", dtype="fp16", scaler={"initial": 512.0}
    )
    found = report(model, batch(), optimizer=optimizer)
    assert (found.scale, found.compared_scale) == (512.0, 512.0)
    assert found.precision.startswith("O2 in fp16")
    assert report(model, batch()).scale == 2.0**16
    assert "weights fp16" in report(nn.parallel.DataParallel(model).module, batch()).precision
    with pytest.raises(ConfigError, match="accelerated as O2, but the report was asked for as O1"):
        report(model, batch(), precision="O1")


@pytest.mark.parametrize(("plan", "precision"), [("O2", "O2"), ("O3", "O3")])
def test_a_model_that_a_plan_has_built(plan: str, precision: str) -> None:
    config = ViTConfig(
        image_size=8, patch_size=4, channels=1, width=16, depth=1, heads=2, mlp_width=32, classes=10
    )
    built = build(config, Plan.parse(f"precision={plan} dtype=bf16"))
    given = (torch.randn(4, 1, 8, 8), torch.randint(0, 10, (4,)))
    before = state(built.model)
    found = report(built.model, given, loss=built.loss, precision=precision)
    same(before, state(built.model))
    assert found.precision.startswith(f"{precision} in bf16")
    assert found.loss == pytest.approx(found.loss_fp32, rel=0.05)
    assert report(built.model, given, loss=built.loss).precision == found.precision
    cast = Net().bfloat16()
    with pytest.raises(ConfigError, match="has bfloat16 weights; say whether"):
        report(cast, batch())


def test_an_overflow_is_found_at_the_scale_that_causes_it() -> None:
    model, given = Net(), batch()
    assert report(model, given, dtype="fp16").overflow is None
    found = report(model, given, dtype="fp16", scale=2.0**22)
    assert found.overflow is not None
    assert found.overflow.where in ("backward pass", "gradient of the output")
    assert found.total("activations").infinite_scaled > 0
    assert f"An overflow begins in {found.overflow}." in str(found)


def test_one_model_at_a_time() -> None:
    with pytest.raises(ConfigError, match="given a list as model; give it one"):
        report([Net()], batch())  # type: ignore[arg-type]


@dataclass
class Batch:
    """As a loader makes it: more than tensors, in any order."""

    ids: Any
    targets: Tensor
    inputs: Tensor


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        from types import SimpleNamespace

        logits = self.inner(x)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SimpleNamespace(loss=loss, logits=logits)


def test_losses_that_are_found_by_themselves() -> None:
    x, target = batch()
    model = WithLoss()
    own = report(model, {"x": x, "labels": target}, precision="O0").loss
    assert report(model, (x, target), precision="O0").loss == pytest.approx(own)
    assert report(model, x, loss=lambda m, b: m(b).logits.sum(), precision="O0").loss != own
    loaded = Batch(x.numpy(), target, x)
    assert report(model, loaded, precision="O0").loss == pytest.approx(own)
    for wrong in (x, (x, torch.randn(6, 4))):
        with pytest.raises(ConfigError, match="give loss="):
            report(model, wrong)
    with pytest.raises(ConfigError, match=r"shape \(6, 4\), but must return a scalar"):
        report(model, x, loss=lambda m, b: m(b).logits)
    frozen = WithLoss().requires_grad_(False)
    with pytest.raises(ConfigError, match="No gradient flows"):
        report(frozen, (x, target))


def test_text_and_json_say_it() -> None:
    model = Net()
    with torch.no_grad():
        model.head.weight.mul_(2.0**-20)
    found = report(model, batch(), dtype="fp16")
    text = str(found)
    for part in ("O1 in fp16", "2^16", "all layers", "blocks.0.fc1", "No overflow."):
        assert part in text, part
    stored = json.loads(json.dumps(found.to_dict()))
    assert stored["gradients"][0]["layer"] == found.gradients[0].layer
    assert stored["overflow"] is None
    assert stored["largest_scale"] == found.largest_scale


def test_a_compiled_model_is_looked_into() -> None:
    model = Net()
    model.blocks[0].compile(backend="aot_eager")
    found = report(torch.compile(model, backend="aot_eager"), batch(), precision="O0")
    assert {one.layer for one in found.gradients} >= {"blocks.0.fc1", "head"}


def test_a_recurrent_layer_keeps_its_weights() -> None:
    model = nn.LSTM(4, 4)
    penstock.accelerate(model, precision="O3", dtype="bf16")
    weights = list(model._flat_weights)
    found = report(model, torch.randn(3, 2, 4), loss=lambda m, x: m(x)[0].sum())
    assert found.loss == pytest.approx(found.loss_fp32, abs=0.2)
    assert all(a is b for a, b in zip(weights, model._flat_weights, strict=True))


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    model = Net().cuda()
    found = report(model, batch(), dtype="fp16")  # the batch is moved
    assert found.precision.startswith("O1 in fp16")
    assert found.overflow is None
