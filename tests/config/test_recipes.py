"""A preset brings its recipe, and everything else still goes over it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.plan_config import PlanConfig
from penstock.config.compress import Distil
from penstock.config.convert import EXCLUSIVE
from penstock.config.load import dump_toml
from penstock.config.model import PRESETS
from penstock.config.plan import Plan
from penstock.config.recipes import JOBS, load_run, plan_option
from penstock.config.run import Recipe, RunConfig
from penstock.config.tasks import task_name
from penstock.errors import ConfigError


def preset_run(name: str) -> RunConfig:
    return load_run(overrides={"model": name})


def test_digits_are_neither_mirrored_nor_cropped_hard() -> None:
    augment = preset_run("vit-digits").recipe.augment
    assert augment.flip == 0.0
    assert augment.crop_scale_min >= 0.5


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
    assert run.recipe.augment == preset_run("vit-digits").recipe.augment
    assert run.output == "runs/vit-digits"
    assert load_run(file=file, overrides={"model": "vit-ti16"}).recipe == Recipe(lr=0.5, epochs=3.0)


def test_a_plan_line_without_a_batch_keeps_the_one_that_was_set(tmp_path: Path) -> None:
    assert preset_run("vit-digits").plan.global_batch == 64
    for line, batch in (("precision=O1", 64), ("baseline", 64), ("micro_batch=4", 4), ("accumulate=2", 16)):
        plan = load_run(overrides={"model": "vit-digits", "plan": line}).plan
        assert (plan.global_batch, plan.optimizer) == (batch, "loop"), line
    file = tmp_path / "run.toml"
    file.write_text('plan = "micro_batch=12 optimizer=fused"\n')
    assert load_run(file=file, overrides={"plan": "precision=O1"}).plan == Plan(
        precision="O1", micro_batch=12
    )


def test_a_command_names_the_batch_that_the_preset_would_change() -> None:
    assert plan_option(PRESETS["vit-digits"], Plan()) == '--plan "baseline micro_batch=8"'
    assert plan_option(PRESETS["vit-digits"], Plan(micro_batch=4)) == '--plan "micro_batch=4"'
    assert plan_option(PRESETS["vit-s16"], Plan(precision="O1")) == '--plan "precision=O1"'


def written(folder: Path, text: str) -> Path:
    file = folder / "run.toml"
    file.write_text(f'model = "bert-tiny"\n[recipe]\n{text}')
    return file


def test_of_settings_that_say_the_same_the_higher_layer_counts(tmp_path: Path) -> None:
    """bert-tiny's own recipe has steps and a share of warm-up."""
    assert preset_run("bert-tiny").recipe.total_steps(30, 32) == 340
    of_file = written(tmp_path, "epochs = 4\nwarmup_steps = 0\n")
    recipe = load_run(file=of_file).recipe
    assert (recipe.steps, recipe.epochs, recipe.total_steps(30, 10)) == (None, 4.0, 12)
    assert (recipe.warmup_steps, recipe.warmup_share, recipe.warmup(12)) == (0, None, 0)
    typed = {"recipe.steps": "7", "recipe.warmup_share": "0.5"}
    recipe = load_run(file=of_file, overrides=typed).recipe
    assert (recipe.steps, recipe.epochs, recipe.warmup_steps, recipe.warmup(8)) == (7, None, None, 4)
    recipe = load_run(overrides={"model": "bert-tiny", "recipe.steps": "none"}).recipe
    assert recipe.total_steps(30, 30) == 10, "the general number of epochs"


@pytest.mark.parametrize(
    ("first", "second"), [("steps = 7", "epochs = 3"), ("warmup_steps = 0", "warmup_share = 0.1")]
)
def test_both_in_one_layer_are_an_error_that_names_both(tmp_path: Path, first: str, second: str) -> None:
    file = written(tmp_path, f"{second}\n{first}\n")
    names = [f"recipe.{text.replace(' =', ' is')}" for text in (first, second)]
    with pytest.raises(ConfigError, match=f"In {file}: {names[0]} and {names[1]}.*; keep one") as told:
        load_run(file=file)
    assert len(told.value.problems) == 1
    typed = dict(f"recipe.{text}".split(" = ") for text in (first, second))
    with pytest.raises(ConfigError, match=f"In the command line: {names[0]} and {names[1]}"):
        load_run(overrides=typed)
    with pytest.raises(ConfigError, match=f"{names[0]} and {names[1]}"):
        Recipe(**{name.removeprefix("recipe."): json.loads(value) for name, value in typed.items()})
    load_run(file=written(tmp_path, f"{first}\n{second.split()[0]} = 'none'\n"))


def test_every_pair_names_settings_that_may_be_none() -> None:
    classes = {one.__name__: one for one in (Recipe, Distil, PlanConfig)}
    assert classes.keys() == EXCLUSIVE.keys()
    for name, pairs in EXCLUSIVE.items():
        made = classes[name]()
        assert all(getattr(made, each) is None for pair in pairs for each in pair)


