"""What a type checker knows of `penstock.accelerate`: what goes in comes out. mypy reads this; nothing runs it."""

from __future__ import annotations

from typing import assert_type

import torch
from torch import nn

import penstock


class Mine(nn.Linear):
    """A model with an attribute of its own."""

    classes: int


def one_model(model: Mine) -> None:
    assert_type(penstock.accelerate(model), Mine)
    assert_type(penstock.accelerate(model, precision="O2", dtype=torch.bfloat16, norms="half"), Mine)
    assert_type(penstock.accelerate(model).classes, int)


def model_and_optimizer(model: Mine, optimizer: torch.optim.AdamW) -> None:
    assert_type(penstock.accelerate(model, optimizer), tuple[Mine, torch.optim.AdamW])
    wrapped, stepped = penstock.accelerate(model, optimizer, losses=2, scaler={"initial": 1024.0})
    assert_type(wrapped, Mine)
    assert_type(stepped, torch.optim.AdamW)


def lists(models: list[Mine], optimizers: list[torch.optim.SGD], both: tuple[Mine, nn.Conv2d]) -> None:
    assert_type(penstock.accelerate(models), list[Mine])
    assert_type(penstock.accelerate(models, optimizers), tuple[list[Mine], list[torch.optim.SGD]])
    assert_type(penstock.accelerate(both, optimizers[0]), tuple[tuple[Mine, nn.Conv2d], torch.optim.SGD])
    assert_type(penstock.accelerate(models[0], optimizers), tuple[Mine, list[torch.optim.SGD]])


def whatever_it_is(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    assert_type(penstock.accelerate(model, optimizer), tuple[nn.Module, torch.optim.Optimizer])
    penstock.accelerate("model")  # type: ignore[type-var]
    penstock.accelerate(model, "adamw")  # type: ignore[type-var]
