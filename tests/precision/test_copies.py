"""Copies of accelerated models are accelerated; what is pickled of them is plain, and loads without Penstock."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import penstock
from penstock.precision.copies import plain
from penstock.precision.lists import default_lists

LEVELS = [("O1", "bf16"), ("O1", "fp16"), ("O2", "bf16"), ("O2", "fp16"), ("O3", "bf16")]


class Net(nn.Module):
    """Holds a lock, which cannot be copied or pickled, and sees to that itself; a recurrent layer; a list of parts."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.inner = Locked()
        self.recurrent = nn.LSTM(4, 8, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.parts = [self.norm]  # type: ignore[assignment]
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.recurrent(self.inner(x))[0]
        out: Tensor = self.head(F.softmax(self.parts[0](hidden), -1))
        self.seen = out  # a tensor that autograd has made
        return out

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in super().__getstate__().items() if key not in ("lock", "seen")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.lock = threading.Lock()


class Locked(nn.Module):
    """The same, within; op lists treat it too, since it holds others."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.only = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.only(x)
        return out

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in super().__getstate__().items() if key != "lock"}


def trained(level: str, dtype: str, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: nn.Module = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True, eps=1e-4)
    model, optimizer = penstock.accelerate(model, optimizer, precision=level, dtype=dtype, **options)
    for step in range(2):
        optimizer.zero_grad()
        loss = model(torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(step))).square().mean()
        with penstock.scale_loss(loss, optimizer) as scaled:
            scaled.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model, optimizer


def saved(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


CLASSES = [Net, Locked, nn.LSTM, nn.LayerNorm, nn.Linear]


@pytest.mark.parametrize(("level", "dtype"), LEVELS)
def test_a_saved_model_is_plain_and_loads_without_penstock(level: str, dtype: str) -> None:
    model, _ = trained(level, dtype)
    state = model.state_dict()
    file = saved(model)
    names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    assert not [name for name in names if name.startswith("penstock")]
    file.seek(0)
    with torch.serialization.safe_globals(CLASSES):
        loaded = torch.load(file, weights_only=True)
    for twin in (loaded, pickle.loads(pickle.dumps(model)), plain(model)):
        assert [type(module) for module in twin.modules()] == [
            Net, Locked, nn.Linear, nn.LSTM, nn.LayerNorm, nn.Linear,
        ]  # fmt: skip
        assert twin.state_dict().keys() == state.keys()
        for name, value in twin.state_dict().items():
            assert value.dtype == torch.float32
            assert torch.equal(value, state[name]), name
        assert twin.parts[0] is twin.norm
        assert twin.recurrent._flat_weights[0] is twin.recurrent.weight_ih_l0
        x = torch.randn(2, 3, 4)
        torch.testing.assert_close(twin(x), model(x), rtol=0.03, atol=0.03)


@pytest.mark.parametrize(("level", "dtype"), LEVELS)
def test_a_copy_computes_as_its_original_and_is_saved_alike(level: str, dtype: str) -> None:
    model, _ = trained(level, dtype)
    x = torch.randn(2, 3, 4)
    twin = copy.deepcopy(model)
    assert twin.lock is not model.lock
    assert torch.equal(twin(x), model(x))
    assert type(pickle.loads(pickle.dumps(twin))) is Net
    with torch.no_grad():
        twin.get_parameter("head.weight").zero_()
    assert not (model.get_parameter("head.weight") == 0).all()
    shallow = copy.copy(model)
    assert shallow.get_parameter("head.weight") is model.get_parameter("head.weight")
    assert torch.equal(shallow(x), model(x))


def test_a_part_of_a_model_with_op_lists_of_its_own_is_saved_plain() -> None:
    lists = default_lists(torch.bfloat16).with_(fp32=["torch.nn.functional.gelu"], fp32_modules=["head"])
    model, _ = trained("O2", "bf16", lists=lists)
    part = torch.load(saved(model.get_submodule("head")), weights_only=False)
    assert type(part) is nn.Linear
    assert torch.equal(part.weight, model.state_dict()["head.weight"])


def test_the_class_is_the_models_own_to_whoever_asks() -> None:
    model, _ = trained("O1", "bf16")
    assert model.__class__ is Net
    assert isinstance(model, Net)
    head = model.get_submodule("head")
    parametrizations.weight_norm(head)
    x = torch.randn(2, 3, 4)
    model(x).sum().backward()
    parametrizations.weight_norm(model.get_submodule("inner.only"))

    class Other(Net):
        pass

    model.__class__ = Other  # as sharding does
    assert isinstance(model, Other)
    assert model.__class__ is Other
    assert model(x).dtype == torch.float32
    assert model.recurrent.weight_ih_l0.dtype == torch.float32
