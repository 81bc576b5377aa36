"""The Vision Transformer: what it computes, and that how it computes changes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import fields, replace
from inspect import signature
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from helpers.sweeps import in_turn, sweep
from penstock.config.model import PRESETS, ViTConfig
from penstock.config.plan import AttentionBackend, TokenOrder
from penstock.errors import ConfigError
from penstock.models import Model, create
from penstock.models.embeddings import PatchStem
from penstock.models.inputs import Inputs
from penstock.planner.describe import totals

VITS = [name for name, preset in PRESETS.items() if isinstance(preset, ViTConfig) and not preset.experts]
TINY = ViTConfig(image_size=32, patch_size=8, width=48, depth=3, heads=4, mlp_width=96, classes=10)
VARIANTS: dict[str, dict[str, Any]] = {
    "token": {}, "pooled": {"classifier": "pooled"},
    "pooled_norm_after": {"classifier": "pooled", "pool_norm": "after"}, "conv_stem": {"stem": "conv"},
    "qk_norm": {"qk_norm": True, "qkv_bias": False}, "layer_scale": {"layer_scale": 0.1, "mlp": "gelu_tanh"},
    "drop_path": {"drop_path": 0.3},
}  # fmt: skip
TOKEN_ORDERS: tuple[TokenOrder, ...] = ("batch_first", "batch_second")
ON_CPU: tuple[AttentionBackend, ...] = ("plain", "sdpa", "math", "flash", "auto")


def _model(config: ViTConfig, *, dtype: torch.dtype = torch.float64) -> Model:
    """A model none of whose parameters is at a neutral value."""
    torch.manual_seed(1)
    model = Model(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def _pass(model: Model, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and all gradients, random numbers drawn alike."""
    model.zero_grad()
    torch.manual_seed(2)
    logits = model(images)
    F.cross_entropy(logits, torch.arange(len(images)) % model.config.classes).backward()
    return logits.detach(), {name: _grad(p) for name, p in model.named_parameters()}


def _grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.clone()


@pytest.mark.parametrize(("variant", "form"), in_turn(VARIANTS, itertools.product(TOKEN_ORDERS, ON_CPU)))
def test_layout_and_attention_change_speed_only(
    variant: str, form: tuple[TokenOrder, AttentionBackend]
) -> None:
    token_order, attention = form
    model = _model(replace(TINY, **VARIANTS[variant])).train()
    images = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    model.set_attention("plain")
    expected, gradients = _pass(model, images)
    names = list(model.state_dict())
    model.set_token_order(token_order)
    model.set_attention(attention)
    assert model.token_order == token_order
    got, others = _pass(model, images)
    assert list(model.state_dict()) == names
    # fp64, forward and backward; measured at most 4e-16.
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-10, atol=1e-10, msg=name)


def _reference(model: Model, images: Tensor) -> Tensor:
    """The model written out after the paper's equations 1 to 4, one sample and one head at a time."""
    c, p = model.config, dict(model.named_parameters())
    logits = []
    for image in images:
        kernel = p["stem.proj.weight"].view(c.width, c.channels, c.patch_size, c.patch_size)
        patches = F.conv2d(image[None], kernel, p["stem.proj.bias"], stride=c.patch_size)[0].flatten(1).T
        x = torch.cat([p["class_token"][None], patches]) + p["encoder.places.weight"]
        for i in range(c.depth):
            begin = f"encoder.blocks.{i}."
            block = {n.removeprefix(begin): v for n, v in p.items() if n.startswith(begin)}
            x = x + _reference_attention(c, block, _norm(c, x, block, "norm1"))
            hidden = _norm(c, x, block, "norm2") @ block["mlp.up.weight"].T + block["mlp.up.bias"]
            hidden = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
            x = x + hidden @ block["mlp.down.weight"].T + block["mlp.down.bias"]
        logits.append(p["head.weight"] @ _norm(c, x, p, "norm")[0] + p["head.bias"])
    return torch.stack(logits)


def _norm(config: ViTConfig, x: Tensor, p: dict[str, Any], name: str) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scale = (centred.square().mean(-1, keepdim=True) + config.norm_eps).rsqrt()
    return centred * scale * p[f"{name}.weight"] + p[f"{name}.bias"]


def _reference_attention(config: ViTConfig, p: dict[str, Any], x: Tensor) -> Tensor:
    qkv = (x @ p["attention.qkv.weight"].T + p["attention.qkv.bias"]).split(
        config.layers[0].head_width, dim=1
    )
    heads = []
    for head in range(config.heads):
        q, k, v = qkv[3 * head : 3 * head + 3]
        weights = (q @ k.T / config.layers[0].head_width ** 0.5).exp()
        heads.append(weights / weights.sum(1, keepdim=True) @ v)
    return torch.cat(heads, dim=1) @ p["attention.out.weight"].T + p["attention.out.bias"]


