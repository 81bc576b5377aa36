"""Names and shapes against timm's, as recorded from it; logits too, where timm can be imported.

timm's imports need a torchvision that fits the torch beside it, which CPU installations often lack. Each
manifest holds a factory of timm's and its arguments, our configuration of the same model, and the state
dict's shapes.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from penstock.config.model import ViTConfig
from penstock.errors import ConfigError
from penstock.models import Model
from penstock.models.anatomy import anatomy_of, set_switch
from penstock.models.convert import from_timm, load_weights, to_timm

MANIFESTS = {
    path.stem: json.loads(path.read_text()) for path in (Path(__file__).parents[1] / "manifests").iterdir()
}
TINY = ViTConfig(image_size=32, patch_size=8, width=48, depth=3, heads=4, mlp_width=96, classes=10)


def _shapes(state: dict[str, torch.Tensor]) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in state.items()}


def test_every_shape_family_is_recorded() -> None:
    assert len(MANIFESTS) == 14


@pytest.mark.parametrize("name", sorted(MANIFESTS))
def test_recorded_weights_load(name: str) -> None:
    manifest = MANIFESTS[name]
    config = ViTConfig(**manifest["config"])
    state = {key: torch.empty(shape, device="meta") for key, shape in manifest["state"].items()}
    ours = Model(config, device="meta").state_dict()
    assert _shapes(from_timm(state, config).state) == _shapes(ours)


@pytest.mark.parametrize("name", sorted(set(MANIFESTS) - {"position_free_class_token"}))
def test_written_names_and_shapes_are_timms(name: str) -> None:
    manifest = MANIFESTS[name]
    config = ViTConfig(**manifest["config"])
    written = to_timm(Model(config, device="meta").state_dict(), config)
    assert _shapes(written) == manifest["state"]


@pytest.mark.parametrize(
    "changes",
    [
        {"classifier": "pooled"},
        {"classifier": "pooled", "pool_norm": "after"},
        {"qk_norm": True, "layer_scale": 0.1, "qkv_bias": False},
        {"distilled": True},
    ],
)
def test_there_and_back_is_exact(changes: dict[str, Any]) -> None:
    config = replace(TINY, **changes)
    first, second = Model(config), Model(config)
    loaded = load_weights(second, to_timm(first.state_dict(), config))
    assert loaded.names == "timm"
    for name, tensor in first.state_dict().items():
        assert torch.equal(second.state_dict()[name], tensor), name


def test_a_distilled_model_computes_what_timm_makes_of_its_weights() -> None:
    """VisionTransformerDistilled as timm computes it in evaluation, written out on the names that it stores."""
    config = replace(TINY, depth=1, distilled=True)
    ours = Model(config).eval()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    w = to_timm(ours.state_dict(), config)
    images = torch.randn(3, 3, 32, 32)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, (48,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-6)

    patches = F.conv2d(images, w["patch_embed.proj.weight"], w["patch_embed.proj.bias"], stride=8)
    learned = (w[name].expand(3, 1, 48) for name in ("cls_token", "dist_token"))
    x = torch.cat([*learned, patches.flatten(2).transpose(1, 2)], dim=1) + w["pos_embed"]
    qkv = (
        linear(norm(x, "blocks.0.norm1"), "blocks.0.attn.qkv").unflatten(2, (3, 4, 12)).permute(2, 0, 3, 1, 4)
    )
    seen = F.scaled_dot_product_attention(*qkv).transpose(1, 2).flatten(2)
    x = x + linear(seen, "blocks.0.attn.proj")
    x = x + linear(F.gelu(linear(norm(x, "blocks.0.norm2"), "blocks.0.mlp.fc1")), "blocks.0.mlp.fc2")
    x = norm(x, "norm")
    with torch.no_grad():
        got = ours(images)
    torch.testing.assert_close(got, (linear(x[:, 0], "head") + linear(x[:, 1], "head_dist")) / 2)
    with pytest.raises(
        ConfigError, match=r"a distillation token, but model\.distilled is false; set it to true"
    ):
        load_weights(Model(replace(config, distilled=False)), w)
    other = Model(replace(config, classes=3))
    names = {f"{head}.{kind}" for head in ("head", "distil_head") for kind in ("weight", "bias")}
    assert set(load_weights(other, w, new_head=True).drawn) == names


def test_a_class_token_without_position_gets_one_of_zeros() -> None:
    state = to_timm(Model(TINY).state_dict(), TINY)
    state["pos_embed"] = state["pos_embed"][:, 1:]
    positions = from_timm(state, TINY).state["encoder.places.weight"]
    assert positions.shape == (17, 48)
    assert not positions[0].any()


def test_a_conv_stem_is_refused() -> None:
    config = replace(TINY, stem="conv")
    with pytest.raises(ConfigError, match="no convolutional stem"):
        to_timm(Model(config).state_dict(), config)


@pytest.fixture
def timm() -> Any:
    """timm, or a skip where it, or the torchvision it needs, cannot be imported."""
    try:
        import timm as module
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"timm cannot be imported: {error}")
    return module


def _theirs(timm: Any, manifest: dict[str, Any]) -> Any:
    model = timm.create_model(manifest["factory"], **manifest["arguments"]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(MANIFESTS))
def test_logits_equal_timms(name: str, timm: Any) -> None:
    manifest = MANIFESTS[name]
    theirs = _theirs(timm, manifest)
    assert _shapes(theirs.state_dict()) == manifest["state"]
    ours = Model(ViTConfig(**manifest["config"])).eval()
    load_weights(ours, theirs.state_dict())
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        expected, got = theirs(images), ours(images)
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
    if name != "position_free_class_token":
        theirs.load_state_dict(to_timm(ours.state_dict(), ours.config))


@pytest.mark.gpu
def test_another_image_size_interpolates_as_timm_does(timm: Any) -> None:
    manifest = MANIFESTS["pooled_norm_before"]
    theirs = _theirs(timm, manifest)
    for size in (160, 288):
        ours = Model(ViTConfig(**manifest["config"], image_size=size)).eval()
        assert load_weights(ours, theirs.state_dict()).resized_from == 196
        larger = timm.create_model(manifest["factory"], **manifest["arguments"], img_size=size).eval()
        state = theirs.state_dict()
        larger.load_state_dict(timm.models.vision_transformer.checkpoint_filter_fn(state, larger))
        images = torch.randn(1, 3, size, size)
        with torch.no_grad():
            expected, got = larger(images), ours(images)
        assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.gpu
def test_timms_model_is_enrolled(timm: Any) -> None:
    model = _theirs(timm, MANIFESTS["qk_norm_layer_scale"])
    anatomy = anatomy_of(model)
    assert anatomy.family == "timm_vit"
    assert anatomy.blocks == ("blocks.0", "blocks.1")
    images = torch.randn(1, 3, 224, 224)
    expected = model(images)
    set_switch(model, "attention", "plain")
    assert not model.blocks[0].attn.fused_attn
    torch.testing.assert_close(model(images), expected)
    set_switch(model, "attention", "sdpa")
    assert model.blocks[0].attn.fused_attn
    with pytest.raises(ConfigError, match="plain or sdpa"):
        set_switch(model, "attention", "flash")
    with pytest.raises(ConfigError, match="no token order but batch_first"):
        set_switch(model, "token_order", "batch_second")
