"""The table of what torch.autocast does by itself is true: each operation is run and its result's type looked at.

CUDA's autocast is seen without a GPU: fake tensors go through the dispatcher as real ones do, and nothing is computed.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers.op_lists import autocast_on
from helpers.op_samples import Make, call
from penstock.precision.lists.op_lists import name_of
from penstock.precision.lists.table import AUTOCAST, POLICIES, Policy

HALF = torch.bfloat16
# These ask the device itself, or have no rule for fake tensors: a GPU runs them, below.
ONLY_ON_A_GPU = ("torch.gru_cell", "torch.nn.functional.grid_sample")
ROWS = [
    (device, policy, name)
    for device, table in AUTOCAST.items()
    for policy, names in table.items()
    for name in names
]


def result(name: str, device: str, *dtypes: torch.dtype) -> torch.dtype:
    """Type of the result under autocast; complex ones stand for their parts."""
    with autocast_on(device):
        found = call(name, Make(device, *dtypes))
    return found.real.dtype if found.is_complex() else found.dtype


def check(device: str, policy: Policy, name: str) -> None:
    if policy == "half":
        assert result(name, device, torch.float32) == HALF
    elif policy == "fp32":
        assert result(name, device, HALF) == torch.float32
    elif policy == "promote":
        assert result(name, device, HALF) == HALF
        assert result(name, device, HALF, torch.float32) == torch.float32
    else:
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            result(name, device, HALF)


@pytest.mark.filterwarnings("ignore:.*chain_matmul is deprecated")
@pytest.mark.parametrize(("device", "policy", "name"), ROWS, ids=[f"{d}-{p}-{n}" for d, p, n in ROWS])
def test_autocast_does_as_the_table_says(device: str, policy: Policy, name: str) -> None:
    if device == "cuda" and name in ONLY_ON_A_GPU:
        pytest.skip("seen on a GPU only")
    with FakeTensorMode() if device == "cuda" else nullcontext():
        check(device, policy, name)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("policy", "name"), [(p, n) for d, p, n in ROWS if d == "cuda"])
def test_autocast_does_as_the_table_says_on_a_gpu(policy: Policy, name: str) -> None:
    check("cuda", policy, name)


def test_the_table_names_operations_once() -> None:
    for table in AUTOCAST.values():
        names = [name for policy in POLICIES for name in table.get(policy, ())]
        assert len(names) == len(set(names))
        assert [name_of(name) for name in names] == names, "each by the name that stands for it"
