"""Penstock's ViT against transformers': the same logits from the same weights, in both directions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.sweeps import sweep
from penstock.config.model import PRESETS, ViTConfig
from penstock.errors import ConfigError
from penstock.models import Model
from penstock.models.convert import (
    config_from_hf,
    from_pretrained,
    hf_config,
    load_weights,
    save_pretrained,
    to_hf,
)

VITS = [
    name
    for name, preset in PRESETS.items()
    if isinstance(preset, ViTConfig) and name.startswith("vit-") and not preset.experts
]
transformers = pytest.importorskip("transformers")

TINY = ViTConfig(image_size=32, patch_size=8, width=48, depth=3, heads=4, mlp_width=96, classes=10)


def _theirs(config: ViTConfig, **changes: Any) -> Any:
    """A randomly initialised transformers model of our configuration, biases and norms not at their neutral
    values.
    """
    values = {
        k: v for k, v in hf_config(config).items() if k not in ("architectures", "model_type", "penstock")
    }
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**(values | changes))).eval()
    _disturb(model)
    return model


def _disturb(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)


def _close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """1e-5 of the largest logit."""
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def _shrunk(name: str) -> ViTConfig:
    """The preset with width, heads and patches as they are, and two blocks on 4 × 4 patches, to be quick."""
    preset = PRESETS[name]
    return replace(preset, depth=2, classes=11, classifier="token", image_size=4 * preset.patch_size)


@pytest.mark.parametrize("name", sweep(VITS, ["vit-s16", "vit-b32"], slow=["vit-g14"]))
def test_logits_equal_transformers_for_every_shape_family(name: str, tmp_path: Path) -> None:
    config = _shrunk(name)
    theirs = _theirs(config)
    images = torch.randn(2, config.channels, config.image_size, config.image_size)
    expected = theirs(images).logits
    ours = Model(config).eval()
    loaded = load_weights(ours, theirs.state_dict())
    assert loaded.names == "hf"
    assert not loaded.drawn
    _close(ours(images), expected)


@pytest.mark.parametrize(
    "changes", [{}, {"qkv_bias": False}, {"mlp": "gelu_tanh"}, {"mlp": "relu2"}, {"norm_eps": 1e-3}]
)
def test_transformers_reads_what_we_write(changes: dict[str, Any], tmp_path: Path) -> None:
    config = replace(TINY, **changes)
    ours = Model(config).eval()
    _disturb(ours)
    save_pretrained(ours, tmp_path)
    reader = transformers.ViTForImageClassification
    theirs, report = reader.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    images = torch.randn(2, 3, 32, 32)
    _close(ours(images), theirs.eval()(images).logits)


def test_we_read_what_transformers_writes(tmp_path: Path) -> None:
    theirs = _theirs(TINY, hidden_dropout_prob=0.1)
    theirs.save_pretrained(tmp_path)
    ours = from_pretrained(tmp_path).eval()
    assert ours.config == replace(TINY, dropout=0.1)
    images = torch.randn(2, 3, 32, 32)
    _close(ours(images), theirs(images).logits)


def test_a_backbone_without_head_needs_leave_to_draw_one(tmp_path: Path) -> None:
    theirs = transformers.ViTModel(_theirs(TINY).config)
    theirs.save_pretrained(tmp_path)
    ours = Model(TINY)
    with pytest.raises(ConfigError, match=r"lack head.weight, head.bias.*\n?.*new_head=True"):
        load_weights(ours, tmp_path)
    head = ours.head.weight.clone()
    loaded = load_weights(ours, tmp_path, new_head=True)
    assert loaded.drawn == ("head.weight", "head.bias")
    assert all(name.startswith("vit.pooler.") for name in loaded.ignored)
    assert len(loaded.ignored) == 2
    assert torch.equal(ours.head.weight, head)
    assert torch.equal(ours.norm.weight, theirs.layernorm.weight)


def test_another_image_size_interpolates_as_transformers_does() -> None:
    theirs = _theirs(TINY)
    ours = Model(replace(TINY, image_size=48)).eval()
    loaded = load_weights(ours, theirs.state_dict())
    assert loaded.resized_from == 17
    images = torch.randn(2, 3, 48, 48)
    _close(ours(images), theirs(images, interpolate_pos_encoding=True).logits)


def test_names_written_are_those_of_the_hub(tmp_path: Path) -> None:
    _theirs(TINY).save_pretrained(tmp_path)
    recorded = {name: tuple(t.shape) for name, t in load_file(tmp_path / "model.safetensors").items()}
    written = to_hf(Model(TINY).state_dict(), TINY)
    assert {name: tuple(t.shape) for name, t in written.items()} == recorded


def test_config_goes_there_and_back() -> None:
    config = replace(TINY, drop_path=0.2, dropout=0.1, mlp="gelu_tanh", qkv_bias=False, norm_eps=1e-5)
    config = replace(config, attention_dropout=0.3, mlp_dropout=0.0)
    assert config_from_hf(json.loads(json.dumps(hf_config(config)))) == config


def test_config_defaults_are_transformers() -> None:
    defaults = transformers.ViTConfig(num_labels=7)
    assert config_from_hf({"num_labels": 7}) == config_from_hf(defaults.to_dict())


def test_sizes_given_as_pairs_are_read() -> None:
    assert config_from_hf({"image_size": [96, 96], "patch_size": [8, 8]}).tokens == 145
    with pytest.raises(ConfigError, match=r"image_size \[96, 64\].*square"):
        config_from_hf({"image_size": [96, 64]})


def test_what_cannot_be_read_is_said() -> None:
    with pytest.raises(ConfigError, match="model_type 'bert'"):
        config_from_hf({"model_type": "bert"})
    with pytest.raises(ConfigError, match="hidden_act 'mish'"):
        config_from_hf({"hidden_act": "mish"})
    with pytest.raises(ConfigError, match="has odd_option 3, whose effect"):
        config_from_hf({"odd_option": 3})


@pytest.mark.parametrize(
    "changes",
    [
        {"classifier": "pooled"}, {"stem": "conv"}, {"qk_norm": True}, {"parallel": True}, {"experts": 2},
        {"heads": 5, "head_features": 16},
    ],
)  # fmt: skip
def test_what_transformers_lacks_is_refused(changes: dict[str, Any]) -> None:
    config = replace(TINY, **changes)
    with pytest.raises(ConfigError, match="transformers' vit has no model"):
        hf_config(config)
    with pytest.raises(ConfigError, match="transformers' vit has no model"):
        to_hf(Model(config).state_dict(), config)


def test_a_half_precision_file_fills_a_full_precision_model(tmp_path: Path) -> None:
    state = {name: t.to(torch.bfloat16) for name, t in to_hf(Model(TINY).state_dict(), TINY).items()}
    save_file(state, tmp_path / "half.safetensors")
    ours = Model(TINY)
    load_weights(ours, tmp_path / "half.safetensors")
    assert ours.head.weight.dtype == torch.float32
    assert torch.equal(ours.head.weight, state["classifier.weight"].float())
