"""Runs of a model of images and texts that start from a Vision Transformer and from BERT."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.families import small
from penstock.config.model import MultimodalConfig, ViTConfig
from penstock.config.stack import Stack
from penstock.errors import ConfigError
from penstock.models import create
from penstock.models.convert import load_part, save_pretrained

SIZES: dict[str, Any] = {"width": 16, "depth": 2, "heads": 2, "mlp_width": 32}
POST = Stack(**SIZES, norm_first=False, norm_eps=1e-12)
MODEL = MultimodalConfig(
    image_size=8, patch_size=4, channels=1, classifier="token", features=8, vocabulary=24, sequence=8,
    writer_sequence=8, embedding_norm=True, vision=Stack(**SIZES, norm_eps=1e-6), text=POST, writer=POST,
)  # fmt: skip


def test_a_vision_transformer_gives_its_run_of_images(tmp_path: Path) -> None:
    torch.manual_seed(1)
    vit = create(ViTConfig(image_size=8, patch_size=4, channels=1, classes=3, **SIZES)).eval()
    save_pretrained(vit, tmp_path)  # in transformers' form
    model = create(MODEL).eval()
    load_part(model, "vision", tmp_path)
    images = torch.randn(2, 1, 8, 8)
    expected = vit.norm(vit.encoder(vit.embed(images)))
    torch.testing.assert_close(model.vision(model.embed(images, model.graph.inputs[0])), expected)
    with pytest.raises(ConfigError, match=r"The weights for text have no run over inputs of the same kind"):
        load_part(model, "text", tmp_path)


def test_bert_gives_its_run_of_texts(tmp_path: Path) -> None:
    """It has more positions and fewer words, and adds its segment to each word."""
    torch.manual_seed(1)
    bert = create(small("bert-tiny", head="none")).eval()
    save_pretrained(bert, tmp_path)
    model = create(MODEL).eval()
    before = model.state_dict()["tokens.weight"].clone()
    load_part(model, "text", tmp_path)
    tokens = torch.randint(0, 13, (2, 6))
    lengths = torch.tensor([6, 3])
    given = model.text(model.embed(tokens, model.graph.inputs[1]), lengths)
    torch.testing.assert_close(given[0], bert(tokens, lengths)[0])
    torch.testing.assert_close(given[1, :3], bert(tokens, lengths)[1, :3])
    assert torch.equal(model.tokens.weight[13:], before[13:])
    assert model.head.weight is model.tokens.weight


def test_what_does_not_fit_is_named_and_changes_nothing(tmp_path: Path) -> None:
    vit = create(ViTConfig(image_size=8, patch_size=2, channels=1, classes=3, **SIZES))
    model = create(replace(MODEL, vision=Stack(**SIZES, qk_norm=True)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ConfigError) as caught:
        load_part(model, "vision", vit)
    assert any("q_norm" in problem for problem in caught.value.problems)
    assert any("places" in problem for problem in caught.value.problems)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(ConfigError, match="no run head over an input; name one of vision, text, writer"):
        load_part(model, "head", vit)
