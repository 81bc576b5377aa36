"""Nested state as JSON and tensors gives back the same tree, and refuses what JSON could not carry."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest
import torch

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
