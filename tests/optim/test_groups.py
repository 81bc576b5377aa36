"""Who is decayed, and how fast each layer learns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from helpers.families import ENROLLED, batches, loss
from penstock.build import build
from penstock.config.model import ViTConfig
from penstock.config.plan import Plan
from penstock.config.run import Recipe
from penstock.errors import ConfigError
from penstock.models import create
from penstock.models.draw import seeded
from penstock.optim import parameter_groups, set_learning_rate
from penstock.optim.groups import freeze

TINY = ViTConfig(image_size=8, patch_size=4, channels=1, width=16, depth=3, heads=2, mlp_width=32, classes=4)


def test_only_matrices_that_map_features_are_decayed() -> None:
    model = create(TINY)
    groups = parameter_groups(model, weight_decay=0.05)
    assert [group["weight_decay"] for group in groups] == [0.05, 0.0]
    decayed, spared = (set(group["param_names"]) for group in groups)
    assert "encoder.blocks.0.mlp.up.weight" in decayed
    assert "head.weight" in decayed
    assert {
        "class_token", "encoder.places.weight", "head.bias", "norm.weight", "encoder.blocks.2.norm1.bias",
    } <= spared  # fmt: skip
    assert all(parameter.ndim >= 2 for parameter in groups[0]["params"])
    assert decayed | spared == {name for name, _ in model.named_parameters()}
    assert not decayed & spared


def test_foreign_names_and_lists_are_respected() -> None:
    class Foreign(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cls_token = nn.Parameter(torch.zeros(1, 1, 4))
            self.special = nn.Parameter(torch.zeros(4, 4))
            self.plain = nn.Parameter(torch.zeros(4, 4))
            self.frozen = nn.Parameter(torch.zeros(4, 4), requires_grad=False)

        def no_weight_decay(self) -> set[str]:
            return {"special"}

    decayed, spared = parameter_groups(Foreign(), weight_decay=0.1)
    assert decayed["param_names"] == ["plain"]
    assert spared["param_names"] == ["cls_token", "special"]


def test_transformers_models() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=8,
        patch_size=4,
    )  # fmt: skip
    model = transformers.ViTForImageClassification(config)
    groups = parameter_groups(model, weight_decay=0.1, layer_decay=0.5)
    spared = {name for group in groups if not group["weight_decay"] for name in group["param_names"]}
    assert {"vit.embeddings.cls_token", "vit.embeddings.position_embeddings"} <= spared
    assert {group["lr_scale"] for group in groups} == {0.125, 0.25, 0.5, 1.0}


def test_tables_of_tokens_are_decayed_and_other_embeddings_are_not() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    bert = transformers.BertModel(transformers.BertConfig(**sizes, num_hidden_layers=1))
    t5 = transformers.T5Model(
        transformers.T5Config(vocab_size=32, d_model=16, d_kv=8, num_heads=2, num_layers=1)
    )
    decayed, spared = (
        {name for model in (bert, t5) for name in parameter_groups(model, weight_decay=0.1)[i]["param_names"]}
        for i in range(2)
    )
    assert {"embeddings.word_embeddings.weight", "shared.weight", "pooler.dense.weight"} <= decayed
    assert {"embeddings.position_embeddings.weight", "embeddings.token_type_embeddings.weight"} <= spared
    assert "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight" in spared


def test_layer_decay_goes_through_encoder_and_decoder() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(vocab_size=32, d_model=16, d_kv=8, num_heads=2, num_layers=2, d_ff=32)
    groups = parameter_groups(transformers.T5Model(config), weight_decay=0.1, layer_decay=0.5)
    scales = {name: group["lr_scale"] for group in groups for name in group["param_names"]}
    assert scales["shared.weight"] == 0.5**5
    assert scales["encoder.block.1.layer.0.SelfAttention.q.weight"] == 0.5**3
    assert scales["encoder.final_layer_norm.weight"] == 0.5**3
    assert scales["decoder.block.0.layer.0.SelfAttention.q.weight"] == 0.5**2
    assert scales["decoder.final_layer_norm.weight"] == 1.0


def test_layer_decay_falls_from_the_head_down() -> None:
    model = create(TINY)
    scales = {
        name: group["lr_scale"]
        for group in parameter_groups(model, weight_decay=0.05, layer_decay=0.5)
        for name in group["param_names"]
    }
    assert scales["head.weight"] == scales["norm.bias"] == 1.0
    assert scales["encoder.blocks.2.mlp.up.weight"] == scales["encoder.blocks.2.norm1.bias"] == 0.5
    assert scales["encoder.blocks.0.mlp.up.weight"] == 0.125
    assert scales["encoder.places.weight"] == scales["class_token"] == 0.0625
    assert len(scales) == len(list(model.parameters()))


@pytest.mark.parametrize("form", ["foreach", "fused", "contiguous"])
def test_matrices_of_blocks_learn_by_the_width_of_their_stack(form: Any) -> None:
    """Steps are those of torch's AdamW with the rates written out; one stack has 24 features, the others have 16."""
    config = ENROLLED["multimodal"].config
    recipe = Recipe(lr=1.0, lr_width=8, weight_decay=0.0, eps=1e-4, clip_norm=None)
    built = build(config, Plan(optimizer=form), recipe=recipe, loss=loss)
    set_learning_rate(built.optimizer, 1e-2)
    with seeded(0):
        model = create(config)
    groups = []
    for name, parameter in model.named_parameters():
        width = 24 if name.startswith("vision.") else 16
        scaled = ".blocks." in name and parameter.ndim == 2
        groups.append({"params": [parameter], "lr": 1e-2 * 8 / width if scaled else 1e-2})
    theirs = torch.optim.AdamW(groups, eps=1e-4, weight_decay=0.0)
    for step in range(3):
        batch = batches(config, step, 4)
        built.step([batch])
        theirs.zero_grad()
        loss(model, batch).backward()
        theirs.step()
    torch.testing.assert_close(dict(built.model.named_parameters()), dict(model.named_parameters()))


