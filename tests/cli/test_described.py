"""Models of folders, as `penstock plan` and `deploy` take them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.cli._app import load_or_described
from penstock.cli.plan_config import PlanConfig
from penstock.config.model import PRESETS
from penstock.config.plan import Plan
from penstock.errors import ConfigError
from penstock.ladder.settings import LadderConfig
from penstock.planner.describe import describe


def test_a_folder_is_taken_with_hf_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 100, "n_positions": 32}
    (tmp_path / "mine" / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    plain, marked = (
        load_or_described(PlanConfig, file=None, overrides={"model": name}) for name in ("mine", "hf:mine")
    )
    assert plain == marked
    assert marked.called == "mine"
    climbed = load_or_described(LadderConfig, file=None, overrides={"model": "hf:mine", "model.depth": "3"})
    assert climbed.model == replace(marked.model, depth=3)


def test_models_of_timm_have_the_shape_that_timm_gives_them() -> None:
    """Parameters as timm counts them, in millions, distilled heads included."""
    shapes = {
        "vit_small_patch16_224": (22.05, 224), "vit_base_patch16_384.augreg_in21k_ft_in1k": (86.86, 384),
        "vit_base_patch16_224.augreg_in21k": (102.60, 224), "vit_large_patch32_384": (306.63, 384),
        "deit_small_distilled_patch16_224": (22.44, 224), "vit_giant_patch14_224": (1012.61, 224),
        "vit_small_patch14_dinov2.lvd142m": (22.44, 518), "vit_base_patch14_reg4_dinov2": (87.35, 518),
        "vit_small_patch16_dinov3": (21.97, 256), "vit_base_patch16_siglip_384.webli": (93.95, 384),
        "vit_large_patch14_clip_336.openai": (304.53, 336),
    }  # fmt: skip
    for name, (millions, pixels) in shapes.items():
        for cls in (PlanConfig, LadderConfig):
            model = load_or_described(cls, file=None, overrides={"model": f"timm:{name}"}).model
            assert describe(model, Plan()).parameters / 1e6 == pytest.approx(millions, abs=0.01), name
            assert model.image_size == pixels
    assert (
        load_or_described(LadderConfig, file=None, overrides={"model": "timm:vit_small_patch16_224"}).model
        == (PRESETS["vit-s16"])
    )
    for name, remedy in (("resnet50", "my_module:factory"), ("vit_base_patch16_224.dino", "leave .dino out")):
        with pytest.raises(ConfigError, match=remedy):
            load_or_described(PlanConfig, file=None, overrides={"model": f"timm:{name}"})
    factory = load_or_described(LadderConfig, file=None, overrides={"model": "my_module:factory"})
    assert factory.factory == "my_module:factory"
