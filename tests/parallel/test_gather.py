"""Matrices of sharded models are gathered in half precision, and what autocast computes in fp32 with is not."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from helpers.equality import TINY, images, trained
from helpers.spawn import pool, spawn
from helpers.sweeps import sweep
from penstock.apply import compile_model
from penstock.build import build
from penstock.config.formats import PRODUCTS, Products
from penstock.config.plan import Plan
from penstock.config.run import Recipe
from penstock.models import create
from penstock.parallel import dims_of
from penstock.parallel.fsdp import Sharded
from penstock.parallel.gather import entries_of
from penstock.products.convert import convert_linears
from penstock.products.eight_bits import Fp8Linear, Int8Linear, RoundedLinear
from penstock.products.fp8 import fp8_linear
from penstock.products.int8 import int8_linear

SCALED = replace(TINY, layer_scale=0.5)
RECIPE = Recipe(lr=1e-3, clip_norm=None, eps=1e-6)
IN_FP8 = "products=fp8_tensorwise gather=products"
_ANYWHERE = mock.patch("penstock.apply.convert_linears", partial(convert_linears, emulate=True))
"""fp8 on any device."""


class Mixed(nn.Module):
    """Blocks of torch's own attention, a matrix of its own, and a linear layer that changes its weight first."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(64, 16)
        self.blocks = nn.ModuleList(MixedBlock() for _ in range(2))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x.flatten(2))
        for block in self.blocks:
            x = block(x)
        output: Tensor = self.head(x[:, 0])
        return output


class Standardised(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, nn.functional.layer_norm(self.weight, (16,)), self.bias)


class MixedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.scale = nn.Parameter(torch.full((16,), 0.5))
        self.fc = Standardised(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0] * self.scale
        output: Tensor = x + self.fc(x)
        return output


def _seen(model: nn.Module) -> dict[str, torch.dtype]:
    """Filled while the model runs: the type of each parameter as its module sees it."""
    types: dict[str, torch.dtype] = {}
    for name, module in model.named_modules():

        def look(module: nn.Module, _: Any, prefix: str = name) -> None:
            types.update({f"{prefix}.{n}": p.dtype for n, p in module.named_parameters(recurse=False)})

        module.register_forward_pre_hook(look)
    return types


def _types(model: nn.Module, plan: Plan, batch: Any, loss: Any = None) -> dict[str, torch.dtype]:
    # Hooks that were there before sharding's run after its own, once the weights are there.
    built = build(model, plan, recipe=RECIPE, dims=dims_of(plan, "cpu"), loss=loss)
    types = _seen(built.model)
    built.step([batch])
    return types


def _gathered() -> dict[str, dict[str, torch.dtype]]:
    found = {}
    for level in ("O1", "O2"):
        plan = Plan.parse(f"dp=2 sharding=fsdp micro_batch=2 precision={level}")
        found[f"vit {level}"] = _types(create(SCALED), plan, images(0, 2))
        found[f"mixed {level}"] = _types(Mixed(), plan, (torch.randn(2, 3, 64), torch.tensor([0, 1])))
    return found


def _gathered_of_gpt2() -> dict[str, torch.dtype]:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 11, "n_positions": 8}
    model = transformers.GPT2Model(transformers.GPT2Config(**sizes))
    plan = Plan.parse("dp=2 sharding=fsdp micro_batch=2 precision=O1")
    return _types(model, plan, (torch.zeros(2, 4, dtype=torch.long),), _mean)


def _mean(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).last_hidden_state.float().mean()  # type: ignore[no-any-return]


@pytest.mark.slow
def test_linears_of_another_class_are_known_by_their_role() -> None:
    """GPT-2's have their weights transposed, in a class of transformers."""
    types = spawn(_gathered_of_gpt2, 2)[0]
    linears = {name: dtype for name, dtype in types.items() if "attn.c_" in name or "mlp.c_" in name}
    assert len(linears) == 2 * 2 * 4
    assert set(linears.values()) == {torch.bfloat16}
    assert {dtype for name, dtype in types.items() if name not in linears} == {torch.float32}


