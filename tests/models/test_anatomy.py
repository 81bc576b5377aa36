"""How a model is known: enrolled families, models nobody enrolled, and the switches of attention and layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from penstock.build import build
from penstock.config.model import ViTConfig
from penstock.config.plan import SWITCHES, Plan
from penstock.errors import ConfigError
from penstock.kernels.attention import BACKENDS
from penstock.models import Model
from penstock.models import anatomy as anatomies
from penstock.models.anatomy import Anatomy, Block, Family, Stack, anatomy_of, enrol, set_switch
from penstock.models.roles import Norm

TINY = ViTConfig(image_size=32, patch_size=8, width=48, depth=3, heads=4, mlp_width=96, classes=10)


def _hf(cls: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=48, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96, image_size=32,
        patch_size=8, num_labels=10,
    )  # fmt: skip
    model: nn.Module = getattr(transformers, cls)(config)
    return model.eval()


def test_a_compiled_model_is_seen_through() -> None:
    model = Model(TINY)
    compiled: Any = torch.compile(model, backend="eager")
    assert anatomy_of(compiled) == anatomy_of(model)
    set_switch(compiled, "token_order", "batch_second")
    assert model.token_order == "batch_second"


class _Foreign(nn.Module):
    """A model that nobody enrolled."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8))
        self.towers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))
        self.leave = nn.Linear(8, 2)


def test_repeated_blocks_are_found() -> None:
    anatomy = anatomy_of(_Foreign())
    assert anatomy.family == "unknown"
    assert anatomy.blocks == ("towers.0", "towers.1", "towers.2")
    assert [part.name for part in anatomy.stacks[0].after] == ["leave"]
    assert [anatomy.depth_of(n) for n in ("enter.0.weight", "towers.1.0.bias", "leave.weight")] == [0, 2, 4]


def test_a_bare_sequence_of_blocks_is_found() -> None:
    assert anatomy_of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))).blocks == ("0", "1")


def test_a_model_without_blocks_is_told_how_to_enrol() -> None:
    with pytest.raises(ConfigError, match=r"No repeated blocks.*Sequential.*anatomy\.enrol\('torch\.nn"):
        anatomy_of(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)))


class _Mine(_Foreign):
    pass


def test_a_user_enrols_a_class_and_its_subclasses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anatomies, "_FAMILIES", dict(anatomies._FAMILIES))
    chosen: list[tuple[str, str]] = []
    mine = Anatomy(family="mine", stacks=(Stack(blocks=(Block("towers.0", (Norm("towers.0.0"),)),)),))
    path = f"{__name__}._Foreign"
    switches = {name: lambda _, value, name=name: chosen.append((name, value)) for name in reversed(SWITCHES)}
    enrol(path, Family(anatomy=lambda _: mine, switches=switches))
    assert anatomy_of(_Mine()) == mine
    line = "padding=remove loss=chunked attention=flash token_order=batch_second"
    build(_Mine(), Plan.parse(line))
    assert list(reversed(chosen)) == [
        tuple(word.split("=")) for word in line.split()
    ]  # in the order of the Plan
    build(_Mine(), Plan())
    assert len(chosen) == 4


def test_what_a_foreign_model_cannot_is_said() -> None:
    model = _Foreign()
    set_switch(model, "token_order", "batch_first")
    set_switch(model, "attention", "sdpa")
    with pytest.raises(ConfigError, match="no token order but batch_first"):
        set_switch(model, "token_order", "batch_second")
    with pytest.raises(ConfigError, match="no token order but batch_first"):
        set_switch(_hf("ViTModel"), "token_order", "batch_second")


def test_transformers_takes_our_attention() -> None:
    model = _hf("ViTForImageClassification")
    images = torch.randn(2, 3, 32, 32)
    expected = model(images).logits
    for backend in BACKENDS:
        if backend in ("efficient", "cudnn", "native"):
            continue
        set_switch(model, "attention", backend)
        torch.testing.assert_close(model(images).logits, expected)
    set_switch(model, "attention", "cudnn")
    with pytest.raises(ConfigError, match="'cudnn' has no kernel"):
        model(images)


def test_transformers_attention_dropout_is_not_dropped_silently() -> None:
    transformers = pytest.importorskip("transformers")
    model = _hf("ViTForImageClassification")
    assert isinstance(model, transformers.PreTrainedModel)
    set_switch(model, "attention", "plain")
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1
    with pytest.raises(ConfigError, match="neither a mask nor dropout"):
        model.train()(torch.randn(2, 3, 32, 32))
