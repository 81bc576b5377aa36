"""Linears of frozen weights in few bits: held to plain ones of the same values, with adapters beside them, in our
models and transformers', from files and back, and over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers import foreign
from helpers.spawn import pool
from penstock import checkpoint
from penstock.build import Built, build
from penstock.checkpoint import rewrite
from penstock.checkpoint.rewrite import average
from penstock.compress.quantise import quantise_folder
from penstock.config.formats import BaseWeights
from penstock.config.load import to_dict
from penstock.config.model import DecoderConfig
from penstock.config.plan import Plan
from penstock.config.quantise import QuantiseOptions
from penstock.config.run import Lora, Recipe, RunConfig
from penstock.errors import ConfigError
from penstock.kernels.frozen_linear import unpacked
from penstock.models import create
from penstock.models.convert import from_pretrained, load_weights, save_pretrained
from penstock.models.convert.pretrained import rounded_weights
from penstock.models.frozen import FrozenLinear
from penstock.models.lora import merged
from penstock.parallel import ALONE, dims_of
from penstock.shards import whole_of
from penstock.tasks import NextToken, Preferences, TextBatch

pytest.importorskip("peft")

GPT = DecoderConfig(vocabulary=40, sequence=12, width=32, depth=2, heads=2, mlp_width=64, dropout=0.1)
BASES: tuple[BaseWeights, ...] = ("int8_weights", "int4")


def _weight(frozen: FrozenLinear, dtype: torch.dtype = torch.float32) -> Tensor:
    held: dict[str, Any] = dict(frozen.named_parameters())
    parts = (held["weight"], held["weight_scale"], held.get("weight_offset"))
    return unpacked(*parts, dtype)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("base", BASES)
def test_products_and_gradients_are_those_of_a_plain_linear(base: BaseWeights, transposed: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(96, 40)
    with torch.no_grad():
        linear.weight[3] *= 50
    whole = linear.weight.detach().clone()
    if transposed:  # as transformers' Conv1D is
        linear.weight = nn.Parameter(linear.weight.detach().T.contiguous())
    frozen = FrozenLinear(linear.requires_grad_(False), base, transposed=transposed)
    weight = _weight(frozen)
    groups = whole.unflatten(1, (-1, 32)) if base == "int4" else whole[:, None]
    step = (groups.amax(-1) - groups.amin(-1)) / 15 if base == "int4" else groups.abs().amax(-1) / 127
    error = (weight - whole).abs().view_as(groups)
    assert (error <= 0.55 * step[..., None] + 0.004 * groups.abs().amax(-1, keepdim=True)).all()
    assert error.mean() > 0.15 * step.mean()  # it is rounded, indeed

    for dtype, autocast in ((torch.float32, False), (torch.bfloat16, False), (torch.float32, True)):
        x = torch.randn(2, 5, 96, dtype=dtype, requires_grad=True)
        frozen.bias.requires_grad_(True)
        kept: list[Tensor] = []
        note = torch.autograd.graph.saved_tensors_hooks(
            lambda one, kept=kept: kept.append(one) or one, lambda one: one
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), note:
            y = frozen(x)
            own = torch.bfloat16 if autocast else dtype
            expected = F.linear(x.to(own), _weight(frozen, own), frozen.bias.to(own))
        assert torch.equal(y, expected)
        assert torch.equal(_weight(frozen, own), weight.to(own))  # rounded once
        grad = torch.randn_like(y)
        ours, theirs = (torch.autograd.grad(each, (x, frozen.bias), grad) for each in (y, expected))
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other)
        # What the product itself keeps are its own few bits.
        assert {id(one) for one in kept[: len(list(frozen.parameters())) - 1]} == {
            id(p) for name, p in frozen.named_parameters() if name != "bias"
        }


@contextmanager
def _wide(name: str) -> Iterator[None]:
    """Inside, a model of transformers has sides that groups of 32 inputs divide."""
    small = foreign.FOREIGN[name]
    sides = {"n_embd", "hidden_size", "intermediate_size", "d_model", "d_ff", "d_kv"} & small.sizes.keys()
    sizes = dict.fromkeys(sides, 32)
    foreign.FOREIGN[name] = small._replace(sizes={**small.sizes, **sizes})
    try:
        yield
    finally:
        foreign.FOREIGN[name] = small


@pytest.mark.parametrize(("name", "line"), [
    ("gpt2", ""), ("llama", "precision=O1"), ("qwen2", "precision=O2 optimizer=fused"), ("t5", ""),
    ("t5", "precision=O3"),
])  # fmt: skip
def test_adapters_beside_few_bits_learn_what_they_learn_beside_their_values(name: str, line: str) -> None:
    base: BaseWeights = "int8_weights" if name == "qwen2" else "int4"
    recipe = Recipe(lr=3e-2, eps=1e-4, lora=Lora(rank=2, base=base, parts="attention"))
    with _wide(name):
        batch, plan = foreign.batches(name, 0, 4), Plan.parse(f"micro_batch=4 {line}")

        def start(recipe: Recipe, values: dict[str, Tensor] | None = None) -> Built:
            torch.manual_seed(3)
            model = foreign.create(name)
            if values is not None:
                model.load_state_dict(values)
            return build(model, plan, recipe=recipe, loss=foreign.loss)

        built = start(recipe)
        before = {key: value.clone() for key, value in built.model.state_dict().items()}
        values = merged(before, recipe.lora, built.model)
        plain = start(replace(recipe, lora=replace(recipe.lora, base="plain")), values)
        losses = [[float(each.step([batch]).loss) for _ in range(6)] for each in (built, plain)]
        # Half products round sums of the same values; measured below 2e-3.
        assert losses[0] == pytest.approx(losses[1], rel=1e-5 if not line else 1e-2)
        assert losses[0][-1] < losses[0][0] - 0.02
        frozen = [module for module in built.model.modules() if isinstance(module, FrozenLinear)]
        linears = {"gpt2": 8, "llama": 14, "qwen2": 14, "t5": 32}[name]
        assert len(frozen) == linears  # those without adapters too
        learned = {
            key
            for key, tensor in built.model.named_parameters()
            if tensor.grad is not None or tensor.requires_grad
        }
        assert learned
        assert all(".lora_" in key for key in learned)
        for key, tensor in built.model.state_dict().items():
            assert torch.equal(tensor, before[key]) == (key not in learned), key

        whole = foreign.create(name)
        whole.load_state_dict(merged(built.model.state_dict(), recipe.lora, built.model))
        if not line:
            with torch.no_grad():
                expected = foreign.loss(built.model.eval(), batch)
                torch.testing.assert_close(foreign.loss(whole.eval(), batch), expected, rtol=1e-5, atol=1e-5)


def _batch(pairs: int = 2, seed: int = 0, *, by_sample: bool = True) -> TextBatch:
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = (torch.randint(0, 40, (2 * pairs, 12), generator=generator) for _ in range(2))
    given = {"tokens": tokens, "targets": targets, "by_sample": by_sample}
    inputs = tuple(given.get(name) for name in GPT.graph.arguments)
    return TextBatch(inputs=inputs, ids=np.arange(pairs), tokens=24 * pairs, count=torch.tensor(24.0 * pairs))


def _folder(path: Path, form: str = "") -> str:
    torch.manual_seed(7)
    model = create(GPT)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    save_pretrained(model, path)
    if not form:
        return str(path)
    quantise_folder(path, path / form, QuantiseOptions(format=form))  # type: ignore[arg-type]
    return str(path / form)


@pytest.mark.parametrize("base", BASES)
def test_weights_come_from_plain_and_rounded_folders_and_checkpoints(
    base: BaseWeights, tmp_path: Path
) -> None:
    recipe = Recipe(lr=1e-2, eps=1e-4, ema_decay=0.5, lora=Lora(rank=2, base=base))
    one, other = (build(GPT, Plan(), recipe=recipe, loss=NextToken(), seed=seed) for seed in (0, 1))
    batch = _batch(by_sample=False)
    plain = _folder(tmp_path / "plain")
    exact = create(GPT)
    load_weights(exact, plain)
    load_weights(one.model, plain)
    frozen = {name: module for name, module in one.model.named_modules() if isinstance(module, FrozenLinear)}
    assert len(frozen) == 8
    for name, module in frozen.items():
        start = exact.get_submodule(name.replace(".base_layer", "")).weight
        assert isinstance(start, Tensor)
        assert 0 < (_weight(module) - start).abs().max() < 0.1 * start.abs().max()
    # A folder in the same format is taken by its numbers.
    folder = _folder(tmp_path / "again", base)
    load_weights(one.model, folder)
    for name, (form, rounded) in rounded_weights(folder).items():
        module = frozen[f"{name}.base_layer"]
        assert form == base
        assert torch.equal(module.get_parameter("weight"), rounded.stored("")[".weight"].view(torch.int8))
        # With scales in bf16, by which a value moves by 2⁻⁹ of its distance from the offset, and that by as much.
        atol = 0.08 * float(rounded.scales.max()) if base == "int4" else 0.0
        torch.testing.assert_close(_weight(module), rounded.values(), rtol=2**-8, atol=atol)

    assert one.ema is not None
    weights = one.model.named_parameters()
    one.ema.load_state_dict({name: value for name, value in weights if value.is_floating_point()})
    one.step([batch])
    state = {name: value.clone() for name, value in one.model.state_dict().items()}
    sets = {"weights": state, "ema": {name: value.clone() for name, value in one.ema.state_dict().items()}}
    snapshot = checkpoint.Snapshot(1, sets, {}, to_dict(RunConfig(model=GPT, recipe=recipe)))
    checkpoint.save(tmp_path / "checkpoints", snapshot)
    newest = rewrite.open_newest(tmp_path)
    frozen_numbers = [f"{name}.weight" for name in frozen]
    read = rewrite.read_weights(newest, "weights")
    assert all(torch.equal(read[name], value) for name, value in state.items())
    other.model.load_state_dict(read)
    other.optimizer.load_state_dict(one.optimizer.state_dict())
    losses = []
    for each in (one, other):
        torch.manual_seed(0)
        losses.append(float(each.step([batch]).loss))
    assert losses[0] == losses[1]
    for which in sets:
        rewrite.export_model(newest, tmp_path / which, which)
        exported = from_pretrained(tmp_path / which).eval()
        one.model.load_state_dict(state | {k: v for k, v in sets[which].items() if v.is_floating_point()})
        with torch.no_grad():
            given = batch.inputs[0]
            torch.testing.assert_close(exported(given), one.model.eval()(given), rtol=1e-4, atol=1e-4)
        # The merged values are no numbers of few bits, and means of checkpoints keep the numbers.
        assert not rounded_weights(tmp_path / which)
    mean = average([newest, rewrite.open_newest(tmp_path)])
    assert [n for n, value in state.items() if not torch.equal(mean[n], value.to(mean[n].dtype))] == []
    assert {mean[name].dtype for name in frozen_numbers} == {torch.int8}


def test_preferences_are_compared_with_the_weights_beside_the_adapters(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    recipe = Recipe(lr=1e-2, eps=1e-4, lora=Lora(rank=2, base="int4"))
    without = replace(GPT, dropout=0.0)
    built = build(without, Plan.parse("compile=none precision=O1"), recipe=recipe, loss=Preferences(folder))
    load_weights(built.model, folder)
    assert isinstance(built.loss, Preferences)
    assert not isinstance(built.loss.reference, nn.Module)  # no second copy
    losses = [float(built.step([_batch()]).loss) for _ in range(6)]
    assert losses[0] == pytest.approx(0.693147, abs=1e-6)
    assert losses[-1] < losses[0] - 0.1
    # The reference has no dropout, whatever the model does, and is what the weights were.
    dropping = build(GPT, Plan(), recipe=recipe, loss=Preferences(folder))
    load_weights(dropping.model, folder)
    copy = create(GPT).eval()
    load_weights(copy, merged(dropping.model.state_dict(), recipe.lora, dropping.model))
    assert isinstance(dropping.loss, Preferences)
    assert dropping.loss.reference is not None
    dropping.step([_batch()])
    dropping.model.train()
    with torch.no_grad():
        expected = copy(*_batch().inputs)
    torch.testing.assert_close(dropping.loss.reference(*_batch().inputs), expected)
    assert all(module.training for module in dropping.model.modules())


def _over_ranks(folder: str, line: str) -> list[list[float]]:
    """Losses of two steps by next words and by preferences, and norms of all weights after them."""
    plan, found = Plan.parse(line), []
    dims = dims_of(plan, "cpu") if plan.dp > 1 else ALONE
    recipe = Recipe(clip_norm=None, eps=1e-3, lr=1e-2, lora=Lora(rank=2, base="int4"))
    for task in (NextToken(), Preferences(folder)):
        model = replace(GPT, dropout=0.0)
        built = build(model, plan, recipe=recipe, loss=task, dims=dims)
        load_weights(built.model, folder)
        for step in range(2):
            batches = [_batch(2, 4 * step + n, by_sample=isinstance(task, Preferences)) for n in range(4)]
            loss = built.step(batches[dims.data_rank :: plan.dp]).loss.clone()
            if plan.dp > 1:
                torch.distributed.all_reduce(loss)
            found.append([float(loss) / plan.dp])
        state = {name: whole_of(value) for name, value in built.model.state_dict().items()}
        found.append([float(value.double().norm()) for value in state.values()])
        if "fsdp" in line:  # numbers are sharded, too
            frozen = next(m for m in built.model.modules() if isinstance(m, FrozenLinear))
            assert frozen._parameters["weight"].to_local().shape[0] * 2 == frozen.out_features  # type: ignore[union-attr]
    return found


def _every_layout(folder: str) -> list[list[list[float]]]:
    return [
        _over_ranks(folder, f"dp=2 accumulate=2 {line}")
        for line in ("sharding=ddp", "sharding=fsdp", "sharding=zero2 precision=O2")
    ]


@pytest.mark.sweep
def test_ranks_share_frozen_weights(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    expected, half = (_over_ranks(folder, f"accumulate=4 {line}") for line in ("", "precision=O2"))
    for layouts in pool(2).run(_every_layout, folder, timeout=120):
        for number, found in enumerate(layouts):
            for got, want in zip(found, (expected, expected, half)[number], strict=True):
                assert got == pytest.approx(want, rel=1e-4 if number < 2 else 1e-2)


def test_what_cannot_be_is_refused() -> None:
    lora = Lora(rank=2, base="int4")
    for recipe, line, message in (
        (Recipe(lora=replace(lora, rank=0)), "", r"set recipe\.lora\.rank, such as 16"),
        (Recipe(lora=lora), "products=int8 precision=O1", r"use products=plain"),
        (Recipe(lora=lora), "tp=2", r"use tp=1, or sharding=fsdp"),
        (Recipe(lora=lora), "pp=2 accumulate=2", r"use pp=1, or sharding=fsdp"),
    ):
        with pytest.raises(ConfigError, match=message):
            build(GPT, Plan.parse(line), recipe=recipe, loss=NextToken())
    also = Recipe(lora=replace(lora, trained_parts=("tokens",)))
    with pytest.raises(ConfigError, match=r"recipe\.lora\.trained_parts changes"):
        build(GPT, Plan(), recipe=also, loss=Preferences("anywhere"))
    with pytest.raises(ConfigError, match=r"can store no linear layer.*16 inputs are no multiple of 32"):
        build(replace(GPT, width=16, mlp_width=16), Plan(), recipe=Recipe(lora=lora), loss=NextToken())
    # What learns stays plain, and so does what does not fit.
    lora = replace(lora, trained_parts=("*.attention.out",))
    built = build(replace(GPT, mlp_width=48), Plan(), recipe=Recipe(lora=lora), loss=NextToken())
    stored = {name for name, module in built.model.named_modules() if isinstance(module, FrozenLinear)}
    assert {name.split(".blocks.")[1] for name in stored} == {
        f"{block}.{part}.base_layer" for block in (0, 1) for part in ("attention.qkv", "mlp.up")
    }
