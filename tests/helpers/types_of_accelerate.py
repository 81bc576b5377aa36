"""What a type checker knows of `accelerate`: `make check` reads this file, and nothing runs it."""

from __future__ import annotations

from typing import assert_type

import torch
from torch import nn
from torch.optim import SGD, AdamW

from penstock import accelerate


class Mine(nn.Linear):
    classes: int


def what_goes_in_comes_out(model: Mine, both: tuple[Mine, nn.Conv2d], whatever: nn.Module) -> None:
    several, adamw, sgds = [model], AdamW(model.parameters()), [SGD(model.parameters())]
    assert_type(accelerate(model), Mine)
    assert_type(accelerate(model, precision="O2", dtype=torch.bfloat16, norms="half").classes, int)
    assert_type(accelerate(model, adamw, losses=2, scaler={"initial": 1024.0}), tuple[Mine, AdamW])
    assert_type(accelerate(several, sgds), tuple[list[Mine], list[SGD]])
    assert_type(accelerate(both, sgds[0]), tuple[tuple[Mine, nn.Conv2d], SGD])
    assert_type(accelerate(model, sgds), tuple[Mine, list[SGD]])
    assert_type(accelerate(whatever, adamw), tuple[nn.Module, AdamW])
    accelerate("model")  # type: ignore[type-var]
    accelerate(model, "adamw")  # type: ignore[type-var]
