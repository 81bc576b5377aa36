"""Levels of precision, the matmul switch, and the loss scaler."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from penstock.config.plan import Plan
from penstock.precision import autocast, cast_model, half_dtype


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool))

    def forward(self, x: Tensor, *, scale: Tensor | None = None, index: Tensor | None = None) -> Tensor:
        assert index is None or index.dtype == torch.int64
        y = self.norm(self.linear(x))
        return y if scale is None else y * scale


def test_half_dtype() -> None:
    assert half_dtype(Plan()) is None
    assert half_dtype(Plan(precision="O1")) == torch.bfloat16
    assert half_dtype(Plan(precision="O3", dtype="fp16")) == torch.float16


@pytest.mark.parametrize(
    ("precision", "expected"), [("O0", torch.float32), ("O1", torch.bfloat16), ("O3", torch.float32)]
)
def test_only_o1_casts_op_by_op(precision: str, expected: torch.dtype) -> None:
    linear = nn.Linear(4, 4)
    with autocast(Plan.parse(f"precision={precision}"), "cpu"):
        assert linear(torch.zeros(2, 4)).dtype == expected
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("precision", ["O0", "O1"])
def test_o0_and_o1_leave_the_model_alone(precision: str) -> None:
    net = Net()
    before = copy.deepcopy(net.state_dict())
    assert cast_model(net, Plan.parse(f"precision={precision}")) is net
    assert all(value.dtype == before[name].dtype for name, value in net.state_dict().items())
    assert not net._forward_pre_hooks


def test_o3_is_half_throughout_and_takes_fp32_inputs() -> None:
    net = Net()
    names = list(net.state_dict())
    cast_model(net, Plan(precision="O3"))
    assert list(net.state_dict()) == names
    assert {p.dtype for p in net.parameters()} == {torch.bfloat16}
    assert net.norm.running_mean is not None
    assert net.norm.running_mean.dtype == torch.bfloat16
    assert net.mask.dtype == torch.bool
    out = net(torch.randn(3, 4), scale=torch.ones(4), index=torch.zeros(1, dtype=torch.int64))
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert net.linear.weight.grad is not None
    assert net.linear.weight.grad.dtype == torch.bfloat16
    assert copy.deepcopy(net)(torch.randn(3, 4)).dtype == torch.bfloat16
