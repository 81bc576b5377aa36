"""The properties of a Plan's level, and what they do to a model that `build` makes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from penstock.build import build
from penstock.config.numerics import numerics_of
from penstock.config.plan import Plan
from penstock.precision import properties_of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool))

    def forward(self, x: Tensor, *, scale: Tensor | None = None, index: Tensor | None = None) -> Tensor:
        assert index is None or index.dtype == torch.int64
        y: Tensor = self.linear(x)
        self.product = y.dtype
        y = self.norm(y)
        return y if scale is None else y * scale


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_plan_has_the_properties_of_its_level(level: str, dtype: str) -> None:
    found = numerics_of(Plan.parse(f"precision={level} dtype={dtype}"))
    scale = {"loss_scale": "dynamic"} if dtype == "fp16" else {}
    assert found == properties_of(level, dtype=dtype, **scale)
    assert numerics_of(Plan()) == properties_of("O0")


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_o0_and_o1_leave_the_weights_alone(level: str) -> None:
    net = Net()
    before = copy.deepcopy(net.state_dict())
    built = build(net, Plan.parse(f"precision={level}"))
    assert built.model is net
    assert all(value.dtype == before[name].dtype for name, value in net.state_dict().items())
    out = net(torch.randn(3, 4))
    assert net.product == (torch.float32 if level == "O0" else torch.bfloat16)
    assert out.dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")


def test_o3_is_half_throughout_and_takes_fp32_inputs() -> None:
    net = Net()
    names = list(net.state_dict())
    build(net, Plan(precision="O3"))
    assert list(net.state_dict()) == names
    assert {p.dtype for p in net.parameters()} == {torch.bfloat16}
    assert net.norm.running_mean is not None
    assert net.norm.running_mean.dtype == torch.bfloat16
    assert net.mask.dtype == torch.bool
    out = net(torch.randn(3, 4), scale=torch.ones(4), index=torch.zeros(1, dtype=torch.int64))
    assert out.dtype == torch.float32
    assert net.product == torch.bfloat16
    out.sum().backward()
    assert net.linear.weight.grad is not None
    assert net.linear.weight.grad.dtype == torch.bfloat16
    assert torch.equal(copy.deepcopy(net)(torch.randn(3, 4)) * 0, torch.zeros(3, 4))
