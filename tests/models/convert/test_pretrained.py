"""Folders written are read again, and broken or foreign ones are refused by name."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from penstock.boundary.hub import local_weights
from penstock.config.model import ViTConfig
from penstock.errors import CheckpointError, ConfigError
from penstock.models import Model
from penstock.models.convert import from_pretrained, model_in, read_state_dict, save_pretrained

TINY = ViTConfig(image_size=32, patch_size=8, width=48, depth=2, heads=4, mlp_width=96, classes=10)
VARIANTS: list[dict[str, Any]] = [
    {},
    {"drop_path": 0.1, "dropout": 0.2},
    {"classifier": "pooled", "pool_norm": "after"},
    {"stem": "conv", "qk_norm": True, "layer_scale": 0.1},
]


@pytest.mark.parametrize("changes", VARIANTS)
def test_there_and_back(changes: dict[str, Any], tmp_path: Path) -> None:
    model = Model(replace(TINY, **changes)).train()
    images = torch.randn(2, 3, 32, 32)
    model(images)  # moves the statistics of batch norms
    save_pretrained(model, tmp_path / "new" / "folder")
    read = from_pretrained(tmp_path / "new" / "folder")
    assert read.config == model.config
    assert torch.equal(read.eval()(images), model.eval()(images))


def test_only_two_files_are_left_and_all_may_read_them(tmp_path: Path) -> None:
    for _ in range(2):
        save_pretrained(Model(TINY), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    plain = tmp_path / "plain"
    plain.touch()
    assert {path.stat().st_mode for path in tmp_path.iterdir()} == {plain.stat().st_mode}


def test_parameters_that_share_one_buffer_are_written(tmp_path: Path) -> None:
    model = Model(TINY)
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    offset = 0
    for parameter in model.parameters():
        parameter.data = flat[offset : offset + parameter.numel()].view_as(parameter)
        offset += parameter.numel()
    save_pretrained(model, tmp_path)
    assert torch.equal(from_pretrained(tmp_path).head.weight, model.head.weight)


def test_the_type_and_device_are_chosen_by_the_reader(tmp_path: Path) -> None:
    save_pretrained(Model(TINY), tmp_path)
    assert from_pretrained(tmp_path, device="cpu", dtype=torch.bfloat16).head.weight.dtype == torch.bfloat16


def test_a_type_that_no_weight_has_is_refused_by_name(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2, dtype=torch.complex64)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="'w' is of dtype 'C64'"):
        read_state_dict(tmp_path)


def test_a_truncated_file_is_refused_by_name(tmp_path: Path) -> None:
    save_pretrained(Model(TINY), tmp_path)
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
    with pytest.raises(CheckpointError, match=r"config.json cannot be read as JSON.* not list"):
        from_pretrained(tmp_path)


def _index(folder: Path, names: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", ".", "..", "", "model.safetensors.index.json", "folder.safetensors"]
)
def test_an_index_that_names_itself_a_folder_or_nothing_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.safetensors").mkdir()
    _index(tmp_path, {"w": name})
    with pytest.raises(CheckpointError, match=r"not in its folder|it is a folder"):
        read_state_dict(tmp_path)


def test_an_index_and_its_files_must_agree(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(2)}, tmp_path / "two.safetensors")
    _index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    assert read_state_dict(tmp_path).keys() == {"a", "b"}
    _index(tmp_path, {"a": "two.safetensors", "b": "two.safetensors"})
    with pytest.raises(CheckpointError, match=r"two.safetensors holds 'a', which is in no file"):
        read_state_dict(tmp_path)
    save_file({"a": torch.zeros(2), "b": torch.zeros(2)}, tmp_path / "two.safetensors")
    _index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    with pytest.raises(CheckpointError, match=r"one.safetensors holds 'a', which is in"):
        read_state_dict(tmp_path)
    # transformers leaves an index whose files it has replaced by a single one.
    save_file({"c": torch.zeros(2)}, tmp_path / "model.safetensors")
    for name in ("one", "two"):
        (tmp_path / f"{name}.safetensors").unlink()
    assert read_state_dict(tmp_path).keys() == {"c"}


@pytest.mark.parametrize(
    "lie",
    [
        {"hidden_size": 40_000, "num_attention_heads": 4},
        {"num_hidden_layers": 16_000},
        {"intermediate_size": 10**6},
        {"image_size": 64_000},
        {"num_channels": 4_000},
    ],
)
def test_a_configuration_that_asks_for_more_than_the_weights_is_refused_before_a_model_is_made(
    tmp_path: Path, lie: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_pretrained(Model(TINY), tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **lie}))
    monkeypatch.setattr(Model, "_build", lambda *_, **__: pytest.fail("a model was made"))
    with pytest.raises(
        ConfigError, match=r"config.json describes a model of .* but its weights have [\d,]+ elements"
    ):
        from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("vit.embeddings.cls_token", (48,)),
        ("vit.embeddings.position_embeddings", (17, 48)),
        ("vit.embeddings.position_embeddings", (1, 0, 48)),
        ("vit.embeddings.patch_embeddings.projection.weight", (48,)),
        ("vit.encoder.layer.0.attention.attention.query.weight", ()),
        ("vit.encoder.layer.0.attention.attention.key.weight", (47, 48)),
        ("vit.encoder.layer.0.attention.attention.value.bias", (0,)),
        ("vit.layernorm.weight", (2, 24)),
    ],
)
def test_other_shapes_are_named_and_nothing_is_reshaped(
    tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    save_pretrained(Model(TINY), tmp_path)
    state = {**read_state_dict(tmp_path), name: torch.zeros(shape)}
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"shape|is \(|embeddings of 0 tokens"):
        from_pretrained(tmp_path)


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
    save_pretrained(Model(config), tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    values["penstock"] = {"activation": values["penstock"].pop("mlp"), **values["penstock"]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert from_pretrained(tmp_path).config == config


def test_a_model_is_named_alike_everywhere(tmp_path: Path) -> None:
    """A run's folder is its export, and what is no folder is said to be none before the hub is spoken of."""
    model = Model(TINY)
    save_pretrained(model, tmp_path / "run" / "export")
    for source in (tmp_path / "run", tmp_path / "run" / "export", str(tmp_path / "run")):
        assert local_weights(source) == tmp_path / "run" / "export"
        assert model_in(source) == model.config
    for name in ("nope", "no/such/folder"):
        with pytest.raises(
            ConfigError, match=rf"There is no folder {re.escape(str(tmp_path / name))}\. Give a run's"
        ):
            from_pretrained(tmp_path / name)
    with pytest.raises(ConfigError, match=r"has no config\.json, nor has an export in it"):
        from_pretrained(tmp_path)
