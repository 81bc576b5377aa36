"""Forms of weights: each against the plain layer, and whole models against themselves."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from helpers.cpus import pretend
from helpers.generation import BOTH, DECODERS, tiny
from helpers.sweeps import sweep
from penstock.config.formats import PRODUCTS, Weights
from penstock.config.model import PRESETS
from penstock.config.plan import Plan
from penstock.cpu import this_cpu
from penstock.errors import ConfigError, EnvironmentProblem
from penstock.infer.generator import Generator
from penstock.kernels.native_integers import multiplies_integers, widens_integers
from penstock.models import create
from penstock.models.convert import save_pretrained
from penstock.models.rounded import round_rows
from penstock.products.convert import STORED, _stored, store_linears
from penstock.products.eight_bits import Fp8
from penstock.products.integers import Int8, Int8Twice, Int8Weights
from penstock.products.stored import Stored, StoredExperts

ERROR = {"packed": 1e-6, "int8": 0.02, "int8_weights": 0.02, "int4": 0.12, "fp8": 0.05}
"""Of outputs, relative to their deviation; measured 4e-7, 0.012, 0.010, 0.09 and 0.039."""


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("form", STORED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_form_multiplies_as_the_plain_layer_does(form: str, bias: bool, dtype: torch.dtype) -> None:
    if form == "packed" and dtype == torch.bfloat16 and not this_cpu().packs_bf16:
        pytest.skip("oneDNN packs no bf16 on this CPU, and `pack` refuses it")
    torch.manual_seed(0)
    linear = nn.Linear(64, 48, bias=bias).to(dtype).requires_grad_(False)
    packed = STORED[form](linear)
    for shape in ((1, 1, 64), (3, 64), (2, 20, 64), (2, 0, 64)):
        x = torch.randn(shape).to(dtype)
        expected = linear(x)
        found = packed(x)
        assert found.shape == expected.shape
        assert found.dtype == dtype
        if x.numel():
            error = float((found.float() - expected.float()).std() / expected.float().std())
            assert error < max(ERROR[form], 0.01 if dtype == torch.bfloat16 else 0)


@pytest.mark.parametrize("name", sweep([*DECODERS, *BOTH], ["llama"], slow=["deepseek", "t5-tiny"]))
def test_packed_models_generate_the_same_and_small_ones_nearly(name: str, tmp_path: Path) -> None:
    model = tiny(name, dtype=torch.float32)
    save_pretrained(model, tmp_path)
    rows = [[1, 2, 3], [4, 5, 6, 7]]
    expected = [each.ids for each in Generator(model, start=0, ends=()).generate(rows, max_tokens=8)]
    packed = Generator(tmp_path, start=0, ends=())
    assert any(isinstance(module, Stored) for module in packed.model.modules())
    left = [name for name, module in packed.model.named_modules() if isinstance(module, nn.Linear)]
    assert all(name.endswith(("router", "kv_up")) for name in left), left
    assert [each.ids for each in packed.generate(rows, max_tokens=8)] == expected
    assert [each.ids for each in packed.generate(rows, max_tokens=8, beams=3)]
    for weights in ("int8", "int8_weights", "int4"):
        small = Generator(tmp_path, start=0, ends=(), weights=weights)  # type: ignore[arg-type]
        first = [each.ids[0] for each in small.generate(rows, max_tokens=1)]
        assert len(first) == 2
        if weights != "int4":
            for beams in (1, 3):
                together = small.generate(rows, max_tokens=8, beams=beams)
                alone = [small.generate(row, max_tokens=8, beams=beams)[0].ids for row in rows]
                assert [each.ids for each in together] == alone, (weights, beams)
    half = Generator(tmp_path, Plan(precision="O3"), start=0, ends=())
    assert next(half.model.parameters()).dtype == torch.bfloat16
    assert len(half.generate(rows, max_tokens=8)[0].ids) == 8


def test_the_linear_of_patches_is_packed_and_never_in_few_bits() -> None:
    torch.manual_seed(0)
    model = create(replace(PRESETS["vit-digits"], width=32, depth=1, heads=2, mlp_width=64)).eval()
    sizes = model.config
    images = torch.randn(2, sizes.channels, sizes.image_size, sizes.image_size)
    with torch.inference_mode():
        expected = model(images)
        for form in ("packed", "int8_weights"):
            made = store_linears(copy.deepcopy(model), form)  # type: ignore[arg-type]
            assert isinstance(made.stem.proj, Stored) == (form == "packed")  # type: ignore[union-attr]
            if form == "packed":
                torch.testing.assert_close(made(images), expected)


def test_bf16_is_not_packed_where_onednn_cannot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, "avx2")
    model = tiny("gpt", dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=r"weights=packed: oneDNN .* choose weights=plain, or precision=O0"):
        store_linears(model, "packed")
    odd = nn.Linear(40, 48, bias=False, dtype=torch.bfloat16)  # no multiple of a group of int4
    assert _stored(odd, STORED["int4"], PRODUCTS["int4"]) is odd
    save_pretrained(model, tmp_path)
    half = Generator(tmp_path, Plan(precision="O3"), start=0, ends=())
    assert not any(isinstance(module, Stored) for module in half.model.modules())


def test_a_model_that_is_given_stays_as_it_is() -> None:
    model = tiny("gpt", dtype=torch.float32)
    Generator(model, ends=())
    assert not any(isinstance(module, Stored) for module in model.modules())


def test_layers_that_do_not_fit_four_bits_are_stored() -> None:
    config = replace(PRESETS["gpt-tiny"], width=32, heads=4, mlp_width=64, depth=1, vocabulary=60)
    model = store_linears(create(config), "int4")
    kinds = {
        name: type(module).__name__ for name, module in model.named_modules() if isinstance(module, Stored)
    }
    assert kinds["decoder.blocks.0.mlp.up"] == "Int4"
    assert kinds["head"] == "OneDnn", "60 words are no multiple of 16"
    with pytest.raises(ConfigError, match="for a CPU"):
        store_linears(create(config, device="meta"), "int8")


@pytest.mark.parametrize("weights", ["int8", "int8_weights", "int4"])
def test_experts_are_stored_each_by_itself(weights: Weights) -> None:
    """The router is not, and in compiled code they are one operation."""
    config = replace(
        PRESETS["mixtral-tiny"], width=32, heads=4, kv_heads=4, mlp_width=64, depth=1, vocabulary=64
    )
    plain, tokens = create(config).eval().requires_grad_(False), torch.arange(12)[None]
    for careful in (False, True):
        stored = store_linears(copy.deepcopy(plain), weights, careful=careful)
        mixture = stored.get_submodule("decoder.blocks.0.mlp")
        assert type(mixture.router).__name__ == "Router"
        forms = [type(one) for part in (mixture.up, mixture.down) for one in part.experts]
        exact = careful and weights == "int8"
        assert (forms[0] is STORED[weights]) == (not exact)
        assert forms[-1] is STORED[weights]
        assert isinstance(mixture.up, StoredExperts)
        expected, found = plain(tokens), stored(tokens)
        assert float((found - expected).std() / expected.std()) < (0.2 if weights == "int4" else 0.05)
    compiled = torch.compile(stored, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(tokens), found)


def test_a_copy_is_compiled_without_the_layer_that_it_was_copied_from() -> None:
    stored = Int8(nn.Linear(64, 48).requires_grad_(False))
    twin, x = copy.deepcopy(stored), torch.randn(3, 64)
    expected = stored(x)
    del stored
    torch.testing.assert_close(torch.compile(twin, backend="eager", fullgraph=True)(x), expected)


@pytest.mark.parametrize("kind", ["here", "without our kernel", "avx2"])
@pytest.mark.parametrize("factors", [None, torch.linspace(0.5, 2.0, 64)])
@pytest.mark.parametrize("form", [Int8, Int8Twice])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_row_in_int8_changes_another(
    form: type[Int8], kind: str, dtype: torch.dtype, factors: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "without our kernel":
        monkeypatch.setattr("penstock.products.integers.multiplies_integers", lambda: False)
    elif kind != "here":
        pretend(monkeypatch, kind)
    torch.manual_seed(0)
    linear = nn.Linear(64, 48).to(dtype).requires_grad_(False)
    packed, x = form(linear, factors), torch.randn(6, 64).to(dtype)
    x[1], x[4] = x[1].abs(), 0.0  # of one sign, as activations are, and padding
    found, outlier = packed(x), x.clone()
    outlier[3] *= 1000
    for row in range(len(x)):
        assert torch.equal(packed(x[row]), found[row])
    others = [0, 1, 2, 4, 5]
    assert torch.equal(packed(outlier)[others], found[others])
    if form is Int8 and dtype == torch.float32:
        by = torch.ones(64) if factors is None else factors
        weight, x = linear.weight / by, x * by
        low, high = x.amin(1, keepdim=True).double(), x.amax(1, keepdim=True).double()
        middle, step = (low + high) / 2, (high - low) / (2 * packed.most) + 1e-12
        inputs = ((x - middle) / step).round() * step + middle
        expected = inputs @ round_rows(weight).values().double().t() + linear.bias.double()
        torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_in_twice_8_bits_are_multiplied_by_our_kernel(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not multiplies_integers():
        pytest.skip("needs a CPU with AVX512-VNNI and a compiler")
    torch.manual_seed(0)
    linear = nn.Linear(300, 130).to(dtype).requires_grad_(False)
    x = (torch.randn(50, 300) * torch.logspace(-3, 3, 50)[:, None]).to(dtype)
    ours = Int8Twice(linear)
    monkeypatch.setattr("penstock.products.integers.fused_product", None)  # torch's, which ours does not call
    made = ours(x)
    monkeypatch.undo()
    monkeypatch.setattr("penstock.products.integers.multiplies_integers", lambda: False)
    theirs = Int8Twice(linear)
    assert ours.fused is not None
    assert theirs.fused is None
    # torch adds 128 to a number before it rounds it, which moves ties of the second rounding: 1 of 254 · 254 levels.
    level = (x.amax(1) - x.amin(1)).float()[:, None] / 254**2 * linear.weight.abs().amax().float()
    assert ((made - theirs(x)).abs() <= 2 * level + torch.finfo(dtype).eps * made.abs()).all()
    values = round_rows(linear.weight).values().double()
    exact = x.double() @ values.t() + linear.bias.double()
    once = Int8(linear)(x).double()
    if dtype == torch.float32:
        assert (made - exact).square().mean() < 1e-4 * (once - exact).square().mean()


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_row_with_weights_in_int8_changes_with_how_many_there_are(
    ours: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not ours:
        monkeypatch.setattr("penstock.products.integers.widens_integers", lambda: False)
    torch.manual_seed(0)
    linear = nn.Linear(72, 80).to(dtype).requires_grad_(False)
    made, x = (
        Int8Weights(linear),
        torch.randn(300, 72).to(dtype),
    )  # no multiple of the inputs that torch's kernel takes
    assert made.widens == (ours and widens_integers())
    whole, expected = made(x), linear(x).float()
    assert float((whole.float() - expected).std() / expected.std()) < ERROR["int8_weights"]
    for count in (1, 2, 6, 7, 15, 16, 17, 48, 299):
        assert torch.equal(made(x[:count]), whole[:count])
        assert torch.equal(made(x[-count:]), whole[-count:])


def test_int8_is_refused_where_torch_has_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.products.integers.multiplies_integers", lambda: False)
    monkeypatch.setattr("penstock.products.integers._ENGINES", ())
    with pytest.raises(EnvironmentProblem, match="use weights=int8_weights, or weights=plain"):
        store_linears(tiny("gpt", dtype=torch.float32), "int8")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_multiplies_as_its_reference_and_no_row_changes_another(dtype: torch.dtype) -> None:
    """torch multiplies fp8 on a CPU too, slowly."""
    torch.manual_seed(0)
    linear = nn.Linear(64, 48).to(dtype).requires_grad_(False)
    fast, reference = Fp8(linear), Fp8(linear)
    reference.emulate = True
    assert fast.weight.dtype == torch.float8_e4m3fn
    x = (torch.randn(5, 64) * torch.tensor([1e-3, 1.0, 50.0, 1.0, 0.0])[:, None]).to(dtype)
    found = fast(x)
    torch.testing.assert_close(found, reference(x), rtol=2**-7, atol=1e-6)  # one step of bf16
    for row in range(len(x)):
        assert torch.equal(fast(x[row]), found[row])
    bias = reference.bias
    assert bias is not None
    assert torch.equal(found[4], bias.to(dtype))


@pytest.mark.parametrize("name", ["llama", "marian-tiny"])
def test_a_model_in_fp8_generates_like_its_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.products.convert.device_problem", lambda *_, **__: None)
    rows = [[1, 2, 3], [4, 5, 6, 7]]
    half = Plan(precision="O3")
    small = Generator(tiny(name), half, weights="fp8", start=0, ends=())
    forms = {part: module for part, module in small.model.named_modules() if isinstance(module, Fp8)}
    assert forms
    assert all(".blocks." in part for part in forms)
    fast = small.generate(rows, max_tokens=8)
    assert [len(each.ids) for each in fast] == [8, 8]
    assert small.generate(rows[0], max_tokens=8)[0].ids == fast[0].ids, "whatever runs beside it"
    monkeypatch.setattr(Fp8, "emulate", True)
    assert [each.ids for each in small.generate(rows, max_tokens=8)] == [each.ids for each in fast]
    assert len(small.generate(rows, max_tokens=8, beams=3)) == 2


def test_fp8_is_refused_by_name_where_there_is_none() -> None:
    with pytest.raises(ConfigError, match=r"weights=fp8: fp8 needs a GPU .*9\.0.*on a CPU int8"):
        store_linears(tiny("gpt"), "fp8")


def test_a_plan_says_the_form_where_weights_do_not() -> None:
    rows = [[1, 2, 3], [4, 5, 6, 7]]
    by_plan = Generator(tiny("gpt", dtype=torch.float32), Plan(products="int8_weights"), ends=())
    by_weights = Generator(tiny("gpt", dtype=torch.float32), weights="int8_weights", ends=())
    forms = [
        {name: type(module) for name, module in one.model.named_modules() if isinstance(module, Stored)}
        for one in (by_plan, by_weights)
    ]
    assert forms[0] == forms[1]
    assert set(forms[0].values()) == {STORED["int8_weights"]}
    assert by_plan.generate(rows, max_tokens=4) == by_weights.generate(rows, max_tokens=4)
    own = Generator(tiny("gpt"), Plan(products="int8_weights"), weights="plain", ends=())
    assert not any(isinstance(module, Stored) for module in own.model.modules())
    with pytest.raises(ConfigError, match="would let a text change with its neighbours; choose weights=fp8"):
        Generator(tiny("gpt"), Plan(products="fp8_tensorwise"), ends=())


@pytest.mark.gpu
def test_fp8_on_a_gpu_multiplies_as_its_reference_and_generates() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(256, 512, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    fast, reference = Fp8(linear), Fp8(linear)
    reference.emulate = True
    for rows in (1, 3, 40):
        x = torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16)
        found = fast(x)
        error = (found - reference(x)).float().std() / found.float().std()
        assert error < 0.01, "sums in Hopper's shorter accumulator"
    for plan in (Plan(precision="O3"), Plan(precision="O3", compile="whole")):
        small = Generator(tiny("llama"), plan, weights="fp8", device="cuda", ends=())
        assert len(small.generate([[1, 2, 3]], max_tokens=8)[0].ids) == 8
