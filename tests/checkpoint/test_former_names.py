"""Names of parts that Vision Transformers of ours had before, in checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch

from penstock import checkpoint
from penstock.checkpoint import rewrite
from penstock.config.load import to_dict
from penstock.config.model import ViTConfig
from penstock.config.run import RunConfig
from penstock.models import create
from penstock.models.convert import from_pretrained
from penstock.models.former_names import former_name
from penstock.optim.groups import freeze
from penstock.precision.lists import OpLists
from penstock.precision.lists.modules import fp32_modules_of

TINY = ViTConfig(image_size=8, patch_size=4, channels=1, width=16, depth=2, heads=2, mlp_width=32, classes=5)


def test_a_checkpoint_with_former_names_is_read_and_exported(tmp_path: Path) -> None:
    model = create(TINY)
    weights = {former_name(name): value for name, value in model.state_dict().items()}
    assert {"positions", "blocks.0.norm1.weight", "norm.weight"} <= weights.keys()
    settings = to_dict(RunConfig(model=TINY))
    checkpoint.save(tmp_path / "checkpoints", checkpoint.Snapshot(1, {"weights": weights}, {}, settings))
    stored = checkpoint.find(tmp_path / "checkpoints")
    assert stored is not None
    read = stored.load(dict(model.named_parameters())).weights["weights"]
    assert read.keys() == model.state_dict().keys()
    rewrite.export_model(rewrite.open_newest(tmp_path), tmp_path / "export", "weights")
    images = torch.randn(2, 1, 8, 8)
    with torch.no_grad():
        assert torch.equal(from_pretrained(tmp_path / "export").eval()(images), model.eval()(images))


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
    stored = checkpoint.find(tmp_path / "checkpoints")
    assert stored is not None
    assert stored.load().weights["weights"].keys() == weights.keys()
