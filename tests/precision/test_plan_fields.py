"""What `accelerate` takes as overrides, `build` takes as fields of Plan and recipe."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.build import build
from penstock.config.formats import Products
from penstock.config.load import dump_toml, from_dict
from penstock.config.numerics import numerics_of
from penstock.config.plan import Plan
from penstock.config.run import Lists, Recipe, RunConfig
from penstock.errors import ConfigError
from penstock.precision.lists import default_lists
from penstock.precision.settings import properties_of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x))
        gelu = nn.functional.gelu(y)
        out: Tensor = self.head(gelu)
        self.seen[:] = [y.dtype, gelu.dtype, out.dtype, self.norm.weight.dtype, self.head.weight.dtype]
        return out


def loss(model: nn.Module, batch: Any) -> Tensor:
    out: Tensor = model(batch[0])
    return nn.functional.cross_entropy(out, batch[1])


def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_lists_of_the_recipe_are_those_of_accelerate(level: str) -> None:
    given = Lists(fp32=("torch.nn.functional.gelu",), fp32_modules=("head",))
    model = net()
    recipe = Recipe(lists=given, lr=1e-2, clip_norm=None, weight_decay=0.0)
    built = build(model, Plan.parse(f"precision={level} optimizer=fused"), recipe=recipe, loss=loss)
    batch = (torch.randn(4, 8), torch.randint(0, 4, (4,)))
    built.step([batch])
    half = torch.bfloat16
    assert model.seen[1:3] == [torch.float32, torch.float32]
    assert model.seen[4] == torch.float32
    assert model.first.weight.dtype == (half if level == "O2" else torch.float32)
    other: nn.Module = net()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(
        other.parameters(), lr=1e-2, fused=True, weight_decay=0.0
    )
    lists = default_lists(half, "cpu").with_(fp32=["torch.nn.functional.gelu"], fp32_modules=["head"])
    other, optimizer = penstock.accelerate(other, optimizer, precision=level, dtype="bf16", lists=lists)
    with penstock.scale_loss(loss(other, batch), optimizer) as scaled:
        scaled.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    for mine, theirs in zip(model.state_dict().values(), other.state_dict().values()):
        assert torch.equal(mine, theirs)


def test_norms_of_o2_may_be_half() -> None:
    model = net()
    built = build(model, Plan.parse("precision=O2 norms=half optimizer=fused"), loss=loss)
    built.step([(torch.randn(4, 8), torch.randint(0, 4, (4,)))])
    assert model.seen[3] == torch.bfloat16
    assert numerics_of(built.plan).norms == "bf16"
    with pytest.raises(ConfigError, match=r"norms=half has no effect with plan\.precision=O1"):
        build(net(), Plan.parse("precision=O1 norms=half"))


@pytest.mark.parametrize(
    ("text", "value", "products"),
    [
        ("true", True, "fp8_tensorwise"), ("rowwise", "rowwise", "fp8"), ("false", False, "plain"),
    ],
)  # fmt: skip
def test_fp8_of_an_earlier_version_is_a_form_of_products(
    text: str, value: bool | str, products: Products
) -> None:
    plan = Plan(precision="O1", products=products)
    assert Plan.parse(f"precision=O1 fp8={text}") == plan
    assert Plan.parse(plan.line()) == plan
    assert from_dict(Plan, {"precision": "O1", "fp8": value}, origin="a file") == plan
    assert from_dict(RunConfig, {"plan": {"precision": "O1", "fp8": value}}, origin="a run").plan == plan
    assert Plan.from_toml(f'precision = "O1"\nfp8 = {json.dumps(value)}') == plan
    assert numerics_of(plan).products == products
    assert properties_of("O1", fp8=value) == properties_of("O1", products=products)


def test_what_fp8_never_was_is_refused() -> None:
    with pytest.raises(ConfigError, match="products is 'columns'"):
        Plan.parse("fp8=columns")
    with pytest.raises(ConfigError, match="products is given twice"):
        Plan.parse("fp8=true products=fp8")
    with pytest.raises(ConfigError, match="products is 'int4', but must be one of"):
        properties_of("O1", products="int4")


def test_lists_that_mean_nothing_are_refused() -> None:
    some = Recipe(lists=Lists(fp32=("torch.nn.functional.gelu",)))
    for level in ("O0", "O3"):
        with pytest.raises(ConfigError, match=r"recipe\.lists has no effect"):
            build(net(), Plan(precision=level), recipe=some)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no operation"):
        build(net(), Plan(precision="O1"), recipe=Recipe(lists=Lists(fp32=("torch.nn.functional.gello",))))
    assert from_dict(Recipe, tomllib.loads(dump_toml(some)), origin="a file") == some
