"""Defaults, file and command line make one configuration, and every mistake in them is told at once."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from penstock.boundary.trees import control_character
from penstock.config.load import dump_toml, from_dict, load, read_file, to_dict
from penstock.config.model import PRESETS, ModelConfig
from penstock.config.plan import Plan
from penstock.config.run import Augment, DataConfig, Recipe, RunConfig
from penstock.errors import ConfigError


def _problems(**arguments: object) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load(RunConfig, **arguments)  # type: ignore[arg-type]
    return caught.value.problems


def _write(folder: Path, text: str, suffix: str = ".toml") -> Path:
    path = folder / f"run{suffix}"
    path.write_text(text, encoding="utf-8")
    return path


def test_nothing_given_is_the_defaults() -> None:
    assert load(RunConfig) == RunConfig()


def test_each_layer_goes_before_the_one_below(tmp_path: Path) -> None:
    file = _write(tmp_path, "seed = 3\noutput = 'x'\n[recipe]\nlr = 0.5\nmin_lr = 0.25\n")
    config = load(RunConfig, file=file, overrides={"seed": "4", "recipe.lr": "1e-2"})
    assert config.seed == 4
    assert config.output == "x"
    assert config.recipe == Recipe(lr=0.01, min_lr=0.25)


def test_base_stands_in_for_the_defaults(tmp_path: Path) -> None:
    base = RunConfig(seed=7, recipe=Recipe(lr=0.5, epochs=3.0))
    config = load(RunConfig, file=_write(tmp_path, "recipe.lr = 0.25"), base=base)
    assert config == RunConfig(seed=7, recipe=Recipe(lr=0.25, epochs=3.0))


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        (".toml", "seed = 3\n[recipe]\nlr = 1e-3\n[recipe.augment]\nmixup = 0.2\n"),
        (".yaml", "seed: 3\nrecipe:\n  lr: 1e-3\n  augment: {mixup: 2e-1}\n"),
        (".yml", "seed: 3\nrecipe.lr: 1e-3\nrecipe.augment.mixup: .2\n"),
        (".json", '{"seed": 3, "recipe": {"lr": 1e-3, "augment.mixup": 0.2}}'),
    ],
)
def test_every_format_means_the_same(tmp_path: Path, suffix: str, text: str) -> None:
    config = load(RunConfig, file=_write(tmp_path, text, suffix))
    assert config == RunConfig(seed=3, recipe=Recipe(lr=1e-3, augment=Augment(mixup=0.2)))


@pytest.mark.parametrize("number", ["1e-3", "1E3", "-1e3", "1.5e-3", "1.e4", ".5e2", "12e+4"])
def test_yaml_numbers_with_exponents_are_floats(tmp_path: Path, number: str) -> None:
    values = read_file(_write(tmp_path, f"value: {number}\nword: '{number}'\n", ".yaml"))
    assert values == {"value": float(number), "word": number}
    assert yaml.safe_load("value: 1e-3") == {"value": "1e-3"}, "PyYAML learned it; the resolver can go"


def test_a_preset_with_changes_in_a_file(tmp_path: Path) -> None:
    text = "[model]\nclassifier = 'pooled'\npreset = 'vit-s16'\n"
    model = load(RunConfig, file=_write(tmp_path, text)).model
    assert (model.width, model.classifier) == (384, "pooled")
    assert load(RunConfig, file=_write(tmp_path, "model = 'vit-b32'")).model == PRESETS["vit-b32"]


def test_a_whole_value_replaces_what_lies_below_and_fields_change_it(tmp_path: Path) -> None:
    file = _write(
        tmp_path, "[plan]\ncompile = 'whole'\n[model]\nclassifier = 'pooled'\n[data]\nworkers = 2\n"
    )
    config = load(
        RunConfig,
        file=file,
        overrides={
            "plan.optimizer": "contiguous",
            "plan": "precision=O1 optimizer=fused",
            "model": "vit-s16",
        },
    )
    assert config.plan == Plan(precision="O1", optimizer="contiguous")
    assert config.model == PRESETS["vit-s16"]
    assert load(RunConfig, file=file, overrides={"data": "pack:x"}).data == DataConfig(
        source="pack:x", workers=2
    )


@pytest.mark.parametrize("turned", [True, False])
def test_a_setting_of_an_earlier_version_goes_where_it_is_said_today(turned: bool) -> None:
    saved = to_dict(PRESETS["deepseek-tiny"])
    saved["latent"]["interleaved"], saved["rotary"]["interleaved"] = turned, False
    config = from_dict(ModelConfig, saved)
    assert config == replace(config, rotary=replace(config.rotary, interleaved=turned))
    assert config.latent == PRESETS["deepseek-tiny"].latent
    typed = {"model.preset": "deepseek-tiny", "model.latent.interleaved": str(turned)}
    assert load(RunConfig, overrides=typed).model == config


def test_objects_and_tables_are_taken_whole() -> None:
    plan = Plan(precision="O1")
    assert load(RunConfig, overrides={"plan": plan, "recipe": {"lr": 2}}) == RunConfig(
        plan=plan, recipe=Recipe(lr=2.0)
    )


def test_all_problems_are_told_at_once_with_their_origin(tmp_path: Path) -> None:
    file = _write(tmp_path, "sed = 3\n[recipe]\nlr = '1e-3'\nwarmupsteps = 4\n")
    problems = _problems(file=file, overrides={"plan.optimizer": "fusd", "recipe.augment.flip": "3"})
    assert len(problems) == 5
    told = "\n".join(problems)
    assert f"In {file}: sed is not a setting. Did you mean 'seed'?" in told
    assert f"In {file}: recipe.warmupsteps is not a setting. Did you mean 'warmup_steps'?" in told
    assert f"In {file}: recipe.lr is '1e-3', but must be a number." in told
    assert "In the command line: plan.optimizer is 'fusd'" in told
    assert "Did you mean 'fused'?" in told
    assert "In the command line: recipe.augment.flip is 3.0, but must be between 0 and 1." in told


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model": "vit-s17"}, "no model preset 'vit-s17'. Did you mean 'vit-s16'?"),
        ({"plan": "fast"}, "'fast' is not a setting"),
        ({"recipe": "fast"}, "recipe is 'fast', but must be a table of"),
        ({"recipe.augment": 3}, "recipe.augment is 3, but must be a table of"),
        ({"recipe": None}, "recipe is none, but must be a table of"),
        ({3: 4}, "the key 3 is not text"),
        ({"seed.x": "1"}, "seed is {'x': '1'}, but must be a whole number"),
    ],
)
def test_wrong_parts(overrides: dict[str, object], message: str) -> None:
    (problem,) = _problems(overrides=overrides)
    assert message in problem


def test_bad_files(tmp_path: Path) -> None:
    _write(tmp_path, "")
    with pytest.raises(
        ConfigError, match=r"file .*runn\.toml cannot be read: it does not exist\. Did you mean 'run\.toml'"
    ):
        read_file(tmp_path / "runn.toml")
    with pytest.raises(ConfigError, match=r"ends in \.txt; use a name that ends in"):
        read_file(tmp_path / "run.txt")
    for suffix, text in ((".toml", "a ="), (".yaml", "a: [1"), (".json", "{")):
        with pytest.raises(ConfigError, match="is not valid"):
            read_file(_write(tmp_path, text, suffix))
    with pytest.raises(ConfigError, match="must hold a table of settings, not list"):
        read_file(_write(tmp_path, "[1, 2]", ".json"))
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        read_file(tmp_path / "folder.toml")
    assert read_file(_write(tmp_path, "", ".yaml")) == {}


def test_the_resolved_configuration_runs_it_again(tmp_path: Path) -> None:
    config = load(
        RunConfig,
        overrides={
            "model": "vit-s16", "recipe.clip_norm": "none", "machine": "h100", "output": 'a"\\\n\té',
            "plan.compile": "blocks",
        },
    )  # fmt: skip
    assert load(RunConfig, file=_write(tmp_path, dump_toml(config))) == config
    assert load(RunConfig, file=_write(tmp_path, json.dumps(to_dict(config)), ".json")) == config
    assert load(RunConfig, file=_write(tmp_path, yaml.safe_dump(to_dict(config)), ".yaml")) == config


_FLOATS = st.floats(min_value=1e-30, max_value=1e30, allow_nan=False)


@given(
    lr=_FLOATS,
    clip=st.none() | _FLOATS,
    seed=st.integers(0, 2**63 - 1),
    output=st.text(min_size=1).filter(lambda text: text.strip() and not control_character(text)),
    machine=st.none() | st.sampled_from(["h100", "./m.toml"]),
)
def test_toml_round_trip_is_exact(
    lr: float, clip: float | None, seed: int, output: str, machine: str | None
) -> None:
    config = RunConfig(recipe=Recipe(lr=lr, clip_norm=clip), seed=seed, output=output, machine=machine)
    assert from_dict(RunConfig, tomllib.loads(dump_toml(config))) == config


@dataclass(frozen=True)
class _Inner:
    size: int


@dataclass(frozen=True)
class _Outer:
    name: str
    table: dict[str, float] = field(default_factory=dict)
    inner: _Inner | None = None
    many: tuple[_Inner, ...] = ()


def test_any_dataclass_can_be_loaded() -> None:
    made = load(
        _Outer,
        overrides={"name": "x", "table": {"a b": 1.5}, "inner.size": "3", "many": [{"size": 1}, {"size": 2}]},
    )
    assert made == _Outer("x", {"a b": 1.5}, _Inner(3), (_Inner(1), _Inner(2)))
    assert from_dict(_Outer, tomllib.loads(dump_toml(made))) == made
    assert load(_Outer, base=made, overrides={"inner": "none"}).inner is None


def test_what_must_be_given_is_named() -> None:
    with pytest.raises(ConfigError, match=r"In the given values: name must be given for _Outer\."):
        from_dict(_Outer, {})
    with pytest.raises(ConfigError, match="size must be given for _Inner"):
        from_dict(_Outer, {"name": "x", "inner": {}})
    with pytest.raises(ConfigError, match="unknown key 'sise'; known are size"):
        from_dict(_Outer, {"name": "x", "many": [{"sise": 1}]})
