"""All forms of the optimizer give the same weights, and each loads what any other saved."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from penstock.errors import ConfigError
from penstock.optim import clipped_step, make_optimizer, parameter_groups
from penstock.optim.clip import fused_sgd_works
from penstock.optim.contiguous import Contiguous

FORMS = ("loop", "foreach", "fused", "contiguous")


def model_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    # Odd sizes, so that vector loops have tails and parameters do not end on a boundary.
    return nn.Sequential(nn.Linear(7, 13), nn.GELU(), nn.LayerNorm(13), nn.Linear(13, 5)).to(dtype)


def optimizer_of(model: nn.Module, form: Any, **options: Any) -> torch.optim.Optimizer:
    options = {"lr": 3e-3} | options
    return make_optimizer(parameter_groups(model, weight_decay=0.1), form, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, *, start: int = 0) -> None:
    dtype = next(model.parameters()).dtype
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(6, 7, generator=generator).to(dtype)
        optimizer.zero_grad()
        (model(x).float() - 1).square().mean().backward()
        clipped_step(optimizer, max_norm=0.5)


@pytest.mark.parametrize("algorithm", ["adamw", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_fifty_steps_give_the_same_weights(dtype: torch.dtype, algorithm: Any) -> None:
    trained = {}
    half_sgd = algorithm == "sgd" and dtype == torch.bfloat16
    for form in FORMS:
        model = model_of(dtype)
        if half_sgd and form in ("fused", "contiguous") and not fused_sgd_works(dtype):
            with pytest.raises(ConfigError, match="does not update half weights on a CPU"):
                optimizer_of(model, form, algorithm=algorithm)
            continue
        before = copy.deepcopy(model.state_dict())
        optimizer = optimizer_of(model, form, algorithm=algorithm, lr=3e-3 if algorithm == "adamw" else 0.1)
        assert isinstance(optimizer, Contiguous) == (form == "contiguous")
        assert ("momentum" in optimizer.param_groups[0]) == (algorithm == "sgd")
        train(model, optimizer, 50)
        trained[form] = model.state_dict()
        assert all(not torch.equal(before[name], value) for name, value in trained[form].items())
    for form in [*trained][1:]:
        for name, expected in trained["loop"].items():
            if dtype == torch.bfloat16:
                # Loop and foreach round after each operation, fused once per step: over 50 steps of 3e-3 that is a
                # few units in the last place of weights near 1 (2^-8 each). Measured: at most 0.014.
                torch.testing.assert_close(trained[form][name], expected, atol=0.03, rtol=0.016)
            else:
                torch.testing.assert_close(trained[form][name], expected)  # measured: at most 1.2e-7 in fp32
    for name, expected in trained.get("fused", {}).items():
        # The same kernel over the same numbers, wherever they lie.
        torch.testing.assert_close(trained["contiguous"][name], expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("source", FORMS)
@pytest.mark.parametrize("target", FORMS)
def test_state_moves_between_forms(source: str, target: str) -> None:
    model = model_of()
    optimizer = optimizer_of(model, source)
    train(model, optimizer, 5)
    twin = copy.deepcopy(model)
    saved = copy.deepcopy(optimizer.state_dict())

    resumed = optimizer_of(twin, target)
    resumed.load_state_dict(saved)
    again = resumed.state_dict()
    assert again["state"].keys() == saved["state"].keys()
    for index, state in saved["state"].items():
        assert list(again["state"][index]) == list(state)
        for key, value in state.items():
            assert torch.equal(again["state"][index][key], value), key
            assert again["state"][index][key].shape == value.shape
    flags = {"loop": (False, False), "foreach": (True, False)}.get(target, (False, True))
    assert all((group["foreach"], group["fused"]) == flags for group in resumed.param_groups)

    train(model, optimizer, 5, start=5)
    train(twin, resumed, 5, start=5)
    exact = source == target
    for mine, theirs in zip(twin.parameters(), model.parameters()):
        if exact:
            assert torch.equal(mine, theirs)
        else:
            torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(ConfigError, match="choose one of loop, foreach, fused, contiguous"):
        make_optimizer(model_of().parameters(), "flat", lr=1e-3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no parameters"):
        make_optimizer([], "loop", lr=1e-3)
