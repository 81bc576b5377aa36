"""Weights and configurations of text models that are not what they say: refused by name, before anything is read."""

from __future__ import annotations

from pathlib import Path

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


def test_a_huge_width_beside_small_weights_is_a_contradiction(saved: Path, tmp_path: Path) -> None:
    folder = saved / "gpt-tiny"
    text = (folder / "config.json").read_text().replace('"n_embd": 128', '"n_embd": 40000')
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(ConfigError, match=r"describes a model of .* but its weights have"):
        from_pretrained(tmp_path)