@pytest.mark.parametrize("token_order", TOKEN_ORDERS)
def test_it_is_the_model_of_the_paper(token_order: TokenOrder) -> None:
    model = _model(TINY)
    model.set_token_order(token_order)
    images = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(model(images), _reference(model, images), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("pool_norm", "first"), [("before", "norm"), ("after", "mean")])
def test_pooling_means_over_patches(pool_norm: Any, first: str) -> None:
    model = _model(replace(TINY, classifier="pooled", pool_norm=pool_norm))
    assert model.encoder.places.weight.shape == (16, 48)
    x = torch.randn(2, 16, 48, dtype=torch.float64)
    norm: Callable[[Tensor], Tensor] = model.norm
    pooled = norm(x).mean(1) if first == "norm" else norm(x.mean(1))
    torch.testing.assert_close(model.classes(x, model.graph.heads[0]), model.head(pooled))


def test_patches_are_the_convolution_they_replace() -> None:
    stem = PatchStem(TINY.graph.inputs[0], TINY.width, dtype=torch.float64)
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    kernel = stem.proj.weight.view(48, 3, 8, 8)
    expected = F.conv2d(images, kernel, stem.proj.bias, stride=8).flatten(2).transpose(1, 2)
    torch.testing.assert_close(stem(images), expected)
    torch.testing.assert_close(stem(images.contiguous(memory_format=torch.channels_last)), expected)


def test_the_signature_of_a_model_names_all_inputs() -> None:
    kinds = signature(Model.forward).parameters
    named = {name for name, one in kinds.items() if one.kind is one.KEYWORD_ONLY}
    assert named == {field.name for field in fields(Inputs)} - {"tensors"}
    model, images = Model(TINY).eval(), torch.randn(2, 3, 32, 32)
    assert torch.equal(model(images, targets=None), model(images=images))
    for wrong in ({"targets": torch.zeros(2)}, {"pixels": images}, {"by_sample": True}):
        with pytest.raises(TypeError, match=f"takes images.* not 1 values and {next(iter(wrong))}"):
            model(images, **wrong)
    with pytest.raises(TypeError, match="not 2 values"):
        model(images, images)
    former = Inputs.of(PRESETS["multimodal-tiny"].graph, (), sees=images)  # by the argument's former name
    assert former.memory_index is images


def test_the_conv_stem_halves_once_per_layer() -> None:
    model = Model(replace(TINY, stem="conv", patch_size=16, width=64))
    convs = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert [conv.out_channels for conv in convs] == [8, 16, 32, 64]
    assert model.embed(torch.randn(2, 3, 32, 32)).shape == (2, 5, 64)


def test_construction_is_seeded_and_can_be_repeated() -> None:
    torch.manual_seed(5)
    first = Model(TINY)
    torch.manual_seed(5)
    second = create(TINY)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters()))
    torch.manual_seed(5)
    first.init_weights()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters()))


def test_a_meta_model_comes_to_life() -> None:
    config = replace(TINY, drop_path=0.3, layer_scale=0.1, stem="conv")
    meta = Model(config, device="meta")
    assert all(p.is_meta for p in meta.parameters())
    alive = meta.to_empty(device="cpu")
    torch.manual_seed(5)
    alive.init_weights()
    torch.manual_seed(5)
    direct = Model(config)
    for (name, a), (_, b) in zip(alive.state_dict().items(), direct.state_dict().items()):
        assert torch.equal(a, b), name
    for a, b in zip(alive.buffers(), direct.buffers()):
        assert torch.equal(a, b)


def test_it_is_built_and_run_without_memory() -> None:
    """As simulations of large models do."""
    with FakeTensorMode():
        model = Model(replace(TINY, drop_path=0.3, stem="conv"))
        model(torch.randn(2, 3, 32, 32)).sum().backward()
    assert all(isinstance(p.grad, FakeTensor) for p in model.parameters())


def test_each_weight_is_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "init_weights", lambda self: None)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    Model(replace(TINY, stem="conv"))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", sweep(VITS, ["vit-s16", "vit-digits"], slow=["vit-g14"]))
def test_every_preset_builds(name: str) -> None:
    model = Model(PRESETS[name], device="meta")
    side = PRESETS[name].image_size
    assert model(torch.empty(2, PRESETS[name].channels, side, side, device="meta")).shape == (
        2, PRESETS[name].classes,
    )  # fmt: skip


def test_a_wrong_image_is_refused_by_shape() -> None:
    with pytest.raises(ConfigError, match=r"\(batch, 3, 32, 32\), but was given \(2, 1, 32, 32\)"):
        Model(TINY)(torch.zeros(2, 1, 32, 32))


def test_unknown_choices_are_refused() -> None:
    with pytest.raises(ConfigError, match="no token order 'sideways'"):
        Model(TINY).set_token_order("sideways")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no attention backend 'quick'"):
        Model(TINY).set_attention("quick")  # type: ignore[arg-type]


