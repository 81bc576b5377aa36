"""Values that no run could mean are refused when the configuration is made."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.config.load import from_dict, load
from penstock.config.model import ViTConfig
from penstock.config.plan import Plan
from penstock.config.removed import removed, without_removed
from penstock.config.run import Augment, DataConfig, Recipe, RunConfig
from penstock.errors import ConfigError


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DataConfig(source="imagefoldr:x"), "pack:PATH or hf:NAME. Did you mean 'imagefolder'?"),
        (lambda: DataConfig(source="imagefolder"), "data.source is 'imagefolder'"),
        (lambda: DataConfig(source="digits:x"), "data.source is 'digits:x'"),
        (lambda: DataConfig(source="text"), "data.source is 'text'"),
        (lambda: DataConfig(source="text:a=0.5,text:b=0"), "gives 'text:b' no weight"),
        (lambda: DataConfig(source="text:a=1,digits=2"), "'digits' among several, but only texts are mixed"),
        (lambda: DataConfig(workers=-1), "data.workers is -1, but must be at least 0."),
        (lambda: Recipe(lr=0.0), "recipe.lr is 0.0, but must be above 0."),
        (lambda: Recipe(lr=float("nan")), "recipe.lr is nan"),
        (lambda: Recipe(steps=0), "recipe.steps is 0"),
        (lambda: Recipe(clip_norm=-1.0), "recipe.clip_norm is -1.0"),
        (lambda: Recipe(ema_decay=1.5), "recipe.ema_decay is 1.5, but must be at least 0 and below 1."),
        (lambda: Augment(erase=1.5), "recipe.augment.erase is 1.5"),
        (lambda: Augment(mixup=-0.1), "recipe.augment.mixup is -0.1"),
        (lambda: RunConfig(device="gpu"), "device is 'gpu', but must be auto, cpu, cuda or cuda:N."),
        (lambda: RunConfig(keep=1), "keep is 1, but must be at least 2."),
        (lambda: RunConfig(output=""), "output is '', but must not be empty"),
        (lambda: Plan(precision="O7"), "plan.precision is 'O7', but must be 'O0'"),  # type: ignore[arg-type]
        (lambda: Plan(micro_batch=0), "plan.micro_batch is 0, but must be at least 1."),
        (lambda: Plan(accumulate=-1), "plan.accumulate is -1"),
        (lambda: Plan(micro_batch=2.5), "plan.micro_batch is 2.5"),  # type: ignore[arg-type]
        (lambda: ViTConfig(image_size=225), "the nearest multiples are 224 or 240."),
        (lambda: ViTConfig(heads=7), "cannot be split over model.heads 7"),
        (lambda: ViTConfig(depth=0, width=0), "model.depth is 0"),
        (lambda: ViTConfig(stem="conv", patch_size=14), "must be a power of two"),
        (lambda: ViTConfig(drop_path=1.0), "model.drop_path is 1.0, but must be at least 0 and below 1."),
        (lambda: ViTConfig(classifier="mean"), "model.classifier is 'mean'"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_impossible_values_say_what_is_possible(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert message in str(caught.value)


def test_tokens_count_the_class_token() -> None:
    assert ViTConfig().tokens == 197
    assert ViTConfig(classifier="pooled").tokens == 196


def test_a_path_alone_is_answered_with_the_form_that_fits(tmp_path: Path) -> None:
    files = {
        "photos/cat/1.JPG": "imagefolder:{}", "photos/dog/2.png": "imagefolder:{}",
        "flat/1.jpg": "no folder for each class",
        "rows.csv": "text:{}, or pairs:{} for rows of two texts", "notes/a.txt": "text:{}", "notes/b.md": "text:{}",
        "shards/0.tar": "penstock pack {} TARGET", "packed/manifest.json": "pack:{}", "strange/x.bin": "hf:NAME.",
    }  # fmt: skip
    for name, words in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        given = tmp_path / name.split("/")[0]
        with pytest.raises(ConfigError, match=re.escape(words.replace("{}", str(given)))):
            DataConfig(source=str(given))
    with pytest.raises(ConfigError, match=r"There is nothing at .*/nowhere either"):
        DataConfig(source=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="gives 'text:a' no weight"):
        DataConfig(source=f"text:a={'9' * 400},text:b=1")
    with pytest.raises(ConfigError, match="Did you mean 'stdlib'"):
        DataConfig(source="stdlb")


SETTINGS = removed("settings")
# What earlier versions had is refused by name, with what to use instead; what says the same as its absence is read.


@pytest.mark.parametrize(
    "key",
    [key for key, one in SETTINGS.items() if "same" in one and key.startswith(("Plan", "Recipe"))],
)
def test_a_removed_setting_is_refused_by_name_in_files_and_options(key: str) -> None:
    name = key[0].lower() + key[1:]
    section, _, field = name.partition(".")
    instead, same = SETTINGS[key]["instead"], SETTINGS[key]["same"]
    for values in ({name: "something"}, {section: {field: "something"}}):
        with pytest.raises(ConfigError, match=rf"{name}=something was removed; ") as problem:
            load(RunConfig, overrides={"model": "vit-digits", **values})
        assert instead in str(problem.value)
    for value in same:
        stored: dict[str, Any] = {"model": {"family": "vit"}, section: {field: value}}
        assert from_dict(RunConfig, stored) == from_dict(RunConfig, {"model": {"family": "vit"}})
        stored[section][field] = "something"
        assert field not in without_removed(stored)[section]


@pytest.mark.parametrize(
    "values", [{"recipe.lora.also": "tokens"}, {"recipe": {"lora": {"also": ["tokens"]}}}]
)
def test_a_renamed_setting_is_read_by_its_former_name(values: dict[str, Any]) -> None:
    read = load(RunConfig, overrides={"model": "gpt-tiny", "recipe.lora.rank": 2, **values})
    assert read.recipe.lora.trained_parts == ("tokens",)


@pytest.mark.parametrize("path", ["model.router", "model.decoder.router"])
@pytest.mark.parametrize("value", SETTINGS["Stack.router"]["values"])
def test_a_removed_router_is_refused_by_name(path: str, value: str) -> None:
    family = "encoder" if path == "model.router" else "seq2seq"
    with pytest.raises(ConfigError, match=rf"{path}={value} was removed; use softmax"):
        load(RunConfig, overrides={"model.family": family, path: value})


def test_a_plan_with_what_was_removed_is_refused_as_a_line_too() -> None:
    assert Plan.parse("precision=O2 master=copy") == Plan(precision="O2")
    with pytest.raises(
        ConfigError, match=r"plan\.master=remainder was removed; leave it out: precision=O2 keeps"
    ):
        Plan.parse("precision=O2 master=remainder")