def test_each_parameter_is_gathered_in_the_type_that_it_is_computed_with() -> None:
    found = spawn(_gathered, 2)[0]
    half, whole = torch.bfloat16, torch.float32

    def like(types: dict[str, torch.dtype], *words: str) -> set[torch.dtype]:
        chosen = {dtype for name, dtype in types.items() if any(word in name for word in words)}
        assert chosen, (words, sorted(types))
        return chosen

    for level in ("O1", "O2"):
        vit, mixed = found[f"vit {level}"], found[f"mixed {level}"]
        rest = whole if level == "O1" else half
        assert like(vit, "norm") == {whole}
        assert like(vit, "fc1.weight", "fc2.bias", "qkv.weight", "head.weight") == {half}
        assert like(vit, "scale") == {rest}
        assert like(mixed, "norm.") == {whole}
        assert like(mixed, "in_proj", "out_proj", "stem", "head") == {half}
        assert like(mixed, "fc.") == {rest}


def _twice(step: int, samples: int) -> tuple[Tensor, Tensor]:
    """The same micro-batches of 2 for both ranks."""
    single = images(step, samples // 2)
    doubled = [value.unflatten(0, (-1, 2)).repeat_interleave(2, 0).flatten(0, 1) for value in single]
    return doubled[0], doubled[1]


def _alike(lines: list[str], steps: int = 10) -> list[tuple[str, float, float]]:
    found = []
    for line in lines:
        plan = Plan.parse(line)
        single = replace(
            plan, dp=1, sharding="ddp", shard=1, recompute="none", offload="none", gather="level"
        )
        with _ANYWHERE:
            got = trained(SCALED, plan, steps=steps, recipe=RECIPE, batches=_twice)
            one = trained(SCALED, single, steps=steps, recipe=RECIPE)
        worst = max(float((got.weights[name] - value).abs().max()) for name, value in one.weights.items())
        found.append((line, worst, max(abs(a - b) for a, b in zip(got.losses, one.losses, strict=True))))
    return found


@pytest.mark.slow
def test_what_is_gathered_in_half_is_what_autocast_would_have_made() -> None:
    """Both ranks see the same samples, and the mean of two equal gradients is exact. All that could differ from one
    process is the type of weights and of their gradients: no bit may."""
    lines = [
        "dp=2 sharding=fsdp micro_batch=2 precision=O1",
        "dp=2 sharding=fsdp micro_batch=2 precision=O2",
        "dp=2 sharding=fsdp micro_batch=2 precision=O2 norms=half",
        "dp=2 sharding=fsdp micro_batch=2 precision=O1 accumulate=2 recompute=full",
        "dp=2 sharding=zero1 micro_batch=2 precision=O1 accumulate=2",
        "dp=2 sharding=fsdp micro_batch=2 precision=O1 dtype=fp16 optimizer=fused",
        f"dp=2 sharding=fsdp micro_batch=2 precision=O2 {IN_FP8} offload=optimizer optimizer=contiguous",
        f"dp=2 sharding=hsdp shard=1 micro_batch=2 precision=O1 {IN_FP8}",
    ]
    for line, weights, losses in spawn(_alike, 2, lines)[0]:
        assert (weights, losses) == (0.0, 0.0), line


def test_what_is_gathered_in_fp8_is_what_an_unsharded_layer_would_have_made() -> None:
    lines = [
        f"dp=2 sharding=fsdp micro_batch=2 precision=O1 {IN_FP8} accumulate=2",
        f"dp=2 sharding=fsdp micro_batch=2 precision=O2 {IN_FP8} recompute=full",
    ]
    for line, weights, losses in pool(2).run(_alike, lines, 3)[0]:
        assert (weights, losses) == (0.0, 0.0), line


def _gathered_bytes(gather: str) -> int:
    plan = Plan.parse(
        f"dp=2 sharding=fsdp micro_batch=2 precision=O2 products=fp8_tensorwise gather={gather}"
    )
    with _ANYWHERE:
        built = build(TINY, plan, recipe=RECIPE, dims=dims_of(plan, "cpu"))
    built.step([images(0, 2)])
    assert isinstance(built.replicas, Sharded)
    return sum(
        output.nbytes for entry in entries_of(built.replicas.units) for output in entry.all_gather_outputs
    )


def test_fp8_halves_the_bytes_of_linears() -> None:
    level, products = (pool(2).run(_gathered_bytes, gather)[0] for gather in ("level", "products"))
    assert level - products == 2 * (16 * 48 + 16 * 16 + 2 * 16 * 32)


def _through_bf16(layer: RoundedLinear, x: Tensor, dtype: torch.dtype) -> Tensor:
    weight, bias = (None if p is None else p.bfloat16() for p in (layer.weight, layer.bias))
    assert weight is not None
    if isinstance(layer, Fp8Linear):
        return fp8_linear(x, weight, bias, scaling=PRODUCTS[layer.products].scales, emulate=True)
    return int8_linear(x, weight, bias, passes=PRODUCTS[layer.products].passes)


def _in_eight_bits(products: Products) -> tuple[set[torch.dtype], float, float]:
    def model() -> nn.Module:
        torch.manual_seed(1)
        made = create(TINY)
        convert_linears(made, products, emulate="fp8" in products)
        assert sum(isinstance(module, RoundedLinear) for module in made.modules()) == 8
        return made

    plan = Plan.parse("dp=2 sharding=fsdp micro_batch=2 precision=O1")
    alone = replace(plan, dp=1, sharding="ddp")
    types = _types(model(), plan, images(0, 2))
    got = trained(model(), plan, steps=10, recipe=RECIPE, batches=_twice)
    exact = trained(model(), alone, steps=10, recipe=RECIPE)
    Fp8Linear.multiplied = Int8Linear.multiplied = _through_bf16  # type: ignore[assignment, method-assign]
    one = trained(model(), alone, steps=10, recipe=RECIPE)
    worst = max(float((got.weights[name] - value).abs().max()) for name, value in one.weights.items())
    apart = max(abs(a - b) for a, b in zip(got.losses, exact.losses, strict=True))
    return {dtype for name, dtype in types.items() if "fc1" in name or "qkv" in name}, worst, apart


@pytest.mark.slow
@pytest.mark.parametrize("products", sweep(["fp8", "fp8_tensorwise", "int8_all"], ["fp8"]))
def test_weights_on_their_way_to_eight_bits_are_gathered_in_half(products: Products) -> None:
    types, through_bf16, directly = spawn(_in_eight_bits, 2, products)[0]
    assert types == {torch.bfloat16}
    assert through_bf16 == 0.0
    assert directly < 0.02


def _kept(level: str) -> tuple[int, int]:
    plan = Plan.parse(f"dp=2 sharding=fsdp micro_batch=2 precision={level}")
    with _ANYWHERE:
        built = build(create(TINY), plan, recipe=RECIPE, dims=dims_of(plan, "cpu"))
    shapes = {tuple(p.shape) for n, p in built.model.named_parameters() if "blocks" in n and p.ndim == 2}
    shapes |= {shape[::-1] for shape in shapes}
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = built.loss(built.model, images(0, 2))
    matrices = [tensor for tensor in saved if tuple(tensor.shape) in shapes]
    assert loss.requires_grad
    return len(matrices), sum(tensor.untyped_storage().nbytes() for tensor in matrices)


@pytest.mark.parametrize("level", ["O1", "O2", f"O2 {IN_FP8}"])
def test_nothing_of_a_block_stays_behind_after_its_forward_pass(level: str) -> None:
    """Of weights that were gathered the backward pass remembers where they were, not what they were."""
    count, size = spawn(_kept, 2, level)[0]
    assert count >= 2 * 4  # four matrices in each of two blocks
    assert size == 0


def _compiled(level: str) -> tuple[int, int]:
    from torch._dynamo.utils import counters

    plan = Plan.parse(f"dp=2 sharding=fsdp micro_batch=2 compile=blocks precision={level}")
    with _ANYWHERE, mock.patch("penstock.apply.compile_model", partial(compile_model, backend="aot_eager")):
        trained(SCALED, plan, steps=3, recipe=RECIPE)
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.mark.slow
@pytest.mark.parametrize("level", sweep(["O1", "O2", f"O1 {IN_FP8}"], ["O1", f"O1 {IN_FP8}"]))
def test_gathering_does_not_cut_compiled_blocks(level: str) -> None:
    assert spawn(_compiled, 2, level, timeout=200)[0] == (1, 0), (
        "one graph serves all blocks, and it is whole"
    )
