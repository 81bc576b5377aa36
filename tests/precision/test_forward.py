"""Classes that stand in for a model's own, seen by code that asks for the class."""

from __future__ import annotations

import copy
import pickle
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import ConfigError
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


class Registry(type):
    def __new__(cls, name: str, bases: Any, fields: Any, *, key: str) -> Any:
        return super().__new__(cls, name, bases, fields, key=key)

    def __init__(cls, name: str, bases: Any, fields: Any, *, key: str) -> None:
        super().__init__(name, bases, fields)
        Registered.kinds[f"{key} of the metaclass"] = cls


class Registered(nn.Module):
    kinds: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, *, key: str) -> None:
        super().__init_subclass__()
        Registered.kinds[key] = cls


class Member(Registered, metaclass=Registry, key="member"):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Called(nn.Module):
    """Called without torch's own `__call__`, and so without its `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))

    def __call__(self, x: Tensor) -> Tensor:
        self.product = x @ self.weight
        return self.product


@pytest.mark.parametrize("precision", ["O1", "O2"])
def test_a_call_of_its_own_computes_as_a_forward_pass(precision: str) -> None:
    model = penstock.accelerate(Called(), precision=precision, dtype="bf16")
    assert model(torch.ones(2, 8)).dtype == torch.float32
    assert model.product.dtype == torch.bfloat16


def test_replicas_of_data_parallel_choose_their_type_themselves() -> None:
    """Each runs in a thread of its own, which has not entered the autocast of a call around them."""
    parallel = nn.DataParallel(Net())
    penstock.accelerate(parallel, precision="O1", dtype="bf16")
    replica = parallel.module._replicate_for_data_parallel()
    seen: list[torch.dtype] = []
    parallel.module.layer.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    replica(torch.ones(2, 8))
    assert seen == [torch.bfloat16]


@pytest.mark.parametrize("precision", ["O1", "O2", "O3"])
def test_a_model_is_compiled_once(precision: str) -> None:
    """The second call must find the graph of the first, which takes a minute to make in a large model."""
    graphs: list[Any] = []

    def kept(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = penstock.accelerate(Net(), precision=precision, dtype="bf16")
    model.compile(backend=kept)
    for _ in range(3):
        model(torch.randn(4, 8)).sum().backward()
    assert len(graphs) == 1


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
    assert Registered.kinds == {"member": Member, "member of the metaclass": Member}
    assert model(torch.ones(2, 8)).dtype == torch.float32
    assert isinstance(model, Member)


class Coder(nn.Module):
    """Is entered by more than `forward`, as autoencoders and language models are."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4))
        self.decoder = nn.Linear(4, 8)
        self.products: list[torch.dtype] = []

    def encode(self, x: Tensor) -> Tensor:
        out: Tensor = self.encoder(x)
        self.products.append(self.encoder[0](x).dtype)
        return out

    def decode(self, z: Tensor) -> Tensor:
        out: Tensor = self.decoder(z)
        self.products.append(out.dtype)
        return out

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        return (self(batch["x"]) - batch["x"]).square().mean()

    def generate(self, length: int) -> list[Tensor]:
        z, found = torch.zeros(1, 4), []
        for _ in range(length):
            found.append(self.decode(z))
            z = self.encode(found[-1])
        return found

    def table(self) -> nn.Parameter:
        return self.decoder.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))


@pytest.mark.parametrize(("level", "dtype"), [("O1", "bf16"), ("O2", "bf16"), ("O2", "fp16"), ("O3", "bf16")])
def test_methods_beside_forward_compute_alike(level: str, dtype: str) -> None:
    torch.manual_seed(0)
    made = Coder()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    model, optimizer = penstock.accelerate(made, optimizer, precision=level, dtype=dtype)
    x = torch.randn(2, 8)
    half = torch.bfloat16 if dtype == "bf16" else torch.float16
    z = made.encode(x)
    assert z.dtype == torch.float32
    assert made.decode(z).dtype == torch.float32
    if level == "O3":
        with pytest.raises(ConfigError, match="inside the model in the type of its inputs"):
            made.generate(2)
    else:
        assert [out.dtype for out in made.generate(2)] == [torch.float32] * 2
    assert set(made.products) == {half}
    assert made.table() is made.decoder.weight
    with penstock.scale_loss(made.training_step({"x": x}), optimizer) as scaled:
        scaled.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    assert torch.equal(made(x), model(x))
    assert not torch.is_autocast_enabled("cpu")
    twin = copy.deepcopy(made)
    assert twin.decode(z).dtype == torch.float32
