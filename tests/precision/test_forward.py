"""Classes that stand in for a model's own, seen by code that asks for the class."""

from __future__ import annotations

import copy
import pickle
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.precision.lists import apply_modules, default_lists


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.width = width
        self.layer = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x))

    def fresh(self) -> Net:
        made = type(self)(self.width)
        made.load_state_dict(self.state_dict())
        return made


class Registered(nn.Module):
    kinds: ClassVar[dict[str, type[nn.Module]]] = {}

    def __init_subclass__(cls, *, key: str) -> None:
        super().__init_subclass__()
        Registered.kinds[key] = cls


class Member(Registered, key="member"):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.mark.parametrize("precision", ["O1", "O2", "O3"])
def test_another_instance_of_the_class_is_a_plain_one(precision: str) -> None:
    x = torch.randn(4, 8)
    model = penstock.accelerate(Net(), precision=precision, dtype="bf16")
    fresh = model.fresh()
    plain = Net()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(fresh(x), plain(x))
    for copied in (copy.deepcopy(fresh), pickle.loads(pickle.dumps(fresh))):
        assert type(copied) is Net
        assert torch.equal(copied(x), plain(x))
    again = penstock.accelerate(fresh, precision="O1", dtype="bf16")
    assert type(again).__mro__[1] is Net
    assert not torch.equal(again(x), plain(x))
    assert pickle.loads(pickle.dumps(again))(x).dtype == torch.float32


def test_so_is_another_instance_of_a_layers_class() -> None:
    lists = default_lists(torch.bfloat16, "cpu").with_(fp32_modules=("layer",))
    model = Net()
    apply_modules(model, lists)
    fresh: Any = type(model.layer)(8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model.layer(torch.ones(2, 8)).dtype == torch.float32
        assert fresh(torch.ones(2, 8)).dtype == torch.bfloat16
    model.layer = fresh
    apply_modules(model, lists)
    assert type(model.layer).__mro__[1] is nn.Linear


def test_registries_of_classes_keep_the_original() -> None:
    model = penstock.accelerate(Member(), precision="O1", dtype="bf16")
    assert Registered.kinds == {"member": Member}
    assert model(torch.ones(2, 8)).dtype == torch.float32
    assert isinstance(model, Member)
