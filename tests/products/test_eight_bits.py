"""Converting a model's linear layers to products in 8 bits, and back."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from helpers.families import WORDS, small
from helpers.sweeps import sweep
from penstock.config.formats import PRODUCTS, Products
from penstock.config.model import ViTConfig
from penstock.errors import ConfigError
from penstock.models import Model, create
from penstock.products.convert import STORED, TRAINED, convert_linears, device_problem
from penstock.products.eight_bits import Fp8Linear, RoundedExpertLinear
from penstock.products.fp8 import E4M3, tensor_in_fp8

TINY = ViTConfig(image_size=16, patch_size=8, width=32, depth=2, heads=2, mlp_width=64, classes=16)
ROUNDED: list[Products] = [name for name, row in PRODUCTS.items() if row.trains and name != "plain"]
BLOCK = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")


def run(model: nn.Module, images: Tensor) -> Tensor:
    with torch.autocast(images.device.type, dtype=torch.bfloat16):
        logits: Tensor = model(images)
    return logits


@pytest.fixture
def images() -> Tensor:
    return torch.randn(3, 3, 16, 16)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_every_linear_of_the_blocks_and_no_other(images: Tensor, dropout: float) -> None:
    model = Model(replace(TINY, dropout=dropout)).eval()
    before = copy.deepcopy(model.state_dict())
    parameters = dict(model.named_parameters())
    exact = model(images)
    plain = run(model, images)
    kept = convert_linears(model, "fp8_tensorwise", emulate=True)
    assert kept == {"stem.proj": "outside the blocks", "head": "outside the blocks"}
    converted = [name for name, module in model.named_modules() if isinstance(module, Fp8Linear)]
    assert converted == [f"encoder.blocks.{i}.{name}" for i in range(2) for name in BLOCK]

    called = []
    for name in converted:
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: called.append(name))
    found = run(model, images)
    assert called == converted, "each is called, none of its weights used behind its back"
    assert found.dtype == torch.bfloat16
    assert 1e-3 < float(((found - plain).norm() / plain.norm()).detach()) < 0.1
    torch.testing.assert_close(model(images), exact)  # outside an accelerated pass it is a plain layer

    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    torch.testing.assert_close(model.state_dict(), before, rtol=0.0, atol=0.0)
    convert_linears(model, "plain")
    assert not any(isinstance(module, Fp8Linear) for module in model.modules())
    torch.testing.assert_close(run(model, images), plain, rtol=0.0, atol=0.0)


def test_a_linear_multiplies_the_weight_that_was_gathered_for_it(images: Tensor) -> None:
    model = Model(TINY)
    convert_linears(model, "fp8_tensorwise", emulate=True)
    expected = run(model, images)
    for linear in [module for module in model.modules() if isinstance(module, Fp8Linear)]:
        linear.gathered = tensor_in_fp8(linear.weight.detach(), E4M3)
        linear.weight = nn.Parameter(torch.tensor(torch.nan).expand_as(linear.weight))
    torch.testing.assert_close(run(model, images), expected, rtol=0.0, atol=0.0)
    with pytest.raises(
        ConfigError, match="not enough outside autocast; call the whole model, or use gather=level"
    ):
        model(images)


def test_converting_again_changes_the_scaling() -> None:
    model = Model(TINY)
    convert_linears(model, "fp8_tensorwise", emulate=True)
    convert_linears(model, "fp8", emulate=True)
    assert {m.products for m in model.modules() if isinstance(m, Fp8Linear)} == {"fp8"}
    assert "products=fp8, emulated" in repr(model)


def test_sides_that_the_units_cannot_take_are_kept_and_named() -> None:
    model = Model(replace(TINY, mlp_width=60))
    kept = convert_linears(model, "fp8_tensorwise", emulate=True)
    assert kept["encoder.blocks.0.mlp.up"] == "32 × 60 are not multiples of 16"
    with pytest.raises(ConfigError, match=r"No linear layer .* 24 × 72 are not multiples of 16"):
        convert_linears(Model(replace(TINY, width=24, heads=2, mlp_width=40)), "fp8_tensorwise", emulate=True)


def test_layers_that_compute_in_their_own_way_are_kept() -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), Own(16, 16)) for _ in range(2)))
    kept = convert_linears(model, "fp8_tensorwise", emulate=True)
    assert [name for name, module in model.named_modules() if isinstance(module, Fp8Linear)] == ["0.0", "1.0"]
    assert "computes in its own way" in kept["0.1"]


def test_what_cannot_be_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(TINY)
    with pytest.raises(ConfigError, match=r"compute capability 8\.9 .* on cpu; move it"):
        convert_linears(model, "fp8_tensorwise")
    with pytest.raises(
        ConfigError,
        match=r"compute capability 9\.0.*penstock\.products\.convert\.convert_linears\(…, emulate=True\)",
    ):
        convert_linears(model, "fp8")
    wrong: Any = "columnwise"
    with pytest.raises(ConfigError, match="choose one of plain, fp8, fp8_tensorwise, int8, int8_all"):
        convert_linears(model, wrong, emulate=True)
    assert not any(isinstance(module, Fp8Linear) for module in model.modules())

    capability = (8, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    assert device_problem("cuda", "int8_all") is None
    problem = device_problem("cuda", "fp8_tensorwise")
    assert problem is not None
    assert "compute capability 8.9 or newer, and NVIDIA A100 has 8.0" in problem
    capability = (8, 9)
    assert device_problem("cuda", "fp8_tensorwise") is None
    problem = device_problem("cuda", "fp8")
    assert problem is not None
    assert "fp8_tensorwise needs 8.9 only" in problem
    capability = (9, 0)
    assert device_problem("cuda", "fp8") is None
    # Weights that are not there yet say nothing of where the model will run.
    convert_linears(Model(TINY, device="meta"), "fp8", device="cuda")
    with pytest.raises(ConfigError, match="on cpu; move it"):
        convert_linears(Model(TINY, device="meta"), "fp8", device="cpu")


def test_fp16_is_refused() -> None:
    model = Model(TINY)
    convert_linears(model, "fp8_tensorwise", emulate=True)
    with torch.autocast("cpu", dtype=torch.float16), pytest.raises(ConfigError, match="dtype='bf16'"):
        model.get_submodule("encoder.blocks.0.mlp.up")(torch.randn(2, 32))


@pytest.mark.parametrize("products", ROUNDED)
def test_gradients_reach_fp32_weights(images: Tensor, products: Products) -> None:
    """Against the bf16 model: the same directions, within what 8 bits round."""
    model = Model(TINY)
    gradients = []
    for rounds in (False, True):
        if rounds:
            convert_linears(model, products, emulate=True)
        model.zero_grad()
        run(model, images).float().square().mean().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    for name, plain in gradients[0].items():
        found = gradients[1][name]
        assert found.dtype == torch.float32
        # A clip that nobody calibrated leaves small inputs few levels; measured 0.952.
        least = 0.9 if PRODUCTS[products].clips else 0.97
        assert float(torch.cosine_similarity(found.flatten(), plain.flatten(), 0)) > least, name


@pytest.mark.parametrize("products", sweep(["fp8_tensorwise", "int8", "int8_all"], ["int8_all"]))
def test_checkpointing_and_compilation_give_the_same(images: Tensor, products: Products) -> None:
    results = []
    for how in ("plain", "checkpoint", "compile"):
        torch.manual_seed(0)
        model = Model(TINY)
        convert_linears(model, products, emulate=products == "fp8_tensorwise")
        block: Any = model.encoder.blocks[0]
        if how == "checkpoint":
            original = block.forward
            block.forward = lambda *given, original=original: checkpoint(
                original, *given, use_reentrant=False
            )
        if how == "compile":
            block.compile(fullgraph=True, backend="aot_eager")
        run(model, images).float().square().mean().backward()
        results.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for how, other in zip(("checkpoint", "compile"), results[1:]):
        for found, plain in zip(other, results[0], strict=True):
            if products == "int8_all" and how == "compile":  # which draws noise in another order
                assert float((found - plain).norm() / plain.norm()) < 0.05
            else:
                torch.testing.assert_close(found, plain)


def test_no_rows_are_no_trouble() -> None:
    layer = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16)) for _ in range(2)))
    convert_linears(layer, "fp8_tensorwise", emulate=True)
    assert run(layer, torch.zeros(0, 16)).shape == (0, 16)


def test_copies_and_pickles() -> None:
    model = Model(TINY)
    convert_linears(model, "fp8", emulate=True)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        layer: Any = other.get_submodule("encoder.blocks.1.mlp.down")
        assert type(layer) is Fp8Linear
        assert layer.products == "fp8"


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("products", ROUNDED)
def test_a_vit_trains_on_a_gpu(products: Products, compiled: bool) -> None:
    """As in bf16, within what 8 bits round."""
    last, first = {}, 0.0
    for rounds in (False, True):
        torch.manual_seed(0)
        model = Model(TINY).cuda()
        if rounds:
            convert_linears(model, products)
        for block in model.encoder.blocks:
            if compiled:
                block.compile(fullgraph=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        images = torch.randn(8, 3, 16, 16, device="cuda")
        labels = torch.arange(8, device="cuda")
        for step in range(30):
            loss = nn.functional.cross_entropy(run(model, images).float(), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            first = loss.item() if step == 0 else first
        last[rounds] = loss.item()
        assert last[rounds] < 0.7 * first
    assert last[True] == pytest.approx(last[False], rel=0.1)


def test_the_table_says_what_the_classes_do() -> None:
    assert set(TRAINED) == {row.weights for row in PRODUCTS.values() if row.trains}
    assert set(STORED) | {"plain"} == {name for name, row in PRODUCTS.items() if row.serves}


@pytest.mark.parametrize("products", [name for name in ROUNDED if not PRODUCTS[name].clips])
def test_each_expert_multiplies_as_a_linear_of_its_own(products: Products) -> None:
    """Outputs and gradients to the bit, also of an expert without rows; beside plain products, and undone."""
    torch.manual_seed(0)
    model = create(small("mixtral-tiny", head_features=8))
    emulate = "fp8" in products
    kept = convert_linears(model, products, emulate=emulate)
    experts = model.get_submodule("decoder.blocks.0.mlp.up")
    assert type(experts) is RoundedExpertLinear
    assert "a router" in kept["decoder.blocks.0.mlp.router"]
    assert not any(name.endswith((".up", ".down")) for name in kept)
    count, outputs, inputs = experts.weight.shape
    alone = nn.ModuleList(nn.Linear(inputs, outputs, bias=False) for _ in range(count))
    for one, weight in zip(alone, experts.weight.detach()):
        one.weight.data = weight.clone()
        one.__class__ = TRAINED[PRODUCTS[products].weights]
        one.__dict__.update(products=products, emulate=emulate)
    loads = torch.tensor([5, 0, *[3] * (count - 2)])
    rows = torch.randn(int(loads.sum()), inputs)
    gradient = torch.randn(len(rows), outputs).bfloat16()
    visited = torch.arange(count).repeat_interleave(loads)

    def passed(work: Any) -> tuple[Tensor, Tensor]:
        x = rows.clone().requires_grad_()
        torch.manual_seed(1)  # of stochastic rounding
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = work(x)
        out.backward(gradient)
        assert x.grad is not None
        return out.detach(), x.grad

    def separate(x: Tensor) -> Tensor:
        parts = zip(alone, torch.split(x, loads.tolist()))
        return torch.cat([one(part) for one, part in parts if len(part)])

    found = passed(lambda x: experts(x, loads.cumsum(0).to(torch.int32), visited))
    expected = passed(separate)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert experts.weight.grad is not None
    for number, one in enumerate(alone):
        own = torch.zeros_like(one.weight) if one.weight.grad is None else one.weight.grad
        assert torch.equal(experts.weight.grad[number], own)
    tokens = torch.randint(0, WORDS, (2, 8))
    rounded = run(model, tokens)
    outputs_too = "forward" in PRODUCTS[products].passes
    convert_linears(model, "plain")
    assert not isinstance(experts, RoundedExpertLinear)
    plain = run(model, tokens)
    least = 1e-3 if outputs_too else 0.0
    assert least <= float(((rounded - plain).norm() / plain.norm()).detach()) < 0.1
