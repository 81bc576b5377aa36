"""The defaults of `penstock train NAME`: a recipe and a batch that suit the preset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.config.load import load, read_file
from penstock.config.model import PRESETS, preset
from penstock.config.plan import Plan
from penstock.config.run import Augment, Recipe, RunConfig

RUNS: dict[str, RunConfig] = {
    # About 1,440 images are used 60 times. A mirrored digit is another sign, so nothing is flipped. Crops are
    # mild, because one of eight pixels already moves a stroke.
    "vit-digits": RunConfig(
        model=PRESETS["vit-digits"],
        recipe=Recipe(
            epochs=60.0,
            lr=5e-4,
            warmup_steps=20,
            weight_decay=0.05,
            eval_every_epochs=10.0,
            augment=Augment(flip=0.0, crop_scale_min=0.7),
        ),
        plan=Plan(micro_batch=64),
    ),
}


def preset_run(name: str) -> RunConfig:
    """The run of model preset `name`, with output `runs/NAME`; general defaults if it has no recipe of its
    own.

    Raises ConfigError naming the nearest preset.
    """
    run = RUNS.get(name) or RunConfig(model=preset(name))
    return replace(run, output=f"runs/{name}")


def load_run(
    cls: type[RunConfig] = RunConfig,
    *,
    file: Path | str | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> RunConfig:
    """A run from the recipe of the preset that `overrides` or `file` name as `model`, then `file`, then
    `overrides`.

    Without a model, the recipe is that of `vit-digits`. Raises ConfigError as `penstock.config.load.load`
    does.
    """
    model = (overrides or {}).get("model")
    if model is None:
        model = read_file(file).get("model") if file is not None else "vit-digits"
    base = preset_run(model) if isinstance(model, str) and model in PRESETS else None
    return load(cls, file=file, overrides=overrides, base=base)
