"""Weights and configurations of text models that are not what they say: refused by name, before anything is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from penstock.config.model import PRESETS
from penstock.errors import ConfigError
from penstock.models import create
from penstock.models.convert import (
    from_pretrained,
    load,
    load_weights,
    read_state_dict,
    read_text_config,
    save_pretrained,
)

_HERE = "model.layers.0.self_attn."


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of small models in transformers' names, by preset."""
    folder = tmp_path_factory.mktemp("saved")
    for preset in ("llama-tiny", "gpt-tiny", "bart-tiny", "marian-tiny", "bert-tiny"):
        save_pretrained(create(PRESETS[preset]), folder / preset)  # type: ignore[arg-type]
    return folder


@pytest.mark.parametrize(
    ("preset", "name", "wrong", "words"),
    [
        ("llama-tiny", _HERE + "q_proj.weight", torch.zeros(128, 64), r"is \(128, 64\), but .* \(128, 128\)"),
        ("llama-tiny", _HERE + "k_proj.weight", torch.zeros(63, 128), r"is \(63, 128\), but .* \(64, 128\)"),
        ("llama-tiny", _HERE + "v_proj.weight", torch.zeros(()), r"is \(\), but"),
        ("llama-tiny", _HERE + "k_proj.weight", torch.zeros(64, 128, dtype=torch.int8), "is of torch.int8, but"),
        ("llama-tiny", "model.layers.1.mlp.up_proj.weight", torch.zeros(0, 128), r"is \(0, 128\), but"),
        ("gpt-tiny", "transformer.h.0.attn.c_attn.bias", torch.zeros(128), r"is \(128,\), but .* \(384,"),
        ("gpt-tiny", "transformer.h.0.mlp.c_fc.weight", torch.zeros(512, 128), r"is \(512, 128\), but .* \(128, 512"),
        ("gpt-tiny", "transformer.wpe.weight", torch.zeros(7, dtype=torch.bool), r"is \(7,\), but"),
        ("bart-tiny", "model.encoder.embed_positions.weight", torch.zeros(64, 128), r"is \(64, 128\), but .* \(66,"),
        ("marian-tiny", "final_logits_bias", torch.zeros(512), r"is \(512,\), but the model's is \(1, 512\)"),
        ("marian-tiny", "model.encoder.embed_positions.weight", torch.zeros(64, 2), "positions have 128 features"),
        ("bert-tiny", "cls.predictions.bias", torch.zeros(2048, dtype=torch.int64), "is of torch.int64"),
        ("bert-tiny", "bert.embeddings.word_embeddings.weight", torch.zeros(2048, 9), r"is \(2048, 9\)"),
    ],
)  # fmt: skip
def test_other_shapes_and_types_are_named_before_anything_is_read(
    saved: Path, preset: str, name: str, wrong: Tensor, words: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    state = {**read_state_dict(saved / preset), name: wrong}
    save_file(state, tmp_path / "model.safetensors")
    model = create(PRESETS[preset])
    monkeypatch.setattr(load, "read_state_dict", lambda *_: pytest.fail("the weights were read"))
    with pytest.raises(ConfigError, match=rf"{name} {words}" if "features" not in words else words):
        load_weights(model, tmp_path / "model.safetensors")


def test_a_weight_under_both_its_names_is_refused(saved: Path) -> None:
    state = read_state_dict(saved / "llama-tiny")
    state["norm.weight"] = torch.ones(128)
    with pytest.raises(ConfigError, match=r"hold both norm\.weight and model\.norm\.weight"):
        load_weights(create(PRESETS["llama-tiny"]), state)


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("llama", {"hidden_size": "x"}, "hidden_size is 'x', but must be a whole number"),
        ("llama", {"hidden_size": 10**7}, "hidden_size is 10000000, but must be at most 1,048,576"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers is 0, but must be at least 1"),
        ("llama", {"rms_norm_eps": -1}, "rms_norm_eps is -1.0, but must be above 0"),
        ("llama", {"tie_word_embeddings": 7}, "tie_word_embeddings is 7, but must be true or false"),
        ("llama", {"rope_theta": [1]}, r"rope_theta is \[1\], but must be a number"),
        ("llama", {"rope_scaling": "yarn"}, "rope_scaling is 'yarn', but must be a table"),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, "rope_type 'linear' without its factor"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor is 0.5, but must be at least 1"),
        ("llama", {"rope_scaling": {"sections": [1]}}, "rope_scaling.sections is not a setting"),
        ("qwen2", {"use_sliding_window": True, "layer_types": ["linear"]}, "layer_types"),
        ("bert", {"id2label": 3}, "id2label is 3, but must be a table"),
        ("bert", {"num_labels": -1, "architectures": ["BertForSequenceClassification"]}, "num_labels is -1"),
        ("bert", {"architectures": 4}, "architectures is 4, but must be a list"),
        ("bert", {"architectures": ["\x1b[2J"]}, r"x1b\[2J'\], but must be a list"),
        ("bert", {"hidden_act": ["gelu"]}, "hidden_act .* must be text"),
        ("bert", {"": 1}, "whose effect Penstock does not know"),
        ("bert", {"attention_probs_dropout_prob": 2}, "attention_probs_dropout_prob is 2"),
        ("siglip2", {}, "'siglip2', and is not read: its images have patches of any number; take"),
        ("siglip2_vision_model", {}, "such as google/siglip2-base-patch16-224"),
        ("dinov3_convnext", {}, "a network of convolutions; take one of DINOv3's ViTs"),
        ("phi4mm", {}, "adapters for images and speech; take microsoft/Phi-4-mini-instruct"),
        ("clip_text_model", {}, "give the folder of the whole model"),
        ("another", {}, "'another'; known are 'vit', 'dinov3_vit', .*'siglip', .*'deepseek_v3'"),
        ("gpt2", {"n_embd": "1", "n_inner": None}, "n_embd is '1'"),
        ("gpt2", {"penstock": {"sequence": "all"}}, "penstock.sequence is 'all'"),
        ("gpt2", {f"option{i}": i for i in range(100_000)}, "option9 9,"),
    ],
    ids=lambda given: str(given)[:40],
)  # fmt: skip
def test_what_a_configuration_must_not_say_is_refused_by_its_own_name(
    kind: str, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        read_text_config({"model_type": kind, **change})
    assert len(str(refused.value)) < 5000


def test_a_huge_width_beside_small_weights_is_a_contradiction(saved: Path, tmp_path: Path) -> None:
    folder = saved / "gpt-tiny"
    text = (folder / "config.json").read_text().replace('"n_embd": 128', '"n_embd": 40000')
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(ConfigError, match=r"describes a model of .* but its weights are"):
        from_pretrained(tmp_path)
