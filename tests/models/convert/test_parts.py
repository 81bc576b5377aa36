"""Runs of a model of images and texts that start from a Vision Transformer and from BERT."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.families import small
from penstock.config.model import DiffusionConfig, MultimodalConfig, ViTConfig
from penstock.config.stack import Stack
from penstock.errors import ConfigError
from penstock.models import create
from penstock.models.convert import load_part, save_pretrained
from penstock.models.convert.pretrained import read_config
from penstock.models.inputs import RunInputs

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
    given = model.text(model.embed(tokens, model.graph.inputs[1]), RunInputs(lengths=lengths))
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


def _clip(folder: Path) -> Any:
    """A CLIP of transformers with weights that are drawn anew, so that none is 0 or 1; and its folder."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {
        "vocab_size": 24,
        "max_position_embeddings": 12,
        "bos_token_id": 22,
        "eos_token_id": 23,
        "pad_token_id": 1,
    }
    config = transformers.CLIPConfig(
        text_config=sizes | ends, vision_config=sizes | {"image_size": 8, "patch_size": 4}, projection_dim=8
    )
    return _stirred(transformers.CLIPModel(config), folder)


def _stirred(model: Any, folder: Path) -> Any:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model.eval()


def test_both_towers_of_a_clip_make_the_vectors_that_transformers_does(tmp_path: Path) -> None:
    """With texts of other lengths than the batch's, other heads than layers, and its own activation."""
    theirs = _clip(tmp_path)
    stack = Stack(width=16, depth=2, heads=4, mlp_width=32, mlp="gelu_quick")
    clip = replace(
        MODEL, channels=3, embedding_norm=False, vision_norm=True, text_causal=True, vision=stack, text=stack,
        writer=stack,
    )  # fmt: skip
    model = create(clip).eval()
    load_part(model, "vision", tmp_path)
    load_part(model, "text", tmp_path)
    images, lengths = torch.randn(3, 3, 8, 8), torch.tensor([6, 3, 5])
    texts = torch.randint(2, 22, (3, 6))
    texts[torch.arange(3), lengths - 1] = 23
    seen = torch.arange(6) < lengths[:, None]
    with torch.no_grad():
        expected = theirs(input_ids=texts, attention_mask=seen.long(), pixel_values=images)
        found = model(images, texts.where(seen, 0), lengths=lengths)
    torch.testing.assert_close(found["text_vector"], expected.text_embeds, rtol=1e-4, atol=1e-5)
    products = found["text_vector"] @ found["image_vector"].T
    torch.testing.assert_close(products, expected.logits_per_text, rtol=1e-4, atol=1e-4)

    plain = create(
        replace(clip, vision_norm=False, text_causal=False, vision=replace(stack, mlp="gelu", heads=2))
    )
    with pytest.raises(ConfigError) as caught:
        load_part(plain, "vision", tmp_path)
    said = " ".join(caught.value.problems)
    assert "model.vision.heads is 2, but the weights were trained with 4" in said
    assert "model.vision.mlp is gelu, but the weights were trained with gelu_quick" in said
    assert "no place for vision.embedding_norm.weight" in said
    with pytest.raises(ConfigError, match=r"The run text is not causal, .* set model\.text_causal"):
        load_part(plain, "text", tmp_path)
    (tmp_path / "vision").mkdir()
    theirs.vision_model.save_pretrained(tmp_path / "vision")
    other = create(replace(clip, features=12)).eval()  # whose vectors are of another size
    load_part(other, "vision", tmp_path / "vision")
    one, two = (each.vision(each.embed(images, each.graph.inputs[0])) for each in (model, other))
    torch.testing.assert_close(one, two)
    with pytest.raises(ConfigError, match="has no text_model"):
        load_part(other, "text", tmp_path / "vision")


def test_a_causal_text_is_seen_up_to_its_end_and_no_further() -> None:
    """Its vector and what is written of it know nothing of padding; the writer's past is none of its own."""
    torch.manual_seed(1)
    stack = Stack(**SIZES)
    model = create(
        replace(MODEL, text_causal=True, vision=stack, text=stack, writer=stack), dtype=torch.float64
    ).eval()
    texts, target, lengths = torch.randint(24, (2, 6)), torch.randint(24, (2, 4)), torch.tensor([6, 3])
    found = model(source=texts, target=target, lengths=lengths)
    short = model(source=texts[1:, :3], target=target[1:], lengths=lengths[1:])
    for name, value in short.items():
        torch.testing.assert_close(found[name][1:], value)
    texts[1, 4] += 1
    torch.testing.assert_close(model(source=texts % 24, target=target, lengths=lengths), found)


def _condition(name: str, folder: Path) -> tuple[Any, dict[str, Any]]:
    """An encoder of texts that transformers wrote, and the settings of a diffusion model that reads its tokens."""
    transformers = pytest.importorskip("transformers")
    if name == "clip":
        text = Stack(width=16, depth=2, heads=4, mlp_width=32, mlp="gelu_quick")
        return _clip(folder).text_model, {"text": text, "text_causal": True}
    if name == "bert":
        config = transformers.BertConfig(
            vocab_size=24, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=12,
        )  # fmt: skip
        text = Stack(**SIZES, norm_first=False, norm_eps=1e-12)
        return _stirred(transformers.BertModel(config), folder), {"text": text, "text_norm": True}
    config = transformers.T5Config(
        vocab_size=24, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    theirs = _stirred(transformers.T5ForConditionalGeneration(config), folder)
    return theirs.encoder, {"text": read_config(folder).encoder}  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["t5", "bert", "clip"])
def test_any_encoder_of_texts_conditions_images(name: str, tmp_path: Path) -> None:
    theirs, settings = _condition(name, tmp_path)
    config = DiffusionConfig(
        image_size=8, patch_size=4, channels=1, classes=0, vocabulary=24, sequence=8, **SIZES, **settings
    )
    torch.manual_seed(2)
    model = create(config).eval()
    load_part(model, "text", tmp_path)
    texts, lengths = torch.randint(2, 22, (2, 6)), torch.tensor([6, 3])
    seen = torch.arange(6) < lengths[:, None]
    with torch.no_grad():
        expected = theirs(input_ids=texts, attention_mask=seen.long()).last_hidden_state
        found = model.text(model.embed(texts, model.graph.inputs[1]), RunInputs(lengths=lengths))
        torch.testing.assert_close(found[seen], expected[seen], rtol=1e-4, atol=1e-5)
        for parameter in (*model.denoiser.parameters(), *model.head.parameters()):
            parameter.add_(0.2 * torch.randn_like(parameter))
        images, times = torch.randn(2, 1, 8, 8), torch.rand(2, dtype=torch.float64)
        made = model(images, texts, times, lengths)
        short = model(images[1:], texts[1:, :3], times[1:], lengths[1:])
        other = model(images, texts.roll(1, 1), times, lengths)
    torch.testing.assert_close(made[1:], short, rtol=1e-4, atol=1e-5)
    assert (made - other).abs().amax((1, 2, 3)).min() > 1e-4
