"""Averages of weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from penstock.errors import CheckpointError, ConfigError
from penstock.optim import EMA, make_optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    dtype = next(model.parameters()).dtype
    optimizer.zero_grad()
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(step)).to(dtype)
    model(x).float().square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("form", ["foreach", "contiguous"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_formula(form: Any, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(5, 1100), nn.Linear(1100, 3)).to(dtype)
    model[0].bias.requires_grad_(False)
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad], form, lr=0.01)
    ema = EMA(model, 0.9, optimizer)
    expected = {name: p.detach().double() for name, p in model.named_parameters()}
    for step in range(20):
        train(model, optimizer, step)
        ema.update()
        expected = {n: 0.9 * expected[n] + 0.1 * p.detach().double() for n, p in model.named_parameters()}
    averages = ema.state_dict()
    assert list(averages) == list(expected)
    for name, value in expected.items():
        assert averages[name].dtype == torch.float32
        torch.testing.assert_close(averages[name].double(), value, rtol=1e-5, atol=1e-6)


def test_small_steps_survive_in_bf16() -> None:
    model = nn.Linear(1, 1, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.fill_(1.0)
    ema = EMA(model, 0.9999)
    with torch.no_grad():
        model.weight.fill_(2.0)
    ema.update()
    assert ema.state_dict()["weight"].item() == pytest.approx(1.0001, abs=1e-6)


def test_swaps_in_place_and_back() -> None:
    model = nn.Linear(5, 4)
    optimizer = make_optimizer(model.parameters(), "contiguous", lr=0.1)
    ema = EMA(model, 0.5, optimizer)
    train(model, optimizer, 0)
    ema.update()
    own = copy.deepcopy(model.state_dict())
    address = model.weight.data_ptr()
    with ema.swapped():
        assert torch.equal(model.weight, ema.state_dict()["weight"])
        assert not torch.equal(model.weight, own["weight"])
    assert torch.equal(model.weight, own["weight"])
    with pytest.raises(RuntimeError, match="on the way"), ema.swapped():
        raise RuntimeError("on the way")
    assert torch.equal(model.weight, own["weight"])
    assert model.weight.data_ptr() == address


def test_survives_new_buffers() -> None:
    model = nn.Linear(5, 4)
    optimizer = make_optimizer(model.parameters(), "contiguous", lr=0.1)
    ema = EMA(model, 0.5, optimizer)
    before = ema.state_dict()["weight"].clone()
    model.weight.data = model.weight.detach().clone() + 1
    train(model, optimizer, 0)
    ema.update()
    torch.testing.assert_close(ema.state_dict()["weight"], (before + model.weight.detach()) / 2)


def test_state_round_trips_and_strangers_are_refused() -> None:
    model = nn.Linear(5, 4)
    ema, other = EMA(model, 0.5), EMA(nn.Linear(5, 4), 0.5)
    other.load_state_dict(copy.deepcopy(ema.state_dict()))
    assert all(torch.equal(a, b) for a, b in zip(ema.state_dict().values(), other.state_dict().values()))
    kept = copy.deepcopy(other.state_dict())
    with pytest.raises(CheckpointError, match=r"missing: bias; unknown: scale; of another shape: weight"):
        other.load_state_dict({"weight": torch.zeros(2, 2), "scale": torch.zeros(1)})
    assert torch.equal(other.state_dict()["weight"], kept["weight"])
    with pytest.raises(ConfigError, match="ema_decay is 1"):
        EMA(model, 1.0)
