"""Checkpoints as Hugging Face folders: always the same values."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers.checkpoints import Trainee, newest, numbered
from penstock import checkpoint
from penstock.checkpoint import rewrite
from penstock.config.load import to_dict
from penstock.config.model import ViTConfig
from penstock.config.run import RunConfig
from penstock.errors import CheckpointError, ConfigError
from penstock.models import create
from penstock.models.convert import from_pretrained, load_weights
from penstock.models.convert.files import read_state_dict
from penstock.models.former_names import former_name
from penstock.optim.groups import freeze
from penstock.precision.lists import OpLists
from penstock.precision.lists.modules import fp32_modules_of


def test_a_path_may_name_a_checkpoint_a_folder_or_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (3, 12):
        checkpoint.save(tmp_path / "checkpoints", numbered(step))
    folder = tmp_path / "checkpoints"
    assert rewrite.candidates(tmp_path)[0] == rewrite.candidates(folder)[0] == folder / "step-12"
    monkeypatch.chdir(third := folder / "step-3")
    for path, step in ((third, None), (Path(), None), (tmp_path, 3)):
        assert rewrite.candidates(path, step=step) == [third]
    for path, step in ((tmp_path, 4), (tmp_path / "none", None)):
        with pytest.raises(ConfigError, match="There is no"):
            rewrite.candidates(path, step=step)[0]


def vit_checkpoint(folder: Path) -> tuple[Path, torch.nn.Module]:
    config = RunConfig(
        model=ViTConfig(depth=1, width=8, heads=2, mlp_width=16, image_size=8, patch_size=4, classes=3),
        output=str(folder),
    )
    model = create(config.model)
    average = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    snapshot = checkpoint.Snapshot(2, {"weights": model.state_dict(), "ema": average}, {}, to_dict(config))
    return checkpoint.save(folder, snapshot), model


def test_a_vit_is_exported_as_transformers_lays_it_out(tmp_path: Path) -> None:
    source, model = vit_checkpoint(tmp_path / "a")
    stored = checkpoint.open_verified(source)
    for which, shift in (("weights", 0), ("ema", 1)):
        rewrite.export_model(stored, tmp_path / which, which)
        again = from_pretrained(tmp_path / which)
        for name, tensor in model.state_dict().items():
            assert torch.equal(again.state_dict()[name], tensor + shift), name
    with pytest.raises(ConfigError, match="no weights 'other'; it has weights, ema"):
        rewrite.export_model(stored, tmp_path / "c", "other")


def test_a_model_without_a_family_is_exported_in_its_own_names_only(tmp_path: Path) -> None:
    trainee = Trainee()
    stored = checkpoint.open_verified(checkpoint.save(tmp_path / "a", trainee.snapshot()))
    with pytest.raises(CheckpointError, match="--names plain"):
        rewrite.export_model(stored, tmp_path / "b", "weights")
    expected = trainee.model.state_dict()
    assert rewrite.export_plain(stored, tmp_path / "b", "weights") == [tmp_path / "b" / "model.safetensors"]
    files = rewrite.export_plain(stored, tmp_path / "c", "weights", shard_bytes=300)
    assert [file.name for file in files[:2]] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2)]
    index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * 8 for t in expected.values())
    assert list(index["weight_map"]) == list(expected)
    for file in files[:-1]:
        assert sum(t.numel() * 8 for t in load_file(file).values()) <= 300
    for folder in ("b", "c"):
        read = read_state_dict(tmp_path / folder)
        assert all(torch.equal(read[name], tensor) for name, tensor in expected.items())


# Names of parts that Vision Transformers of ours had before, in checkpoints.


TINY = ViTConfig(image_size=8, patch_size=4, channels=1, width=16, depth=2, heads=2, mlp_width=32, classes=5)


def test_a_checkpoint_with_former_names_is_read_and_exported(tmp_path: Path) -> None:
    model = create(TINY)
    weights = {former_name(name): value for name, value in model.state_dict().items()}
    assert {"positions", "blocks.0.norm1.weight", "norm.weight"} <= weights.keys()
    settings = to_dict(RunConfig(model=TINY))
    checkpoint.save(tmp_path / "checkpoints", checkpoint.Snapshot(1, {"weights": weights}, {}, settings))
    stored = newest(tmp_path / "checkpoints")
    read = stored.load(dict(model.named_parameters())).weights["weights"]
    assert read.keys() == model.state_dict().keys()
    rewrite.export_model(rewrite.open_newest(tmp_path), tmp_path / "export", "weights")
    images = torch.randn(2, 1, 8, 8)
    with torch.no_grad():
        assert torch.equal(from_pretrained(tmp_path / "export").eval()(images), model.eval()(images))


def test_biases_of_routers_by_their_former_name_are_read_and_exported(tmp_path: Path) -> None:
    size = replace(TINY, experts=4, router="sigmoid")
    model = create(size)
    steps = torch.randint(-9000, 9000, (size.depth, 4), dtype=torch.int32)
    for block, moved in zip(model.encoder.blocks, steps):
        block.mlp.correction.copy_(moved.long() << 26)
    weights = {name: value for name, value in model.state_dict().items() if "correction" not in name}
    # 2⁻²⁴ was the unit, and the numbers were int32.
    weights |= {f"encoder.blocks.{i}.mlp.bias": moved for i, moved in enumerate(steps)}
    settings = to_dict(RunConfig(model=size))
    checkpoint.save(tmp_path / "checkpoints", checkpoint.Snapshot(1, {"weights": weights}, {}, settings))
    stored = newest(tmp_path / "checkpoints")
    for held in (None, model.state_dict().keys()):
        read = stored.load(dict(model.named_parameters()), held=held).weights["weights"]
        create(size).load_state_dict(read)
        assert all(torch.equal(read[name], value) for name, value in model.state_dict().items())
    rewrite.export_model(stored, tmp_path / "export", "weights")
    rewrite.export_plain(stored, tmp_path / "plain", "weights")
    plain = create(size)
    load_weights(plain, tmp_path / "plain")
    for other in (from_pretrained(tmp_path / "export"), plain):
        assert torch.equal(other.encoder.blocks[1].mlp.correction, steps[1].long() << 26)


def test_patterns_with_former_names_mean_the_same_parts() -> None:
    model = create(TINY)
    freeze(model, ("positions", "blocks.0"))
    still = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert still == {
        name
        for name, _ in model.named_parameters()
        if name.startswith(("encoder.places.", "encoder.blocks.0."))
    }
    wide = fp32_modules_of(model, OpLists(fp32_modules=("blocks.1",)))
    assert wide == set(model.encoder.blocks[1].modules())


def test_a_model_of_ones_own_keeps_such_names(tmp_path: Path) -> None:
    weights = {"positions": torch.ones(2), "blocks.0.weight": torch.ones(3)}
    checkpoint.save(tmp_path / "checkpoints", checkpoint.Snapshot(1, {"weights": weights}, {}, {}))
    stored = newest(tmp_path / "checkpoints")
    assert stored.load().weights["weights"].keys() == weights.keys()
