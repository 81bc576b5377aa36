"""Tensors in containers of all kinds, as models take and return them."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator, MutableMapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.containers import replaced, tensors
from penstock.precision.overflow import tensors_of

Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass
class Record:
    out: Any
    name: str = "record"


class Named(dict[str, Any]):
    """A dict with an attribute, and a constructor of its own."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


class Own(MutableMapping[str, Any]):
    """A mapping that keeps its items in an attribute."""

    def __init__(self, **items: Any) -> None:
        self.items_ = items

    def __getitem__(self, key: str) -> Any:
        return self.items_[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)


class Items(list[Any]):
    pass


class Triple(tuple[Any, ...]):
    pass


def named(x: Tensor) -> Named:
    made = Named("mine")
    made["out"] = x
    return made


KINDS: dict[str, Callable[[Tensor], Any]] = {
    "dict": lambda x: {"out": x}, "OrderedDict": lambda x: OrderedDict(out=x),
    "defaultdict": lambda x: defaultdict(list, out=x), "dict of one's own": named,
    "UserDict": lambda x: UserDict(out=x), "mapping of one's own": lambda x: Own(out=x),
    "proxy": lambda x: MappingProxyType({"out": x}), "namespace": lambda x: SimpleNamespace(out=x, name="kept"),
    "list": lambda x: [x, "text"], "list of one's own": lambda x: Items([x]), "UserList": lambda x: UserList([x]),
    "deque": lambda x: deque([x], maxlen=3), "tuple": lambda x: (x, None),
    "tuple of one's own": lambda x: Triple([x, x, 1]), "named tuple": lambda x: Pair(x, 1),
    "torch's own": lambda x: torch.max(x, 0), "dataclass": lambda x: Record(x),
    "nested": lambda x: OrderedDict(a=[UserDict(b=deque([x]))]),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_each_container_keeps_its_type_and_its_own(kind: str) -> None:
    x = torch.ones(3, 3)
    before = KINDS[kind](x)
    after = replaced(before, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
    assert type(after) is type(before)
    assert {t.dtype for t in tensors_of(after)} == {torch.float64}
    assert {t.dtype for t in tensors_of(before)} == {torch.float32}, "the given one is as it was"
    assert len(list(tensors(after))) == len(list(tensors(before))) > 0


def test_what_containers_hold_besides() -> None:
    x = torch.ones(2)
    by_key = replaced(KINDS["defaultdict"](x), Tensor.double)
    assert by_key["absent"] == []
    assert replaced(KINDS["deque"](x), Tensor.double).maxlen == 3
    assert replaced(KINDS["dict of one's own"](x), Tensor.double).name == "mine"
    assert replaced(KINDS["namespace"](x), Tensor.double).name == "kept"
    size = x.shape
    assert replaced(size, Tensor.double) is size
    unknown = object()
    assert replaced([unknown], Tensor.double) == [unknown]


class Wrapping(nn.Module):
    """Returns its output in a container, or takes its input out of one."""

    def __init__(self, kind: str, *, takes: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.kind, self.takes = kind, takes

    def forward(self, x: Any) -> Any:
        y = self.layer(next(tensors(x)))
        return y if self.takes else KINDS[self.kind](y)


@pytest.mark.parametrize("kind", KINDS)
def test_models_return_fp32_in_any_container(kind: str) -> None:
    model = penstock.accelerate(Wrapping(kind), precision="O1", dtype="bf16")
    assert {t.dtype for t in tensors_of(model(torch.ones(3, 3)))} == {torch.float32}


@pytest.mark.parametrize("kind", KINDS)
def test_half_models_take_fp32_in_any_container(kind: str) -> None:
    model = penstock.accelerate(Wrapping(kind, takes=True), precision="O3", dtype="bf16")
    assert model(KINDS[kind](torch.ones(3, 3))).dtype == torch.float32


@pytest.mark.parametrize("kind", ["dict", "OrderedDict", "tuple", "named tuple", "dataclass"])
def test_compiled_models_return_them_too(kind: str) -> None:
    model = penstock.accelerate(Wrapping(kind), precision="O1", dtype="bf16")
    found = torch.compile(model, backend="eager", fullgraph=True)(torch.ones(3, 3))
    assert {t.dtype for t in tensors_of(found)} == {torch.float32}