def test_dropout_and_stochastic_depth_act_in_training_only() -> None:
    model = Model(replace(TINY, dropout=0.2, drop_path=0.2))
    images = torch.randn(2, 3, 32, 32)
    assert not torch.equal(model(images), model(images))
    model.eval()
    assert torch.equal(model(images), model(images))


def test_half_precision_leaves_the_rates_of_stochastic_depth_alone() -> None:
    model = Model(replace(TINY, drop_path=0.1)).to(torch.bfloat16)
    rates = [float(block.branch1.drop_rate) * 2.0**-24 for block in model.encoder.blocks]  # type: ignore[union-attr, arg-type]
    assert rates == pytest.approx([0.0, 0.05, 0.1], abs=1e-7)


@pytest.mark.parametrize("token_order", TOKEN_ORDERS)
def test_half_precision_is_near_full(token_order: TokenOrder) -> None:
    full = _model(TINY, dtype=torch.float32)
    half = _model(TINY, dtype=torch.float32).to(torch.bfloat16)
    half.set_token_order(token_order)
    images = torch.randn(4, 3, 32, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = full(images)
    expected = full(images)
    # Measured 0.8 % of the largest logit under autocast, 0.9 % in bf16 throughout.
    for got in (mixed, half(images.to(torch.bfloat16))):
        assert (got.float() - expected).abs().max() < 0.02 * expected.abs().max()


def test_blocks_of_different_rates_share_one_graph() -> None:
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    model = Model(replace(TINY, drop_path=0.3, layer_scale=0.1)).train()
    for block in model.encoder.blocks:
        block.compile(backend=counter, fullgraph=True)
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    assert counter.frame_count == 1
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("token_order", TOKEN_ORDERS)
def test_the_whole_model_is_one_graph(token_order: TokenOrder) -> None:
    torch._dynamo.reset()
    model = _model(replace(TINY, depth=1, qk_norm=True))
    model.set_token_order(token_order)
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(images), model(images))
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["plain", "sdpa", "flash", "efficient", "cudnn", "math", "auto"])
@pytest.mark.parametrize("token_order", TOKEN_ORDERS)
def test_every_backend_agrees_on_a_gpu(token_order: TokenOrder, attention: AttentionBackend) -> None:
    config = replace(TINY, width=128, heads=2, mlp_width=256)
    reference = _model(config, dtype=torch.float32)
    images = torch.randn(4, 3, 32, 32)
    expected, gradients = _pass(reference, images)
    model = _model(config, dtype=torch.float32).to("cuda", torch.bfloat16)
    model.set_token_order(token_order)
    model.set_attention(attention)
    got = model(images.to("cuda", torch.bfloat16))
    F.cross_entropy(got.float(), torch.arange(4, device="cuda")).backward()
    # bf16 has 8 bits: a few of its steps of the largest value.
    assert (got.float().cpu() - expected).abs().max() < 0.03 * expected.abs().max()
    for name, parameter in model.named_parameters():
        largest = gradients[name].abs().max()
        assert (_grad(parameter).float().cpu() - gradients[name]).abs().max() < 0.06 * largest, name


class _Wrapped(nn.Module):
    """Calls what it holds, and has none of its attributes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.held = [inner]

    def forward(self, x: Tensor) -> Tensor:
        return self.held[0](x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("variant", VARIANTS)
def test_submodules_are_called_and_nothing_is_taken_out_of_them(variant: str) -> None:
    """So that linears and norms can be replaced by sharded ones, or by ones of another type."""
    model = _model(replace(TINY, **VARIANTS[variant])).eval()
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    expected = model(images)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear | nn.LayerNorm | nn.Conv2d):
            holder, _, last = name.rpartition(".")
            setattr(model.get_submodule(holder), last, _Wrapped(module))
    assert torch.equal(model(images), expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"norm": "rms", "mlp": "swiglu", "positions": "rotary", "bias": False, "qkv_bias": False},
        {"kv_heads": 1, "positions": "none", "window": 5, "norm_first": False, "layer_scale": 0.1},
        {"parallel": True, "positions": "sinusoidal", "classifier": "pooled", "mlp": "relu"},
    ],
)
def test_what_text_models_have_an_image_model_can_have_too(changes: dict[str, Any]) -> None:
    """Its parameters are predicted, both orders of tokens compute the same, and every weight gets a gradient."""
    config = replace(TINY, **changes)
    model = _model(config)
    assert totals(config).parameters == sum(p.numel() for p in model.parameters())
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    first, gradients = _pass(model, images)
    assert all(gradient.abs().max() > 0 for gradient in gradients.values())
    model.set_token_order("batch_second")
    second, others = _pass(model, images)
    torch.testing.assert_close(second, first, rtol=1e-10, atol=1e-10)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-10, atol=1e-10, msg=name)


def test_a_preset_is_created_by_its_name() -> None:
    assert create("vit-s16", device="meta").config == PRESETS["vit-s16"]
    with pytest.raises(ConfigError, match="Did you mean 'vit-s16'"):
        create("vit_small_patch16_224", device="meta")