def test_refusals_say_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"layer_decay is 0\.0"):
        parameter_groups(create(TINY), weight_decay=0.0, layer_decay=0.0)
    with pytest.raises(ConfigError, match="requires_grad_"):
        parameter_groups(create(TINY).requires_grad_(False), weight_decay=0.0)
    lone = nn.Linear(2, 2)
    assert parameter_groups(lone, weight_decay=0.0)
    with pytest.raises(ConfigError, match="Enrol it"):
        parameter_groups(lone, weight_decay=0.0, layer_decay=0.9)
    with pytest.raises(ConfigError, match=r"role Attention.*Enrol it"):
        parameter_groups(nn.Sequential(lone, nn.Linear(2, 2)), weight_decay=0.0, lr_width=8)


def test_frozen_parts_are_in_no_group() -> None:
    model = create(ViTConfig(image_size=8, patch_size=4, width=16, depth=3, heads=2, mlp_width=32, classes=4))
    freeze(model, ("stem", "encoder.blocks.0", "encoder.blocks.*.mlp"))
    learn = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    grouped = {name for group in parameter_groups(model, weight_decay=0.1) for name in group["param_names"]}
    assert grouped == learn
    assert not any(name.startswith(("stem.", "encoder.blocks.0.", "encoder.blocks.1.mlp.")) for name in learn)
    assert {"encoder.blocks.1.attention.qkv.weight", "head.weight"} <= learn


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        (("encoder.blocks.9",), "recipe.freeze names 'encoder.blocks.9', but the model has no such part"),
        (("*",), "nothing would learn"),
    ],
)
def test_what_cannot_be_frozen_is_said(patterns: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        freeze(
            create(ViTConfig(image_size=8, patch_size=4, width=16, depth=1, heads=2, mlp_width=32)), patterns
        )
