"""What `penstock train NAME` does unless told otherwise: a recipe and a batch that suit the preset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.config.load import load, read_file
from penstock.config.model import PRESETS
from penstock.config.plan import Plan
from penstock.config.run import Augment, Recipe, RunConfig

RUNS: dict[str, RunConfig] = {
    # Some 1,440 images are seen 60 times. A digit mirrored is another sign, so nothing is flipped; crops stay mild, for
    # one of eight pixels already moves a stroke.
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
    """The run of model preset `name`, writing to `runs/NAME`; the general defaults where it has no recipe of its own.

    Raises ConfigError naming the nearest preset.
    """
    run = RUNS.get(name) or RunConfig(model=type(PRESETS["vit-digits"]).parse(name))
    return replace(run, output=f"runs/{name}")


def load_run(
    cls: type[RunConfig] = RunConfig,
    *,
    file: Path | str | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> RunConfig:
    """A run from the recipe of the preset that `overrides` or `file` name as `model`, then `file`, then `overrides`.

    Without a model it is that of the digits. Raises ConfigError as `penstock.config.load.load` does.
    """
    model = (overrides or {}).get("model")
    if model is None:
        model = read_file(file).get("model") if file is not None else "vit-digits"
    base = preset_run(model) if isinstance(model, str) and model in PRESETS else None
    return load(cls, file=file, overrides=overrides, base=base)