def test_what_is_usual_for_fine_tuning_goes_over_a_presets_steps() -> None:
    start = {"model": "bert-tiny", "task": "sentences", "init_from": "somewhere"}
    recipe = load_run(overrides=start, model_in=lambda _: PRESETS["bert-tiny"]).recipe
    assert (recipe.epochs, recipe.steps) == (3.0, None)


def test_a_model_written_out_brings_no_recipe(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[model]\nwidth = 192\n")
    assert load_run(file=file).recipe == Recipe()


def test_a_stored_run_comes_back_as_it_was(tmp_path: Path) -> None:
    run = RunConfig(recipe=Recipe(lr=0.125))
    file = tmp_path / "run.toml"
    file.write_text(dump_toml(run))
    assert load_run(file=file) == run


def test_the_sizes_of_a_text_model_are_those_of_its_weights() -> None:
    small = replace(PRESETS["bert-tiny"], width=64, max_positions=128)
    start = {"init_from": "somewhere"}
    run = load_run(overrides={"model": "bert-base", **start}, model_in=lambda _: small)
    assert (run.output, run.init_from) == ("runs/bert-base", "somewhere")
    assert run.model == small, "samples as long as the table of positions"
    changed = {"model": "bert-base", "model.dropout": "0", **start}
    assert load_run(overrides=changed, model_in=lambda _: small).model == replace(small, dropout=0.0)
    assert load_run(overrides=start, model_in=lambda _: small).model == small
    wrong: dict[str, dict[str, Any]] = {
        "holds a model of the family encoder, but the preset is of the family deco": {"model": "gpt-tiny"},
        r"task is \['sentences'\], but must be": {"task": ["sentences"]},
    }
    for problem, settings in wrong.items():
        with pytest.raises(ConfigError, match=problem):
            load_run(overrides={**settings, **start}, model_in=lambda _: small)


def test_a_file_that_names_a_preset_may_change_fields_of_the_model_in_the_weights(tmp_path: Path) -> None:
    small = replace(PRESETS["bert-tiny"], width=64, max_positions=128)
    file = tmp_path / "run.yaml"
    file.write_text("model: bert-base\nmodel.dropout: 0.25\ninit_from: somewhere\n")
    assert load_run(file=file, model_in=lambda _: small).model == replace(small, dropout=0.25)


def test_a_vit_keeps_the_size_that_its_preset_says() -> None:
    larger = replace(PRESETS["vit-s16"], image_size=384)
    assert (
        load_run(overrides={"model": "vit-s16", "init_from": "x"}, model_in=lambda _: larger).model
        == PRESETS["vit-s16"]
    )
    assert load_run(overrides={"init_from": "x"}, model_in=lambda _: larger).model == larger
    unknown = load_run(overrides={"model": "vit-s16", "init_from": "x.safetensors"}, model_in=lambda _: None)
    assert unknown.model == PRESETS["vit-s16"]


def test_pairs_that_start_from_weights_are_the_recipe_of_xnli() -> None:
    start = {"model": "bert-base", "task": "pairs", "data": "pairs:xnli.tsv", "init_from": "somewhere"}
    run = load_run(overrides=start, model_in=lambda _: PRESETS["bert-base"])
    recipe = run.recipe
    assert (run.plan.global_batch, recipe.lr, recipe.warmup_share, run.model.tokens) == (32, 5e-5, 0.1, 128)
    assert run.model.max_positions == 512, "the table of positions is that of the weights"
    changed = load_run(overrides={**start, "recipe.lr": "1e-5"}, model_in=lambda _: PRESETS["bert-base"])
    assert (changed.recipe.lr, changed.plan) == (1e-5, run.plan)


@pytest.mark.parametrize("name", JOBS)
def test_every_job_can_be_planned_and_trained(name: str) -> None:
    run = preset_run(name)
    assert run.model == PRESETS[name]
    assert task_name(run.model, run.task)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("vit_small_patch16_224", "vit-s16"), ("vit_small_patch16_224.augreg_in21k_ft_in1k", "vit-s16"),
        ("timm:vit_huge_patch14_224", "vit-h14"), ("google/vit-base-patch16-224-in21k", "vit-b16"),
        ("facebook/deit-small-patch16-224", "vit-s16"), ("bert-base-uncased", "bert-base"), ("gpt2-small", "gpt2"),
        ("openai-community/gpt2-xl", "gpt2-xl"), ("meta-llama/Llama-2-7b-hf", "llama2-7b"),
        ("Qwen/Qwen2-0.5B-Instruct", "qwen2-0.5b"), ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
    ],
)  # fmt: skip
def test_a_name_of_timm_or_transformers_is_answered_with_ours(theirs: str, ours: str) -> None:
    with pytest.raises(ConfigError, match=f"Did you mean '{ours}'"):
        load_run(overrides={"model": theirs})


@pytest.mark.parametrize("steps", [1, 10, 1352])
def test_digits_can_be_trained_for_any_number_of_steps(steps: int) -> None:
    recipe = load_run(overrides={"model": "vit-digits", "recipe.steps": str(steps)}).recipe
    assert recipe.warmup(steps) == (20 if steps == 1352 else 0)
