"""A preset brings its recipe, and everything else still goes over it."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config.load import dump_toml
from penstock.config.model import PRESETS
from penstock.config.recipes import RUNS, load_run, preset_run
from penstock.config.run import Recipe, RunConfig
from penstock.errors import ConfigError


def test_digits_are_neither_mirrored_nor_cropped_hard() -> None:
    augment = preset_run("vit-digits").recipe.augment
    assert augment.flip == 0.0
    assert augment.crop_scale_min >= 0.5


def test_every_recipe_is_that_of_its_preset() -> None:
    assert all(run.model == PRESETS[name] for name, run in RUNS.items())


def test_a_preset_without_a_recipe_has_the_general_one() -> None:
    run = preset_run("vit-s16")
    assert (run.model, run.recipe, run.output) == (PRESETS["vit-s16"], Recipe(), "runs/vit-s16")
    with pytest.raises(ConfigError, match="vit-s16"):
        preset_run("vit-s17")


def test_the_digits_are_what_is_trained_when_nothing_is_said() -> None:
    assert load_run() == preset_run("vit-digits")


def test_file_and_command_line_go_over_the_preset(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('model = "vit-digits"\n[recipe]\nlr = 0.5\nepochs = 3.0\n')
    run = load_run(file=file, overrides={"recipe.lr": "0.25"})
    assert (run.recipe.lr, run.recipe.epochs) == (0.25, 3.0)
    assert run.recipe.augment == RUNS["vit-digits"].recipe.augment
    assert run.output == "runs/vit-digits"
    assert load_run(file=file, overrides={"model": "vit-ti16"}).recipe == Recipe(lr=0.5, epochs=3.0)


def test_a_model_written_out_brings_no_recipe(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[model]\nwidth = 192\n")
    assert load_run(file=file).recipe == Recipe()


def test_a_stored_run_comes_back_as_it_was(tmp_path: Path) -> None:
    run = RunConfig(recipe=Recipe(lr=0.125))
    file = tmp_path / "run.toml"
    file.write_text(dump_toml(run))
    assert load_run(file=file) == run


def test_an_unknown_model_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="vit-digits"):
        load_run(overrides={"model": "vit-digit"})
