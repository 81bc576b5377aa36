"""Folders written are read again, and broken or foreign ones are refused by name."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config.model import ViTConfig
from penstock.errors import CheckpointError, ConfigError
from penstock.models import ViT
from penstock.models.convert import from_pretrained, read_state_dict, save_pretrained

TINY = ViTConfig(image_size=32, patch_size=8, width=48, depth=2, heads=4, mlp_width=96, classes=10)
VARIANTS: list[dict[str, Any]] = [
    {},
    {"drop_path": 0.1, "dropout": 0.2},
    {"classifier": "pooled", "pool_norm": "after"},
    {"stem": "conv", "qk_norm": True, "layer_scale": 0.1},
]


@pytest.mark.parametrize("changes", VARIANTS)
def test_there_and_back(changes: dict[str, Any], tmp_path: Path) -> None:
    model = ViT(replace(TINY, **changes)).train()
    images = torch.randn(2, 3, 32, 32)
    model(images)  # moves the statistics of batch norms
    save_pretrained(model, tmp_path / "new" / "folder")
    read = from_pretrained(tmp_path / "new" / "folder")
    assert read.config == model.config
    assert torch.equal(read.eval()(images), model.eval()(images))


def test_only_two_files_are_left_and_all_may_read_them(tmp_path: Path) -> None:
    for _ in range(2):
        save_pretrained(ViT(TINY), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    plain = tmp_path / "plain"
    plain.touch()
    assert {path.stat().st_mode for path in tmp_path.iterdir()} == {plain.stat().st_mode}


def test_parameters_that_share_one_buffer_are_written(tmp_path: Path) -> None:
    model = ViT(TINY)
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    offset = 0
    for parameter in model.parameters():
        parameter.data = flat[offset : offset + parameter.numel()].view_as(parameter)
        offset += parameter.numel()
    save_pretrained(model, tmp_path)
    assert torch.equal(from_pretrained(tmp_path).head.weight, model.head.weight)


def test_the_type_and_device_are_chosen_by_the_reader(tmp_path: Path) -> None:
    save_pretrained(ViT(TINY), tmp_path)
    assert from_pretrained(tmp_path, device="cpu", dtype=torch.bfloat16).head.weight.dtype == torch.bfloat16


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    torch.save({"w": torch.zeros(1)}, path)
    with pytest.raises(ConfigError, match=r"model.bin is no safetensors file.*unpickling"):
        read_state_dict(path)
    disguised = tmp_path / "model.safetensors"
    disguised.write_bytes(pickle.dumps({"w": 1}))
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read as safetensors"):
        read_state_dict(disguised)


def test_a_truncated_file_is_refused_by_name(tmp_path: Path) -> None:
    save_pretrained(ViT(TINY), tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read"):
        from_pretrained(tmp_path)


def test_missing_and_broken_folders_are_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config.json"):
        from_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"does not exist"):
        read_state_dict(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json cannot be read as JSON"):
        from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"holds list, not a JSON object"):
        from_pretrained(tmp_path)


def test_an_index_that_points_elsewhere_is_refused(tmp_path: Path) -> None:
    index = {"weight_map": {"w": "../outside.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"outside.safetensors.*not in its folder"):
        read_state_dict(tmp_path)


def test_timms_folders_and_newer_ones_are_told_apart(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"architecture": "vit_tiny_patch16_224", "num_classes": 10}))
    with pytest.raises(ConfigError, match=r"timm's vit_tiny_patch16_224.*load_weights"):
        from_pretrained(tmp_path)
    config.write_text(json.dumps({"model_type": "penstock_vit", "penstock": {"width": 48, "wings": 2}}))
    with pytest.raises(
        ConfigError, match=r"another version of Penstock may have written: wings is not a setting"
    ):
        from_pretrained(tmp_path)


def test_the_names_of_older_versions_are_read(tmp_path: Path) -> None:
    config = replace(TINY, stem="conv", mlp="gelu_tanh")
    save_pretrained(ViT(config), tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    values["penstock"] = {"activation": values["penstock"].pop("mlp"), **values["penstock"]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert from_pretrained(tmp_path).config == config
