"""What stands around a module keeps its order, is undone alone, copied with it, and printed."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.models.wrap import Around, arounds, exchanged, find, put_around, restore, show, swap, take_off


class Added(Around):
    kind = "recomputation"

    def __call__(self, x: Tensor) -> Tensor:
        return self.forward(x) + 1


class Doubled(Around):
    kind = "offload"

    def __call__(self, x: Tensor) -> Tensor:
        return self.forward(x) * 2


class Negated:
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = -super().forward(x)  # type: ignore[misc]
        return made


def _wrapped() -> nn.Module:
    model = nn.Sequential(nn.Identity(), nn.Identity())
    put_around(model[0], Added(model[0].forward))
    put_around(model[0], Doubled(model[0].forward))
    return model


X = torch.ones(1)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_class_that_is_laid_over_later_is_inside_and_copies_are_apart(copied: Any) -> None:
    model = copied(_wrapped())
    assert model(X) == 4
    swap(model[0], Negated)
    assert model(X) == 0  # (−1 + 1) · 2
    assert show(model) == "0: Identity, Negated, recomputation, offload"
    restore(model, Negated)
    assert model(X) == 4
    assert type(model[0]) is nn.Identity


@pytest.mark.parametrize(("kind", "left"), [(Added, 2), (Doubled, 2)])
def test_each_is_taken_off_alone(kind: type[Around], left: int) -> None:
    model = _wrapped()
    one = find(model[0], kind)  # type: ignore[index]
    assert one is not None
    take_off(model[0], one)  # type: ignore[index]
    assert model(X) == left
    assert [type(each) for each in arounds(model[0])] == [{Added, Doubled}.difference({kind}).pop()]  # type: ignore[index]


def test_the_order_is_held() -> None:
    module = nn.Identity()
    put_around(module, Doubled(module.forward))
    with pytest.raises(AssertionError):
        put_around(module, Added(module.forward))


def test_modules_are_exchanged_for_a_while() -> None:
    model, other = nn.Sequential(nn.Identity()), nn.Linear(1, 1)
    with exchanged(model, {"0": other}):
        assert model[0] is other
    assert type(model[0]) is nn.Identity
