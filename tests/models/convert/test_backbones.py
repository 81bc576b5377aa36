"""Vision backbones against transformers' own classes: the same features, losses and gradients from the same weights."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from helpers.families import loss
from penstock.build import build
from penstock.config.plan import Plan
from penstock.config.run import DataConfig, Lora, Recipe
from penstock.data import open_source
from penstock.errors import ConfigError
from penstock.models import Model
from penstock.models.convert import from_pretrained, load_weights, model_in, save_pretrained

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 32, "patch_size": 8,
}  # fmt: skip
WIDE: dict[str, Any] = {**SMALL, "intermediate_size": 96}
TEXT: dict[str, Any] = {
    "hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 96, "vocab_size": 99,
}  # fmt: skip
WHOLE: dict[str, Any] = {"vision_config": WIDE, "text_config": TEXT}
FAMILIES: dict[str, dict[str, Any]] = {
    "Dinov2": SMALL,
    "Dinov2 ": {**SMALL, "use_swiglu_ffn": True},
    "Dinov2WithRegisters": {**SMALL, "layerscale_value": 0.5, "qkv_bias": False},
    "DINOv3ViT": {**WIDE, "num_register_tokens": 3, "layerscale_value": 0.5},
    "DINOv3ViT ": {**WIDE, "use_gated_mlp": True, "hidden_act": "silu", "key_bias": True},
    "CLIP": WHOLE,
    "Siglip": WHOLE,
}
OF_TEXTS = {"dropout": 0.0, "encoder_no_repeat_ngram_size": 0, "tie_word_embeddings": True}
"""Options that older files of CLIP have and nothing reads."""
TOWERS = {**FAMILIES, "CLIPVision": {**WIDE, **OF_TEXTS}, "SiglipVision": WIDE}
UNUSED = re.compile(r"mask_token|post_layernorm|vision_model\.head\.|register_tokens")
"""Weights that no class with a head for classes computes with; of no registers, too."""


def _theirs(family: str, suffix: str = "ForImageClassification") -> Any:
    """A model of transformers with ten classes, no weight of which is neutral."""
    name = family.strip()
    options = getattr(transformers, f"{name}Config")(**TOWERS[family], num_labels=10)
    alone = name == "DINOv3ViT"  # of which there is no class with a head
    model = getattr(transformers, name + ("Model" if alone else suffix))(options).eval()
    if alone and suffix != "Model":
        model.classifier = torch.nn.Linear(48, 10)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def _logits(model: Any, images: torch.Tensor, **options: Any) -> torch.Tensor:
    """The output of a model of transformers, or of a tower with the head beside it."""
    made = model(images, **options)
    return made.logits if "logits" in made else model.classifier(made.pooler_output)  # type: ignore[no-any-return]


def _tower(model: Any) -> Any:
    """The part of a model of transformers that sees images."""
    alone = hasattr(model, "rope_embeddings")  # DINOv3's, whose `base_model` is its blocks
    return model if alone else getattr(model, "vision_model", model.base_model)


def _close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """1e-5 of the largest number."""
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def _saved(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("family", FAMILIES)
def test_features_loss_and_gradients_equal_theirs(family: str, tmp_path: Path) -> None:
    theirs = _theirs(family)
    theirs.save_pretrained(tmp_path)
    ours = from_pretrained(tmp_path).eval()
    images, labels = torch.randn(3, 3, 32, 32), torch.tensor([1, 7, 2])
    features = ours.features(images)
    normed = features if family == "CLIP" else ours.norm(features)
    _close(normed, _tower(theirs)(images).last_hidden_state)
    logits = _logits(theirs, images)
    _close(ours(images), logits)
    losses = [torch.nn.functional.cross_entropy(one, labels) for one in (ours(images), logits)]
    _close(*losses)
    sum(losses).backward()
    learned = {name for name, one in theirs.named_parameters() if one.grad is not None and one.numel()}
    with torch.no_grad():
        for one in (*theirs.parameters(), *ours.parameters()):
            one.copy_(torch.zeros_like(one) if one.grad is None else one.grad)
    theirs.save_pretrained(tmp_path / "theirs")
    save_pretrained(ours, tmp_path / "ours")
    expected, mine = _saved(tmp_path / "theirs"), _saved(tmp_path / "ours")
    unused = expected.keys() - mine.keys()
    assert len(unused) == len(dict(theirs.named_parameters())) - len(learned)
    assert all(map(UNUSED.search, unused))
    rounding = re.compile(r"\bk(ey|_proj)\.bias$")  # moves all scores of a query alike
    for name in mine.keys() - set(filter(rounding.search, mine)):
        _close(mine[name], expected[name])


@pytest.mark.parametrize("family", FAMILIES)
def test_another_image_size_interpolates_as_theirs(family: str, tmp_path: Path) -> None:
    theirs = _theirs(family)
    theirs.save_pretrained(tmp_path)
    ours = Model(replace(from_pretrained(tmp_path).config, image_size=48)).eval()
    assert load_weights(ours, tmp_path).resized_from in (
        (16, 17) if ours.config.positions == "learned" else (None,)
    )
    images = torch.randn(2, 3, 48, 48)
    options = {"interpolate_pos_encoding": True} if family in ("CLIP", "Siglip") else {}
    _close(ours(images), _logits(theirs, images, **options))


@pytest.mark.parametrize("family", TOWERS)
def test_a_tower_gets_a_head_of_its_own(family: str, tmp_path: Path) -> None:
    tower = _theirs(family, "Model")
    tower.save_pretrained(tmp_path)
    ours = Model(replace(model_in(tmp_path), classes=5)).eval()
    with pytest.raises(ConfigError, match="new_head=True"):
        load_weights(ours, tmp_path)
    loaded = load_weights(ours, tmp_path, new_head=True)
    assert loaded.drawn == ("head.weight", "head.bias")
    assert ("text_model" in str(loaded)) is (family in ("CLIP", "Siglip"))
    images = torch.randn(2, 3, 32, 32)
    pooled = _tower(tower)(images).pooler_output
    _close(ours(images), pooled @ ours.head.weight.T + ours.head.bias)
    save_pretrained(ours, tmp_path / "ours")
    assert from_pretrained(tmp_path / "ours").config == ours.config
    written = json.loads((tmp_path / "ours" / "config.json").read_text())["architectures"][0]
    reader = getattr(transformers, written)
    again, report = reader.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert set(report["unexpected_keys"]) == {"classifier.weight", "classifier.bias"}
    _close(again.eval()(images).pooler_output, pooled)


@pytest.mark.parametrize("family", FAMILIES)
def test_folders_go_there_and_back_to_the_bit(family: str, tmp_path: Path) -> None:
    theirs = _theirs(family)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = from_pretrained(tmp_path / "theirs")
    save_pretrained(ours, tmp_path / "ours")
    before, after = _saved(tmp_path / "theirs"), _saved(tmp_path / "ours")
    assert after.keys() <= before.keys()
    assert all(torch.equal(after[name], before[name]) for name in after)
    again, report = type(theirs).from_pretrained(tmp_path / "ours", output_loading_info=True)
    head = (
        {"classifier.weight", "classifier.bias"}
        if hasattr(theirs, "classifier") and family.startswith("DINOv3")
        else set()
    )
    assert set(report.pop("unexpected_keys")) == head
    assert all(UNUSED.search(name) for kind in report.values() for name in kind), report
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(_tower(again.eval())(images)[0], _tower(theirs)(images)[0])
    back = from_pretrained(tmp_path / "ours")
    assert back.config == ours.config
    assert all(torch.equal(back.state_dict()[name], one) for name, one in ours.state_dict().items())


@pytest.mark.parametrize(
    ("family", "head"),
    [
        ("CLIP", {"classifier": "pooled", "pool_norm": "none"}), ("Siglip", {"classifier": "pooled"}),
        ("Dinov2WithRegisters", {"classifier": "both"}),
    ],
)  # fmt: skip
def test_what_was_tuned_opens_as_transformers_class_with_a_head(
    family: str, head: dict[str, Any], tmp_path: Path
) -> None:
    """From the folder of the whole model, which has no classes."""
    _theirs(family, "Model").save_pretrained(tmp_path)
    model, images = replace(model_in(tmp_path), classes=5, **head), torch.randn(4, 3, 32, 32)
    built = build(model, Plan(micro_batch=4), recipe=Recipe(lr=3e-3), loss=loss)
    load_weights(built.model, tmp_path, new_head=True)
    for _ in range(3):
        built.step([(images, torch.arange(4))])
    save_pretrained(built.model, tmp_path / "ours")
    theirs = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "ours").eval()
    _close(built.model.eval()(images), theirs(images).logits)


@pytest.mark.parametrize("recipe", [Recipe(freeze=("stem", "encoder.blocks.0")), Recipe(lora=Lora(rank=4))])
@pytest.mark.parametrize("family", ["Dinov2WithRegisters", "DINOv3ViT", "CLIPVision", "SiglipVision"])
def test_tuning_a_tower_on_digits_lowers_the_loss(family: str, recipe: Recipe, tmp_path: Path) -> None:
    _theirs(family, "Model").save_pretrained(tmp_path)
    source = open_source(DataConfig(source="digits"), split="train", channels=3)
    pixels, labels = source.read(np.arange(48))
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2).float().div(255).repeat_interleave(4, 2)
    batch = images.repeat_interleave(4, 3), torch.from_numpy(labels).long()
    plan = Plan(micro_batch=48)
    built = build(model_in(tmp_path), plan, recipe=replace(recipe, lr=3e-3), loss=loss, seed=0)
    load_weights(built.model, tmp_path, new_head=True)
    losses = [float(built.step([batch]).loss) for _ in range(12)]
    assert losses[-1] < losses[0] - 0.3, losses
