"""Nested state as JSON and tensors gives back the same tree, and refuses what JSON could not carry."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from penstock.checkpoint import by_index, by_name
from penstock.checkpoint.tree import pack, unpack
from penstock.errors import CheckpointError


def test_an_optimizer_state_and_generators_survive_json() -> None:
    tree = {
        "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(2, 2)}},
        "param_groups": [{"lr": 0.1 + 0.2, "betas": (0.9, 0.999), "fused": None, "params": [0, 1]}],
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "odd": {"$tensor": "not one", "nan": math.nan, "inf": -math.inf, "flag": True},
        "scalar": np.float32(0.1),
    }
    document, tensors = pack(tree, "root")
    back = unpack(json.loads(json.dumps(document)), tensors)
    assert torch.equal(back["state"][0]["exp_avg"], tree["state"][0]["exp_avg"])
    assert back["param_groups"] == tree["param_groups"]
    assert back["python"] == tree["python"]
    kind, keys, *rest = back["numpy"]
    assert (kind, rest) == (tree["numpy"][0], list(tree["numpy"][2:]))
    assert keys.dtype == np.uint32
    assert np.array_equal(keys, tree["numpy"][1])
    assert back["odd"]["$tensor"] == "not one"
    assert math.isnan(back["odd"]["nan"])
    assert back["odd"]["inf"] == -math.inf
    assert back["odd"]["flag"] is True
    assert back["scalar"] == float(np.float32(0.1))
    assert sorted(tensors) == ["root.numpy.1", "root.state.0.exp_avg", "root.state.0.step"]


def test_what_could_only_be_pickled_is_refused_with_its_place() -> None:
    with pytest.raises(TypeError, match=r"state at 'a\.1' is a function"):
        pack({"a": [1, print and (lambda: 0)]})


def test_a_missing_tensor_is_named() -> None:
    with pytest.raises(CheckpointError, match="names tensor 'x'"):
        unpack({"$tensor": "x"}, {})


# Optimizer state by name finds its parameters again, in whatever order and numbering they come.


def optimizer(model: nn.Module, order: list[str], split: int, **options: Any) -> torch.optim.Optimizer:
    named = dict(model.named_parameters())
    groups = [order[:split], order[split:]]
    made = torch.optim.AdamW(
        [
            {"params": [named[n] for n in g], "param_names": g, "weight_decay": 0.1 * i, **options}
            for i, g in enumerate(groups)
        ],
        lr=1e-2,
    )
    for name, parameter in named.items():
        parameter.grad = torch.full_like(parameter, len(name))
    made.step()
    return made


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))


def test_state_follows_its_parameter_into_another_order() -> None:
    one = optimizer(model(), ["0.weight", "1.bias", "0.bias", "1.weight"], 2)
    stored = by_name(one.state_dict() | {"penstock": {"scale": 8.0}})
    assert set(stored["state"]) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert stored["param_groups"][1]["params"] == ["0.bias", "1.weight"]
    assert "param_names" not in stored["param_groups"][1]
    two = optimizer(model(), ["1.bias", "0.weight", "1.weight", "0.bias"], 2)
    back = by_index(stored, two.state_dict())
    assert back["penstock"] == {"scale": 8.0}
    two.load_state_dict(back)
    names = ["1.bias", "0.weight", "1.weight", "0.bias"]
    for number, entry in two.state_dict()["state"].items():
        assert all(torch.equal(value, stored["state"][names[number]][key]) for key, value in entry.items())
    assert two.param_groups[0]["param_names"] == ["1.bias", "0.weight"]


def test_an_optimizer_needs_names() -> None:
    net = model()
    with pytest.raises(ValueError, match=r"4 parameters and 0 names.*named_parameters"):
        by_name(torch.optim.SGD(net.parameters(), lr=0.1).state_dict())
    made = torch.optim.SGD(net.named_parameters(), lr=0.1, momentum=0.9)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    made.step()
    stored = by_name(made.state_dict())
    assert list(stored["state"]) == [name for name, _ in net.named_parameters()]
    made.load_state_dict(by_index(stored, made.state_dict()))
    made.param_groups[0]["param_names"] = ["a", "b", "a", "c"]
    with pytest.raises(ValueError, match="one name"):
        by_name(made.state_dict())


def test_another_model_or_grouping_is_refused() -> None:
    order = ["0.weight", "1.bias", "0.bias", "1.weight"]
    stored = by_name(optimizer(model(), order, 2).state_dict())
    with pytest.raises(CheckpointError, match="with different settings"):
        by_index(stored, optimizer(model(), order, 3).state_dict())
    other = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2, bias=False))
    with pytest.raises(CheckpointError, match=r"also has \['1.bias'\]"):
        by_index(stored, optimizer(other, ["0.weight", "0.bias", "1.weight"], 2).state_dict())
